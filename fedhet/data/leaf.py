"""LEAF's federated datasets (Caldas et al. 2018): JSON files that name each sample's user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.core.errors import DataError
from fedhet.data.array_cache import Arrays, signature
from fedhet.data.arrays import assemble, check_rows
from fedhet.data.dataset import Dataset
from fedhet.data.files import find_folder, log
from fedhet.data.forms import read_object

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # FEMNIST's classes
ALPHABET = (  # LEAF's alphabet for Shakespeare
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
_FORM = {"users": [str], "num_samples": [int], "user_data": {str: {"x": list, "y": list}}}
WINDOW = 80
SIDE = 28

# (name for messages, x, y) of a user's JSON -> the arrays x and y
Encoder = Callable[[str, list[Any], list[Any]], tuple[np.ndarray, np.ndarray]]


def femnist(*, name: str, data_dir: str, folder: str, **fields: Any) -> Dataset:
    """Load FEMNIST: handwritten characters (1, 28, 28) in 62 classes, dark on white.

    The owner of a sample is its writer.
    """
    return _load(name, data_dir, folder, _images, CHARACTERS, **fields)


def shakespeare(*, name: str, data_dir: str, folder: str) -> Dataset:
    """Load Shakespeare: windows (80,) of token numbers; the label is the next character.

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
    place = find_folder(data_dir, [(folder, ("train/*.json", "test/*.json"))], hint)
    files = {part: sorted((place / part).glob("*.json")) for part in ("train", "test")}
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
    """Return x, y and users of all samples, in the order of the files."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for path in files:
        content = read_object(path, _FORM, _FORM, given=True)
        if len(content["users"]) != len(content["num_samples"]):
            raise DataError(
                f"{path} is damaged: num_samples must have one number for each of its users"
            )
        for user, size in zip(content["users"], content["num_samples"], strict=True):
            source = f"{path}, user {user!r}"
            x, y = (content["user_data"].get(user, {}).get(key) for key in ("x", "y"))
            if x is None or y is None or not len(x) == len(y) == size > 0:
                raise DataError(
                    f"{source}: {len(x or ())} x and {len(y or ())} y, but num_samples is {size};"
                    " the three must be equal, and at least 1"
                )
            if user in found:
                raise DataError(
                    f"{path}: the user {user!r} occurs twice, here or in another file of the"
                    " folder; expected once"
                )
            found[user] = encode(source, x, y)
    if not found:
        raise DataError(f"{', '.join(map(str, files))}: there are no users; expected at least one")
    xs, ys = zip(*found.values(), strict=True)
    return np.concatenate(xs), np.concatenate(ys), np.repeat(list(found), [len(y) for y in ys])


def _images(source: str, x: list[Any], y: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Convert pixels k / 255 into uint8 k; LEAF's files round pixels to four or more decimals."""
    whole = [isinstance(pixels, list) and len(pixels) == SIDE**2 for pixels in x]
    check_rows(source, whole, lambda row: f"expected {SIDE**2} pixels, not {x[row]!r:.60}")
    try:
        levels = np.array(x, np.float64) * 255
    except (TypeError, ValueError) as error:
        raise DataError(f"{source}: expected pixels in [0, 1] ({error})") from error
    pixels = levels.round()
    wrong = ~((np.abs(levels - pixels) < 0.02) & (pixels >= 0) & (pixels <= 255))

    def describe(row: int) -> str:
        pixel = int(wrong[row].argmax())
        return f"pixel {pixel} is {x[row][pixel]}; expected one of 0, 1/255, ... 1"

    check_rows(source, ~wrong.any(1), describe)
    last = len(CHARACTERS) - 1
    good = [type(label) is int and 0 <= label <= last for label in y]
    expected = f"expected a whole number from 0 to {last}"
    check_rows(source, good, lambda row: f"label {y[row]!r}; {expected}")
    return pixels.astype(np.uint8).reshape(-1, 1, SIDE, SIDE), np.array(y, np.int64)


def _text(source: str, x: list[Any], y: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Convert characters into their positions in the alphabet: x int16, y int64."""
    good = [
        isinstance(a, str) and isinstance(b, str) and (len(a), len(b)) == (WINDOW, 1)
        for a, b in zip(x, y, strict=True)
    ]
    check_rows(
        source,
        good,
        lambda row: (
            f"expected {WINDOW} characters and the next one, not {x[row]!r:.60} and {y[row]!r:.60}"
        ),
    )
    return _token_numbers(source, x, WINDOW), _token_numbers(source, y, 1)[:, 0].astype(np.int64)


def _token_numbers(source: str, strings: list[str], length: int) -> np.ndarray:
    """Return the positions of the characters in the alphabet, (n, length) int16."""
    positions = np.full(128, -1, np.int16)
    positions[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    encoded = "".join(strings).encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(encoded, "<u4").reshape(-1, length)
    last = len(positions) - 1
    tokens = np.where(codes <= last, positions[np.minimum(codes, last)], -1).astype(np.int16)
    unknown = tokens < 0
    check_rows(
        source,
        ~unknown.any(1),
        lambda row: (
            f"the character {chr(codes[row][unknown[row].argmax()])!r} is not among LEAF's"
            f" {len(ALPHABET)}: {ALPHABET!r}"
        ),
    )
    return tokens
