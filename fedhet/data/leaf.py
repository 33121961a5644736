"""LEAF's federated datasets (Caldas et al. 2018): JSON files that name each sample's user."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.core.errors import DataError
from fedhet.data.array_cache import Arrays, signature
from fedhet.data.arrays import assemble
from fedhet.data.dataset import Dataset
from fedhet.data.files import find_folder

log = logging.getLogger("fedhet.data")

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # FEMNIST's classes
ALPHABET = (  # LEAF's, for Shakespeare
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
WINDOW = 80
SIDE = 28

# (source for messages, x, y) of a user's JSON -> the arrays x and y
Encoder = Callable[[str, list[Any], list[Any]], tuple[np.ndarray, np.ndarray]]


def femnist(*, name: str, data_dir: str, folder: str, **fields: Any) -> Dataset:
    """FEMNIST: handwritten characters (1, 28, 28) in 62 classes, dark on white.

    The owner of a sample is its writer.
    """
    return _load(name, data_dir, folder, _images, CHARACTERS, **fields)


def shakespeare(*, name: str, data_dir: str, folder: str) -> Dataset:
    """Shakespeare: windows (80,) of token numbers; the label is the next character.

    Tokens and classes are the positions of the characters in LEAF's alphabet of 80. The owner of a
    sample is its speaker.
    """
    return _load(name, data_dir, folder, _text, ALPHABET)


def _load(
    name: str, data_dir: str, folder: str, encode: Encoder, classes: str, **fields: Any
) -> Dataset:
    hint = (
        "Make it with LEAF's preprocess.sh (github.com/TalwalkarLab/leaf, -t sample) and copy its"
        " folders train and test there"
    )
    place = find_folder(data_dir, [(folder, ("train", "test"))], hint)
    files = {part: sorted((place / part).glob("*.json")) for part in ("train", "test")}
    for part, paths in files.items():
        if not paths:
            raise DataError(
                f"{place / part} contains no *.json; expected LEAF's files of the {part} samples"
            )
    log.info("%s: LEAF's JSON in %s", name, place)

    def read() -> Arrays:
        x, y, users = _read(files["train"], encode)
        test_x, test_y, test_owners = _read(files["test"], encode)
        owner_names, owners = np.unique(users, return_inverse=True)
        return {
            "x": x,
            "y": y,
            "test_x": test_x,
            "test_y": test_y,
            "classes": np.array(list(classes)),
            "target": np.array(["class" if encode is _images else "next_char", ""]),
            "owners": owners,
            "owner_names": owner_names,
            "test_owners": test_owners,
        }

    key = {
        "loader": f"leaf.{encode.__name__}",
        "files": signature([*files["train"], *files["test"]]),
    }
    return assemble(name, key, read, **fields)


def _read(files: Sequence[Path], encode: Encoder) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, y and users of all samples, in the order of the files."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for path in files:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # not UTF-8, or not JSON
            raise DataError(
                f"{path} is damaged or truncated: expected LEAF's JSON ({error})"
            ) from error
        try:
            for user, size in zip(content["users"], content["num_samples"], strict=True):
                x, y = (content["user_data"][user][key] for key in ("x", "y"))
                source = f"{path}, user {user!r}"
                if not len(x) == len(y) == size:
                    raise DataError(
                        f"{source}: {len(x)} x and {len(y)} y, but num_samples is {size}; the three"
                        " must be equal"
                    )
                if not size:
                    raise DataError(f"{source} has no samples; expected at least one")
                if user in found:
                    raise DataError(
                        f"{path}: the user {user!r} occurs twice, in this file or in another one of"
                        " the folder; expected once"
                    )
                found[user] = encode(source, x, y)
        except DataError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path} is not LEAF's JSON of users, num_samples and user_data[user][x and y]:"
                f" {error!r}"
            ) from error
    if not found:
        raise DataError(f"{', '.join(map(str, files))}: there are no users; expected at least one")
    xs, ys = zip(*found.values(), strict=True)
    users = np.repeat(list(found), [len(y) for y in ys])
    return np.concatenate(xs), np.concatenate(ys), users


def _images(source: str, x: list[Any], y: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels k / 255 as uint8 k; LEAF's files round them to four decimals or more."""
    for row, pixels in enumerate(x):
        if not isinstance(pixels, list) or len(pixels) != SIDE**2:
            raise DataError(
                f"{source}, row {row}: expected {SIDE**2} pixels, not {_describe(pixels)}"
            )
    try:
        levels = np.array(x, np.float64) * 255
    except (TypeError, ValueError) as error:
        raise DataError(f"{source}: expected pixels in [0, 1] ({error})") from error
    whole = levels.round()
    wrong = ~((np.abs(levels - whole) < 0.02) & (whole >= 0) & (whole <= 255))
    if wrong.any():
        row, pixel = np.argwhere(wrong)[0]
        value = x[row][pixel]
        raise DataError(
            f"{source}, row {row}: pixel {pixel} is {value}; expected one of 0, 1/255, ... 1"
        )
    for row, label in enumerate(y):
        if type(label) is not int or not 0 <= label < len(CHARACTERS):
            raise DataError(
                f"{source}, row {row}: label {label!r}; expected a whole number from 0 to"
                f" {len(CHARACTERS) - 1}"
            )
    return whole.astype(np.uint8).reshape(-1, 1, SIDE, SIDE), np.array(y, np.int64)


def _text(source: str, x: list[Any], y: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Characters as their positions in the alphabet, int16."""
    for row, (window, following) in enumerate(zip(x, y, strict=True)):
        texts = isinstance(window, str) and isinstance(following, str)
        if not texts or (len(window), len(following)) != (WINDOW, 1):
            raise DataError(
                f"{source}, row {row}: expected {WINDOW} characters and the next one, not"
                f" {_describe(window)} and {_describe(following)}"
            )
    tokens = _token_numbers(source, x, WINDOW)
    return tokens, _token_numbers(source, y, 1)[:, 0].astype(np.int64)


def _token_numbers(source: str, strings: list[str], length: int) -> np.ndarray:
    """(n, length) int16."""
    positions = np.full(128, -1, np.int16)
    positions[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    encoded = "".join(strings).encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(encoded, "<u4").reshape(-1, length)
    last = len(positions) - 1
    tokens = np.where(codes <= last, positions[np.minimum(codes, last)], -1).astype(np.int16)
    if (tokens < 0).any():
        row, column = np.argwhere(tokens < 0)[0]
        raise DataError(
            f"{source}, row {row}: the character {chr(codes[row, column])!r} is not among LEAF's"
            f" {len(ALPHABET)}: {ALPHABET!r}"
        )
    return tokens


def _describe(value: Any) -> str:
    """A value in a message: long ones by their type and length."""
    if isinstance(value, str | list):
        return f"{type(value).__name__} of length {len(value)}"
    return repr(value)
