"""CIFAR-10 and CIFAR-100 in each layout: stand-ins for the publishers' files, and a real subset."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle  # only to write files as CIFAR's publisher does
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from data.image_data import counts, load, png, write_images
from PIL import Image
from pyarrow import parquet

from fedhet.core.errors import DataError
from fedhet.data.dataset import Dataset


def pickled(path: Path, content: object) -> str:
    """Write a file as the publisher does; return its md5."""
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


# ---- CIFAR-10


def write_batches(place: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A small stand-in for the published files, with its checksums given to torchvision."""
    from torchvision.datasets import CIFAR10

    place.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
    batches = []
    for i, (file, _) in enumerate(CIFAR10.train_list + CIFAR10.test_list):
        content = {"data": pixels[2 * i : 2 * i + 2].reshape(2, -1), "labels": [i, 9 - i]}
        batches.append([file, pickled(place / file, content)])
    names = {"label_names": [f"class {i}" for i in range(10)]}
    meta = {**CIFAR10.meta, "md5": pickled(place / "batches.meta", names)}
    monkeypatch.setattr(CIFAR10, "train_list", batches[:-1])
    monkeypatch.setattr(CIFAR10, "test_list", batches[-1:])
    monkeypatch.setattr(CIFAR10, "meta", meta)
    return pixels


def test_cifar10_prefers_torchvisions_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path / "cifar10", (32, 32, 3))
    caplog.set_level(logging.INFO, "fedhet")
    assert load("cifar10", data_dir=str(tmp_path)).classes == ("a", "b", "c")
    assert f"the image folder {tmp_path / 'cifar10'}" in caplog.text
    place = tmp_path / "cifar-10-batches-py"
    pixels = write_batches(place, monkeypatch)
    data = load("cifar10", data_dir=str(tmp_path))
    assert f"torchvision's batches in {place}" in caplog.text
    assert np.array_equal(data.x.numpy(), pixels[:10])
    assert np.array_equal(data.test.x.numpy(), pixels[10:])
    assert (data.y.tolist(), data.test.y.tolist()) == ([0, 9, 1, 8, 2, 7, 3, 6, 4, 5], [5, 4])
    assert data.classes[3] == "class 3"
    place.rename(tmp_path / "elsewhere")
    assert torch.equal(load("cifar10", data_dir=str(tmp_path), folder="elsewhere").x, data.x)
    damaged = tmp_path / "elsewhere" / "data_batch_3"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3 .*damaged"):
        load("cifar10", data_dir=str(tmp_path), folder="elsewhere")


# ---- CIFAR-100


def cifar100(tmp_path: Path) -> Dataset:
    return load("cifar100", data_dir=str(tmp_path))


def test_real_cifar100(real: str) -> None:
    data = load("cifar100", data_dir=real, folder="cifar100_sample")
    assert data.shape == (3, 32, 32) and len(data.classes) == 100
    assert (counts(data.y), counts(data.test.y)) == ([5] * 100, [1] * 100)
    first = parquet.read_table(f"{real}/cifar100_sample/train.parquet")["img"][0].as_py()["bytes"]
    assert np.array_equal(data.x[0].permute(1, 2, 0), Image.open(BytesIO(first)))
    pixels = data.x.float().div(255).transpose(0, 1).flatten(1)
    # these are 500 images; the yaml has the mean and std of 50,000
    assert pixels.mean(1).numpy() == pytest.approx(data.mean, abs=0.03)
    assert pixels.std(1).numpy() == pytest.approx(data.std, abs=0.03)


def test_cifar100_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torchvision.datasets import CIFAR100

    place = tmp_path / "cifar-100-python"
    place.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    train = {
        "data": pixels[:2].reshape(2, -1),
        "fine_labels": [99, 3],
        "coarse_labels": [1, 2],
    }
    test = {"data": pixels[2:].reshape(1, -1), "fine_labels": [0], "coarse_labels": [0]}
    names = {"fine_label_names": [f"class {i}" for i in range(100)]}
    meta = {**CIFAR100.meta, "md5": pickled(place / "meta", names)}
    monkeypatch.setattr(CIFAR100, "train_list", [["train", pickled(place / "train", train)]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", pickled(place / "test", test)]])
    monkeypatch.setattr(CIFAR100, "meta", meta)
    caplog.set_level(logging.INFO, "fedhet")
    data = cifar100(tmp_path)
    assert f"torchvision's batches in {place}" in caplog.text
    assert np.array_equal(data.x, pixels[:2]) and np.array_equal(data.test.x, pixels[2:])
    assert (data.y.tolist(), data.test.y.tolist(), data.classes[99]) == ([99, 3], [0], "class 99")
    (place / "meta").write_bytes(b"other")
    with pytest.raises(DataError, match=r"meta .*damaged"):
        cifar100(tmp_path)


def write_table(
    path: Path,
    labels: list[int | None],
    column: str = "img",
    names: list[str] | None = None,
    side: int = 32,
) -> None:
    """A Parquet file as on Hugging Face; image i has the value i."""
    images = [
        {"bytes": png(np.full((side, side, 3), i, np.uint8)), "path": None}
        for i in range(len(labels))
    ]
    metadata = {"info": {"features": {"fine_label": {"names": names} if names else {}}}}
    table = pa.table({column: images, "fine_label": labels})
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(metadata)}), path)


def write_columns(path: Path, image: object) -> None:
    parquet.write_table(pa.table({"img": [image], "fine_label": [1]}), path)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """CIFAR-100 in two training tables and one test table; returns the second training table."""
    place = tmp_path / "cifar100"
    place.mkdir()
    names = [f"name {i}" for i in range(100)]
    write_table(place / "train-00000-of-00002.parquet", [5, 99], names=names)
    write_table(place / "train-00001-of-00002.parquet", [7])
    write_table(place / "test.parquet", [0])
    return place / "train-00001-of-00002.parquet"


WRONG_TABLES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: write_table(path, [0, 100]), "row 1: label 100; expected .*0 .*99"),
    (lambda path: write_table(path, [0], side=16), r"\(3, 16, 16\)"),
    (lambda path: write_table(path, [0, None]), "labels .*float64; .*whole numbers"),
    (
        lambda path: write_table(path, [1], "image"),
        "column 'img'; .*image, fine_label",
    ),
    (
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        "damaged, .*parquet file",
    ),
    (
        lambda path: write_columns(path, b"x"),
        "row 0: b'x' .*image",
    ),
    (lambda path: write_columns(path, {"bytes": b"x"}), "row 0 .*readable image"),
]


def test_cifar100_parquet(tmp_path: Path, tables: Path) -> None:
    data = cifar100(tmp_path)
    assert (data.y.tolist(), data.test.y.tolist(), data.classes[5]) == ([5, 99, 7], [0], "name 5")
    assert data.x[:, 0, 0, 0].tolist() == [0, 1, 0]


@pytest.mark.parametrize(("write", "message"), WRONG_TABLES)
def test_wrong_tables_are_named(
    tmp_path: Path, tables: Path, write: Callable[[Path], object], message: str
) -> None:
    write(tables)
    with pytest.raises(DataError, match=message) as caught:
        cifar100(tmp_path)
    assert str(tables) in str(caught.value)


def test_cifar100_image_folder(tmp_path: Path) -> None:
    write_images(tmp_path / "cifar100", (32, 32, 3))
    data = cifar100(tmp_path)
    assert (data.classes, data.shape) == (("a", "b", "c"), (3, 32, 32))
