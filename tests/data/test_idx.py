"""Idx files: damaged ones, and EMNIST's splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data.image_data import load, write_idx, write_mnist

from fedhet.core.errors import ConfigError, DataError

FILES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("length", [0, 2, 6, -1])
def test_truncated_idx_file_is_named(tmp_path: Path, file: str, length: int) -> None:
    path = write_mnist(tmp_path / "MNIST") / file
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match=f"{path} .*damaged"):
        load("mnist", data_dir=str(tmp_path))


def test_other_wrong_idx_files(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path / "MNIST")
    images = raw / "train-images-idx3-ubyte"

    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message):
            load("mnist", data_dir=str(tmp_path))

    images.write_bytes(b"<html>not found</html>")
    refused("train-images-idx3-ubyte is damaged")
    write_idx(images, np.zeros((11, 5, 6)))
    refused(r"train-images-idx3-ubyte contains 11 images.* 12")
    write_idx(images, np.zeros((12, 5, 5)))
    refused(r"\(1, 5, 5\).*\(1, 5, 6\)")
    write_idx(images, np.zeros((12, 5, 6)))
    write_idx(raw / "t10k-labels-idx1-ubyte", np.array([0, 1, 10, 3]))
    refused("t10k-labels-idx1-ubyte, row 2: label 10; expected a whole number from 0 to 9")


@pytest.mark.parametrize(
    ("split", "classes", "first", "names"),
    [("balanced", 47, 0, "0Aa"), ("letters", 26, 1, "az"), ("byclass", 62, 0, "0Aa")],
)
def test_emnist(tmp_path: Path, split: str, classes: int, first: int, names: str) -> None:
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    picture = np.arange(20, dtype=np.uint8).reshape(4, 5)
    for part, n in (("train", classes), ("test", 2)):
        # the publisher's images are transposed
        images = np.stack([picture.T] * n)
        write_idx(raw / f"emnist-{split}-{part}-images-idx3-ubyte", images)
        write_idx(raw / f"emnist-{split}-{part}-labels-idx1-ubyte", np.arange(n) + first)
    data = load("emnist", data_dir=str(tmp_path), split=split)
    assert np.array_equal(data.x[0, 0], picture)
    assert data.y.tolist() == list(range(classes)) and len(data.classes) == classes
    assert set(names) <= set(data.classes)
    message = r"dataset\.split=letter .*did you mean letters\?"
    with pytest.raises(ConfigError, match=message):
        load("emnist", data_dir=str(tmp_path), split="letter")
    last = first + classes - 1
    write_idx(raw / f"emnist-{split}-train-labels-idx1-ubyte", np.arange(classes) + first + 1)
    message = f"row {classes - 1}: label {last + 1}; expected .*{first} .*{last}"
    with pytest.raises(DataError, match=message):
        load("emnist", data_dir=str(tmp_path), split=split)
