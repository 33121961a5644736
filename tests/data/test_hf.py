"""Hugging Face's formats, from local folders and its cache, without a network."""

from __future__ import annotations

import socket
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import yaml
from data.image_data import grey, png

from fedhet.core.errors import ConfigError, DataError
from fedhet.data import hf
from fedhet.data.dataset import Dataset

CONF = Path(__file__).parents[2] / "conf" / "dataset"


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The attempts to connect, including those whose failure is caught."""
    attempts: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return attempts


def load(folder: Path | str, **keys: object) -> Dataset:
    conf = yaml.safe_load((CONF / "hf.yaml").read_text())
    assert conf.pop("_target_") == "fedhet.data.hf.hf"
    return hf.hf(**{**conf, "data_dir": str(folder), **keys})


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"dataset=hf .*datasets, .*-e '\.\[hf\]'"):
        load("nowhere", path="here")


def cell(value: int, size: tuple[int, int] = (2, 3)) -> dict[str, Any]:
    """A grey image (H, W) = `size` of one value."""
    return {"bytes": png(grey(value, size)), "path": None}


def write(folder: Path, labels: Any, part: str = "train", **columns: Any) -> Path:
    folder.mkdir(exist_ok=True)
    pandas.DataFrame({**columns, "label": labels}).to_parquet(folder / f"{part}.parquet")
    return folder


def write_images(folder: Path) -> Path:
    """Two splits of grey images with the features that `datasets` would write."""
    import datasets

    label = datasets.ClassLabel(names=["cat", "dog"])
    kinds = datasets.Features(
        {"photo": datasets.Image(), "label": label, "who": datasets.Value("string")}
    )
    folder.mkdir(exist_ok=True)
    for part, values in (("train", [10, 20, 30]), ("test", [40])):
        rows = {
            "photo": [cell(value) for value in values],
            "label": [0, 1, 1][: len(values)],
            "who": ["z", "a", "z"][: len(values)],
        }
        datasets.Dataset.from_dict(rows, features=kinds).to_parquet(folder / f"{part}.parquet")
    return folder


def test_images_with_named_classes(tmp_path: Path, network: list[Any]) -> None:
    write_images(tmp_path / "mine")
    data = load(tmp_path, path="mine", owner="who")
    assert (data.shape, data.x.dtype, data.classes) == ((1, 2, 3), torch.uint8, ("cat", "dog"))
    assert data.x[:, 0, 1, 2].tolist() == [10, 20, 30]
    assert data.test.x[:, 0, 0, 0].tolist() == [40]
    assert (data.y.tolist(), data.test.y.tolist()) == ([0, 1, 1], [0])
    assert data.owner_names == ("a", "z")
    assert data.owners is not None and data.owners.tolist() == [1, 0, 1]
    assert network == []
    assert load(tmp_path, path="mine", size=4).shape == (1, 4, 4)


@pytest.mark.parametrize("mode", [None, "L"])
def test_images_are_those_that_datasets_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    import datasets
    from PIL import Image

    draw = np.random.default_rng(0)
    files = []
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        for orientation in range(1, 9):
            size = (6, 4) if orientation > 4 else (4, 6)
            exif = Image.Exif()
            exif[0x0112] = orientation
            file = BytesIO()
            pixels = draw.integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file, kind, exif=exif)
            files.append({"bytes": file.getvalue(), "path": None})
    kinds = datasets.Features({"photo": datasets.Image(mode), "label": datasets.Value("int64")})
    rows = {"photo": files, "label": [i % 2 for i in range(len(files))]}
    shown = datasets.Dataset.from_dict(rows, features=kinds)
    datasets.DatasetDict(train=shown, test=shown).save_to_disk(tmp_path / "mine")
    data = load(tmp_path, path="mine")
    for x, image in zip(data.x, shown["photo"], strict=True):
        pixels = np.atleast_3d(np.asarray(image.convert(mode or "RGB")))
        assert (x.numpy() == pixels.transpose(2, 0, 1)).all()
    monkeypatch.setattr("fedhet.data.images._DECODER", 99)
    assert load(tmp_path, path="mine").source != data.source


def test_images_with_numbers_or_lists_of_labels(tmp_path: Path) -> None:
    """Class numbers in lists are labels, also where they could be zeros and ones."""
    import datasets

    kinds = datasets.Features(
        {
            "photo": datasets.Image(),
            "angle": datasets.Value("float32"),
            "shows": datasets.Sequence(datasets.ClassLabel(names=["cat", "dog", "cow"])),
        }
    )
    rows = {
        "photo": [cell(value) for value in (10, 20, 30)],
        "angle": [0.5, 1.5, 2.0],
        "shows": [[1, 0], [0, 1], [1, 0]],
    }
    (tmp_path / "mine").mkdir()
    made = datasets.Dataset.from_dict(rows, features=kinds)
    made.to_parquet(tmp_path / "mine" / "train.parquet")
    keys = {"path": "mine", "test": None, "test_fraction": 0.34}
    data = load(tmp_path, **keys, label="angle")
    assert (data.target, data.numbers, data.shape) == ("number", ("angle",), (1, 2, 3))
    angles = {10: 0.5, 20: 1.5, 30: 2.0}
    assert data.y[:, 0].tolist() == [angles[value] for value in data.x[:, 0, 0, 0].tolist()]
    data = load(tmp_path, **keys, label="shows")
    assert (data.target, data.classes) == ("labels", ("cat", "dog", "cow"))
    assert data.y.tolist() == [[1, 1, 0], [1, 1, 0]]


def test_the_held_out_rows_of_a_dataset_without_test_split(tmp_path: Path) -> None:
    columns = {"a": np.arange(10.0), "b": np.ones(10), "note": ["n"] * 10}
    place = write(tmp_path / "t", np.arange(10) % 2, **columns)
    with pytest.raises(DataError, match=r"column 'note': 'n'; .*finite numbers"):
        load(tmp_path, path=str(place), test=None)
    data = load("elsewhere", path=str(place), test=None, features=["a", "b"])
    assert (data.shape, data.classes, len(data.test)) == ((2,), ("0", "1"), 2)
    assert torch.equal(data.x[:, 0].long() % 2, data.y)


def test_a_table_may_miss_cells_and_have_categories(tmp_path: Path) -> None:
    columns = {"a": [1.0, np.nan, 3.0, 4.0], "note": ["n", "m", "n", "o"]}
    place = write(tmp_path / "t", [0, 1, 0, 1], **columns)
    keys: dict[str, Any] = {"path": str(place), "test": None}
    found = load(tmp_path, **keys, missing="drop", categories={"note": ["m", "n", "o"]})
    assert found.columns == ("a", "note_n", "note_o")
    assert found.test is not None
    rows = [*found.x.tolist(), *found.test.x.tolist()]
    assert sorted(rows) == [[1, 1, 0], [3, 1, 0], [4, 0, 1]]
    write_images(tmp_path / "images")
    with pytest.raises(ConfigError, match=r"dataset\.missing=drop.* table "):
        load(tmp_path, path="images", missing="drop")


def test_a_dataset_in_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: list[Any]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "datasets--somebody--pets"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    message = (
        r"(?s)data .*somebody .*pets\. .*"
        r"hf download --repo-type dataset somebody/pets"
    )
    with pytest.raises(DataError, match=message):
        load(tmp_path, path="somebody/pets")
    (repository / "snapshots").mkdir()
    write_images(repository / "snapshots" / ("0" * 40))
    assert load(tmp_path, path="somebody/pets").y.tolist() == [0, 1, 1]
    assert network == []


def test_real_cifar100(real: str, network: list[Any]) -> None:
    data = load(real, path="cifar100_sample", label="fine_label")
    assert (data.shape, data.x.dtype, len(data.classes)) == ((3, 32, 32), torch.uint8, 100)
    assert torch.bincount(data.y).tolist() == [5] * 100
    assert torch.bincount(data.test.y).tolist() == [1] * 100
    assert network == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"label": "kind"},
            r"mine, split 'train' .*column 'kind'; .*photo, label, ",
        ),
        ({"owner": "kind"}, r"split 'train' .*column 'kind'"),
        (
            {"features": "who"},
            r"split 'train', column 'who' .*Value\('string'\), .*images; .*table, .*list"
            r" .*\[who\]",
        ),
        (
            {"train": "trian"},
            r"mine .*split 'trian'; .*train, test\.",
        ),
        ({"subset": "tiny"}, r"mine .*damaged, .*dataset.*tiny"),
    ],
)
def test_wrong_columns_and_splits_are_named(
    tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    write_images(tmp_path / "mine")
    with pytest.raises(DataError, match=message):
        load(tmp_path, path="mine", **keys)


def test_wrong_settings_and_damage_are_named(tmp_path: Path) -> None:
    place = write_images(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"dataset\.path=null"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"dataset\.size=0"):
        load(tmp_path, path="mine", size=0)
    with pytest.raises(ConfigError, match=r"dataset\.train=null"):
        load(tmp_path, path="mine", train=None)
    with pytest.raises(DataError, match=r"column 'photo': .*; .*finite numbers") as caught:
        load(tmp_path, path="mine", features=["photo"])
    assert len(str(caught.value)) < 600  # not the whole image
    train = (place / "train.parquet").read_bytes()
    (place / "train.parquet").write_bytes(train[:-9])
    with pytest.raises(DataError, match=r"mine .*damaged"):
        load(tmp_path, path="mine")


@pytest.mark.parametrize(
    ("photos", "labels", "message"),
    [
        (
            [cell(1), {"bytes": b"no image", "path": None}],
            [0, 1],
            r"split 'train', row 1 .*readable image",
        ),
        ([cell(1), None], [0, 1], r"split 'train', row 1 .*readable image"),
        (
            [cell(1), cell(1, (5, 5))],
            [0, 1],
            r"split 'train', row 1 .*\(C, H, W\) = \(1, 5, 5\), .*row 0 .*\(1, 2, 3\)",
        ),
        (
            [cell(1), cell(2)],
            [0, None],
            r"split 'train', row 1, column 'label': .*value .*missing",
        ),
    ],
)
def test_wrong_rows_are_named(
    tmp_path: Path, photos: list[Any], labels: list[Any], message: str
) -> None:
    import datasets

    kinds = datasets.Features({"photo": datasets.Image(), "label": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict({"photo": photos, "label": labels}, features=kinds)
    (tmp_path / "mine").mkdir()
    rows.to_parquet(tmp_path / "mine" / "train.parquet")
    with pytest.raises(DataError, match=message):
        load(tmp_path, path="mine", test=None, test_fraction=0.5)


def test_what_save_to_disk_has_written(tmp_path: Path) -> None:
    import datasets

    rows = {"a": [0.1, 0.2, 0.3, 0.4], "label": ["x", "y", "y", "x"]}
    train = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict(train=train, test=train.select([2])).save_to_disk(tmp_path / "splits")
    data = load(tmp_path, path="splits")
    assert data.x[:, 0].tolist() == rows["a"]
    assert (data.classes, data.y.tolist()) == (("x", "y"), [0, 1, 1, 0])
    assert data.test is not None and data.test.y.tolist() == [1]

    train.save_to_disk(tmp_path / "whole")
    assert len(load(tmp_path, path="whole", test=None, test_fraction=0.25).y) == 3
    message = r"whole .*split 'test'; .*train\. .*dataset\.test=null"
    with pytest.raises(DataError, match=message):
        load(tmp_path, path="whole")

    (tmp_path / "splits" / "train" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"splits .*damaged"):
        load(tmp_path, path="splits")


def test_csv_files_are_read_by_other_rules(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.csv").write_text("a,label\n.5,01\n.6,02\n.7,01\n.8,02\n")
    assert load(tmp_path, path="mine", test=None, test_fraction=0.5).classes == ("1", "2")
    assert "dataset=csv keeps both" in caplog.text
