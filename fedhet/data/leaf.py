"""LEAF's federated datasets (Caldas et al. 2018): json files that name each sample's user."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.data.array_cache import Arrays, signature, stored
from fedhet.data.arrays import assemble
from fedhet.data.dataset import Dataset
from fedhet.data.files import find
from fedhet.errors import DataError

log = logging.getLogger("fedhet.data")

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # FEMNIST's classes
ALPHABET = (  # LEAF's, for Shakespeare
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
WINDOW = 80
SIDE = 28

Encoder = Callable[[str, list[Any], list[Any]], tuple[np.ndarray, np.ndarray]]


def femnist(
    *, name: str, data_dir: str, folder: str, mean: Sequence[float], std: Sequence[float]
) -> Dataset:
    """FEMNIST: handwritten characters (1, 28, 28) in 62 classes, dark on white; the owner of a
    sample is its writer."""
    return assemble(name, _stored(name, data_dir, folder, _images, CHARACTERS), mean, std)


def shakespeare(*, name: str, data_dir: str, folder: str) -> Dataset:
    """Shakespeare: windows (80,) of token numbers, the label is the next character; the owner of a
    sample is its speaker.

    Tokens and classes are the places of the characters in LEAF's alphabet of 80.
    """
    return assemble(name, _stored(name, data_dir, folder, _text, ALPHABET))


def _stored(name: str, data_dir: str, folder: str, encode: Encoder, classes: str) -> Arrays:
    hint = (
        "Make it with LEAF's preprocess.sh (github.com/TalwalkarLab/leaf, -t sample) and copy its"
        " folders train and test there"
    )
    place = find(data_dir, [(folder, ("train", "test"))], hint)
    files = {part: sorted((place / part).glob("*.json")) for part in ("train", "test")}
    for part, found in files.items():
        if not found:
            raise DataError(
                f"{place / part} holds no *.json; expected LEAF's files of the {part} samples"
            )
    log.info("%s: LEAF's json in %s", name, place)

    def make() -> Arrays:
        x, y, users = _read(files["train"], encode)
        test_x, test_y, _ = _read(files["test"], encode)
        names, owners = np.unique(np.repeat(list(users), list(users.values())), return_inverse=True)
        return {
            "x": x,
            "y": y,
            "test_x": test_x,
            "test_y": test_y,
            "classes": np.array(list(classes)),
            "owners": owners,
            "owner_names": names,
        }

    return stored(
        name,
        {
            "loader": f"leaf.{encode.__name__}",
            "files": signature([*files["train"], *files["test"]]),
        },
        make,
    )


def _read(files: Sequence[Path], encode: Encoder) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """(x, y, user -> number of samples) of all users, in the order of the files and of the users in
    them."""
    parts, sizes = [], {}
    for path in files:
        for user, x, y in _users(path):
            if user in sizes:
                raise DataError(
                    f"{path}: the user {user!r} is there twice, or in another file of this folder"
                    " too; expected once"
                )
            sizes[user] = len(y)
            parts.append(encode(f"{path}, user {user!r}", x, y))
    if not parts:
        raise DataError(f"{', '.join(map(str, files))}: no user is there; expected one at least")
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), sizes


def _users(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """(user, x, y) for each user of a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or not JSON
        raise DataError(
            f"{path} is damaged or cut short: expected LEAF's json ({error})"
        ) from error
    try:
        for user, size in zip(content["users"], content["num_samples"], strict=True):
            x, y = (content["user_data"][user][key] for key in ("x", "y"))
            if not len(x) == len(y) == size:
                raise DataError(
                    f"{path}, user {user!r}: {len(x)} x and {len(y)} y, but num_samples is {size};"
                    " they must be as many"
                )
            if not size:
                raise DataError(f"{path}, user {user!r} has no sample; each user must have one")
            yield user, x, y
    except DataError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is not LEAF's json, users, num_samples and user_data[user][x and y]: {error!r}"
        ) from error


def _images(where: str, x: list[Any], y: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels k / 255 as uint8 k; LEAF's files round them to four decimals or more."""
    for row, pixels in enumerate(x):
        if not isinstance(pixels, list) or len(pixels) != SIDE**2:
            raise DataError(f"{where}, row {row}: expected {SIDE**2} pixels, not {_shown(pixels)}")
    levels = _numbers(where, x, "pixels in [0, 1]") * 255
    whole = levels.round()
    wrong = ~((np.abs(levels - whole) < 0.02) & (whole >= 0) & (whole <= 255))
    if wrong.any():
        row, pixel = np.argwhere(wrong)[0]
        raise DataError(
            f"{where}, row {row}: pixel {pixel} is {x[row][pixel]}; expected one of 0, 1/255, ... 1"
        )
    for row, label in enumerate(y):
        if type(label) is not int or not 0 <= label < len(CHARACTERS):
            raise DataError(
                f"{where}, row {row}: label {label!r}; expected a whole number from 0 to"
                f" {len(CHARACTERS) - 1}"
            )
    return whole.astype(np.uint8).reshape(-1, 1, SIDE, SIDE), np.array(y, np.int64)


def _numbers(where: str, rows: list[Any], expected: str) -> np.ndarray:
    try:
        return np.array(rows, np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: expected {expected} ({error})") from error


def _text(where: str, x: list[Any], y: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Characters as their places in the alphabet, int16."""
    for row, (window, following) in enumerate(zip(x, y, strict=True)):
        if (
            not isinstance(window, str)
            or len(window) != WINDOW
            or not isinstance(following, str)
            or len(following) != 1
        ):
            found = f"{_shown(window)} and {_shown(following)}"
            raise DataError(
                f"{where}, row {row}: expected {WINDOW} characters and the next one, not {found}"
            )
    tokens = _tokens(where, x, WINDOW)
    return tokens, _tokens(where, y, 1)[:, 0].astype(np.int64)


def _tokens(where: str, strings: list[str], length: int) -> np.ndarray:
    """(n, length) int16."""
    known = np.full(128, -1, np.int16)
    known[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    codes = np.frombuffer("".join(strings).encode("utf-32-le", "surrogatepass"), "<u4").reshape(
        -1, length
    )
    tokens = np.where(codes < len(known), known[np.minimum(codes, len(known) - 1)], -1).astype(
        np.int16
    )
    if (tokens < 0).any():
        row, at = np.argwhere(tokens < 0)[0]
        raise DataError(
            f"{where}, row {row}: the character {chr(codes[row, at])!r} is not among LEAF's"
            f" {len(ALPHABET)}: {ALPHABET!r}"
        )
    return tokens


def _shown(value: Any) -> str:
    return (
        f"{type(value).__name__} of length {len(value)}"
        if isinstance(value, str | list)
        else repr(value)
    )
