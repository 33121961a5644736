"""Further loaders: the real subsets' counts, and stand-ins in each publisher's layout."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import pickle  # only to write what CIFAR-100's publisher ships
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from data.test_datasets import counts, folder, idx, load, write_images
from PIL import Image
from pyarrow import parquet

from fedhet.data.dataset import Dataset
from fedhet.errors import ConfigError, DataError


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


# ---- the real subsets


def test_real_cifar100(real: str) -> None:
    data = load("cifar100", data_dir=real, folder="cifar100_sample")
    assert data.shape == (3, 32, 32) and len(data.classes) == 100
    assert (counts(data.y), counts(data.test.y)) == ([5] * 100, [1] * 100)
    first = parquet.read_table(f"{real}/cifar100_sample/train.parquet")["img"][0].as_py()["bytes"]
    assert np.array_equal(data.x[0].permute(1, 2, 0), Image.open(io.BytesIO(first)))
    pixels = data.x.float().div(255).transpose(0, 1).flatten(1)
    # 500 images; the yaml has those of 50,000
    assert pixels.mean(1).numpy() == pytest.approx(data.mean, abs=0.03)
    assert pixels.std(1).numpy() == pytest.approx(data.std, abs=0.03)


def test_real_chest_xray_is_owned_by_its_sources(real: str) -> None:
    data = load("chest_xray", data_dir=real)
    assert (data.shape, data.classes, data.owner_names) == (
        (1, 64, 64),
        ("NORMAL", "PNEUMONIA"),
        ("kermany", "nih_chestxray8"),
    )
    assert data.owners is not None
    for owner in (0, 1):
        assert counts(data.y[torch.from_numpy(data.owners == owner)]) == [75, 75]
    assert counts(data.test.y) == [50, 50]
    one = load("chest_xray", data_dir=real, sources=["nih_chestxray8"])
    assert torch.equal(one.x, data.x[data.owners == 1]) and one.owner_names == ("nih_chestxray8",)
    assert load("chest_xray", data_dir=real, folder="chest_xray/kermany").owner_names == (
        "kermany",
    )  # a source without siblings
    assert load("chest_xray", data_dir=real, size=32).shape == (1, 32, 32)
    with pytest.raises(DataError, match="chest_xray with nobody/train/, nobody/test/"):
        load("chest_xray", data_dir=real, sources=["nobody"])


@pytest.mark.parametrize("sources", ["kermany", [], ["a", "a"], [5]])
def test_sources_are_different_folders(sources: object) -> None:
    with pytest.raises(ConfigError, match=r"^dataset\.sources"):
        load("chest_xray", data_dir="/nowhere", sources=sources)


def test_the_second_load_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "chest_xray" / "here", (4, 4))
    first = load("chest_xray", data_dir=str(tmp_path), size=4)
    with monkeypatch.context() as patched:
        patched.setattr("fedhet.data.images.read_images", None)
        again = load("chest_xray", data_dir=str(tmp_path), size=4)
    assert torch.equal(again.x, first.x) and torch.equal(again.test.x, first.test.x)
    Image.fromarray(np.full((4, 4), 77, np.uint8)).save(
        tmp_path / "chest_xray" / "here" / "train" / "a" / "0.png"
    )
    assert 77 in load("chest_xray", data_dir=str(tmp_path), size=4).x  # a changed file is seen


# ---- EMNIST


@pytest.mark.parametrize(
    ("split", "classes", "first", "names"),
    [("balanced", 47, 0, "0Aa"), ("letters", 26, 1, "az"), ("byclass", 62, 0, "0Aa")],
)
def test_emnist(tmp_path: Path, split: str, classes: int, first: int, names: str) -> None:
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    picture = np.arange(20, dtype=np.uint8).reshape(4, 5)
    for part, n in (("train", classes), ("test", 2)):
        idx(
            raw / f"emnist-{split}-{part}-images-idx3-ubyte", np.stack([picture.T] * n)
        )  # the publisher's are on their side
        idx(raw / f"emnist-{split}-{part}-labels-idx1-ubyte", np.arange(n) + first)
    data = load("emnist", data_dir=str(tmp_path), split=split)
    assert np.array_equal(data.x[0, 0], picture)
    assert data.y.tolist() == list(range(classes)) and len(data.classes) == classes
    assert set(names) <= set(data.classes)
    with pytest.raises(
        ConfigError, match=r"dataset\.split=letter is not allowed \(did you mean letters\?"
    ):
        load("emnist", data_dir=str(tmp_path), split="letter")
    idx(raw / f"emnist-{split}-train-labels-idx1-ubyte", np.arange(classes) + first + 1)
    with pytest.raises(
        DataError,
        match=(
            f"row {classes - 1} has label {first + classes}; labels go from {first} to"
            f" {first + classes - 1}"
        ),
    ):
        load("emnist", data_dir=str(tmp_path), split=split)


# ---- CIFAR-100


def cifar100(tmp_path: Path) -> Dataset:
    return load("cifar100", data_dir=str(tmp_path))


def test_cifar100_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torchvision.datasets import CIFAR100

    place = tmp_path / "cifar-100-python"
    place.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    content = {
        "train": {
            "data": pixels[:2].reshape(2, -1),
            "fine_labels": [99, 3],
            "coarse_labels": [1, 2],
        },
        "test": {"data": pixels[2:].reshape(1, -1), "fine_labels": [0], "coarse_labels": [0]},
        "meta": {"fine_label_names": [f"class {i}" for i in range(100)]},
    }
    sums = {}
    for file, value in content.items():
        (place / file).write_bytes(pickle.dumps(value))
        sums[file] = hashlib.md5((place / file).read_bytes()).hexdigest()
    monkeypatch.setattr(CIFAR100, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": sums["meta"]})
    caplog.set_level(logging.INFO, "fedhet")
    data = cifar100(tmp_path)
    assert f"torchvision's batches in {place}" in caplog.text
    assert np.array_equal(data.x, pixels[:2]) and np.array_equal(data.test.x, pixels[2:])
    assert (data.y.tolist(), data.test.y.tolist(), data.classes[99]) == ([99, 3], [0], "class 99")
    (place / "meta").write_bytes(b"other")
    with pytest.raises(DataError, match="meta is damaged"):
        cifar100(tmp_path)


def table(
    path: Path,
    labels: list[int | None],
    column: str = "img",
    names: list[str] | None = None,
    side: int = 32,
) -> None:
    images = [
        {"bytes": png(np.full((side, side, 3), i, np.uint8)), "path": None}
        for i in range(len(labels))
    ]
    about = {"info": {"features": {"fine_label": {"names": names} if names else {}}}}
    schema = pa.table({column: images, "fine_label": labels}).replace_schema_metadata(
        {"huggingface": json.dumps(about)}
    )
    parquet.write_table(schema, path)


def test_cifar100_parquet(tmp_path: Path) -> None:
    place = tmp_path / "cifar100"
    place.mkdir()
    table(place / "train-00000-of-00002.parquet", [5, 99], names=[f"name {i}" for i in range(100)])
    table(place / "train-00001-of-00002.parquet", [7])
    table(place / "test.parquet", [0])
    data = cifar100(tmp_path)
    assert (data.y.tolist(), data.test.y.tolist(), data.classes[5]) == ([5, 99, 7], [0], "name 5")
    assert data.x[:, 0, 0, 0].tolist() == [0, 1, 0]
    wrong = place / "train-00001-of-00002.parquet"
    for write, said in (
        (lambda: table(wrong, [0, 100]), "row 1 has label 100; labels go from 0 to 99"),
        (lambda: table(wrong, [0], side=16), r"\(3, 16, 16\)"),
        (lambda: table(wrong, [0, None]), "labels are float64; whole numbers"),
        (
            lambda: table(wrong, [1], "image"),
            r"has no column \['img'\]; its columns are \['image', 'fine_label'\]",
        ),
        (lambda: table(wrong, []), "holds no row|not a readable Parquet file with images"),
        (lambda: wrong.write_bytes(wrong.read_bytes()[:-9]), "not a readable Parquet file"),
        (
            lambda: parquet.write_table(pa.table({"img": [b"x"], "fine_label": [1]}), wrong),
            "not a readable Parquet file with images",
        ),
        (
            lambda: parquet.write_table(
                pa.table({"img": [{"bytes": b"x"}], "fine_label": [1]}), wrong
            ),
            "row 0 is not a readable image",
        ),
    ):
        write()
        with pytest.raises(DataError, match=said) as caught:
            cifar100(tmp_path)
        assert str(wrong) in str(caught.value)


def test_cifar100_image_folder(tmp_path: Path) -> None:
    write_images(tmp_path / "cifar100", (32, 32, 3))
    data = cifar100(tmp_path)
    assert (data.classes, data.shape) == (("a", "b", "c"), (3, 32, 32))


# ---- folders


def test_cinic10_is_coloured_throughout(tmp_path: Path) -> None:
    write_images(tmp_path / "CINIC-10", (32, 32, 3))
    grey = tmp_path / "CINIC-10" / "train" / "a" / "0.png"
    Image.fromarray(np.full((32, 32), 200, np.uint8)).save(grey)
    data = load("cinic10", data_dir=str(tmp_path), augment="crop_flip")
    assert data.x[0].unique().tolist() == [200] and data.x.shape == (9, 3, 32, 32)
    with pytest.raises(ConfigError, match=r"dataset\.augment=flip is not allowed.*none, crop_flip"):
        load("cinic10", data_dir=str(tmp_path), augment="flip")


def test_tiny_imagenet(tmp_path: Path) -> None:
    place = tmp_path / "tiny-imagenet-200"
    for c, name in enumerate(("n02", "n01")):
        (place / "train" / name / "images").mkdir(parents=True)
        for i in range(2):
            Image.fromarray(np.full((64, 64, 3), 10 * c + i, np.uint8)).save(
                place / "train" / name / "images" / f"{name}_{i}.JPEG"
            )
    (place / "val" / "images").mkdir(parents=True)
    Image.fromarray(np.full((64, 64), 100, np.uint8)).save(
        place / "val" / "images" / "val_0.JPEG"
    )  # some of the publisher's are grey
    annotations = place / "val" / "val_annotations.txt"
    annotations.write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n")
    data = load("tiny_imagenet", data_dir=str(tmp_path))
    assert (data.classes, data.y.tolist(), data.test.y.tolist()) == (
        ("n01", "n02"),
        [0, 0, 1, 1],
        [1],
    )
    assert data.x[:, 0, 0, 0].tolist() == [10, 11, 0, 1] and data.test.x.shape == (1, 3, 64, 64)
    for line, said in (
        ("val_0.JPEG\tn03\t0", "row 1 is 'val_0.JPEG.*n03.*one of the 2 folders"),
        ("val_1.JPEG\tn01", "row 1 names .*val_1.JPEG"),
    ):
        annotations.write_text(f"val_0.JPEG\tn02\n{line}\n")
        with pytest.raises(DataError, match=said):
            load("tiny_imagenet", data_dir=str(tmp_path))
    for content, said in (
        (b"", "annotations.txt is empty"),
        (b"\xff", "annotations.txt is damaged"),
    ):
        annotations.write_bytes(content)
        with pytest.raises(DataError, match=said):
            load("tiny_imagenet", data_dir=str(tmp_path))


def test_a_class_without_images_and_a_link_to_nowhere(tmp_path: Path) -> None:
    write_images(tmp_path / "mine", (4, 4, 3))
    (tmp_path / "mine" / "train" / "b2").mkdir()  # would be a class
    with pytest.raises(DataError, match="mine/train/b2 holds no image"):
        folder(tmp_path)
    (tmp_path / "mine" / "train" / "b2").rmdir()
    (tmp_path / "mine" / "test" / "b" / "9.png").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"test/b/9\.png cannot be read: No such file"):
        folder(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("folder", 5), ("folder", None), ("mean", "auto"), ("std", 0.5), ("mean[0]", ["x"])],
)
def test_settings_of_another_kind_are_named(tmp_path: Path, key: str, value: object) -> None:
    write_images(tmp_path / "mine", (4, 4, 3))
    with pytest.raises(ConfigError, match=rf"^dataset\.{re.escape(key)}=.* is not allowed"):
        load(
            "image_folder",
            data_dir=str(tmp_path),
            **{"folder": "mine", key.partition("[")[0]: value},
        )
