"""Folders of images: the user's own, CINIC-10, Tiny ImageNet and the chest X-rays."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.image_data import counts, grey, load, load_folder, save_image, write_images
from PIL import Image

from fedhet.core.errors import ConfigError, DataError

# ---- the user's own images


@pytest.mark.parametrize(("shape", "channels"), [((4, 6), 1), ((4, 6, 3), 3)])
def test_image_folder_keeps_pixels_and_sorts_classes(
    tmp_path: Path, shape: tuple[int, ...], channels: int
) -> None:
    write_images(tmp_path / "mine", shape)
    (tmp_path / "mine" / "train" / "a" / "notes.txt").write_text("not an image")
    data = load_folder(tmp_path)
    assert (data.classes, data.shape) == (("a", "b", "c"), (channels, 4, 6))
    assert data.mean == (0.5,) * channels  # one number stands for all channels
    assert data.y.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert data.test.y.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.x[:, 0, 0, 0].tolist() == [10, 11, 12, 0, 1, 2, 20, 21, 22]
    assert data.test.x[:, -1, -1, -1].tolist() == [10, 11, 0, 1, 20, 21]


def test_jpeg_and_resizing(tmp_path: Path) -> None:
    write_images(tmp_path / "mine", (4, 6), ".JPG")
    save_image(tmp_path / "mine" / "test" / "c" / "large.jpeg", grey(200, (9, 5)))
    message = r"large.jpeg .*\(C, H, W\) = \(1, 9, 5\), .*a/0.JPG .*\(1, 4, 6\)"
    with pytest.raises(DataError, match=message):
        load_folder(tmp_path)
    data = load_folder(tmp_path, size=8)
    assert data.shape == (1, 8, 8)
    assert load_folder(tmp_path, size=8, colours="rgb").shape == (3, 8, 8)
    with pytest.raises(ConfigError, match=r"dataset\.colours=red"):
        load_folder(tmp_path, colours="red")
    assert data.test.x[-1].unique().tolist() == [200]
    for size in (0, -1, 2.5, "8"):
        with pytest.raises(ConfigError, match=r"dataset\.size="):
            load_folder(tmp_path, size=size)


def test_unusable_images_are_named(tmp_path: Path) -> None:
    write_images(tmp_path / "mine", (4, 6))
    bad = tmp_path / "mine" / "train" / "c" / "2.png"
    good = bad.read_bytes()
    for content in (good[:-30], good[:20], b"not an image", b""):
        bad.write_bytes(content)
        with pytest.raises(DataError, match=f"{bad} .*readable image"):
            load_folder(tmp_path)
    save_image(bad, np.zeros((4, 6, 3), np.uint8))
    with pytest.raises(DataError, match=r"2.png .*\(C, H, W\) = \(3, 4, 6\)"):
        load_folder(tmp_path)
    Image.fromarray(np.zeros((4, 6), np.float32)).save(bad, "tiff")
    with pytest.raises(DataError, match=r"2.png .*PIL's mode 'F'"):
        load_folder(tmp_path)
    save_image(bad, grey(0))
    (tmp_path / "mine" / "test" / "d").mkdir()
    with pytest.raises(DataError, match=r"class folders \['d'\].*\['a', 'b', 'c'\]"):
        load_folder(tmp_path)


def test_folder_without_images(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / "mine" / part / "a").mkdir(parents=True)
    with pytest.raises(DataError, match=r"mine/train/a .*images"):
        load_folder(tmp_path)
    (tmp_path / "mine" / "train" / "a").rmdir()
    with pytest.raises(DataError, match=r"mine/train .*images"):
        load_folder(tmp_path)


def test_images_of_all_kinds_are_read(tmp_path: Path) -> None:
    write_images(tmp_path / "mine", (4, 6))
    kinds = ["jpg", "JPEG", "webp", "WebP", "tif", "TIF", "tiff", "bmp", "BMP", "PNG"]
    for i, kind in enumerate(kinds):
        save_image(tmp_path / "mine" / "test" / "c" / f"x{i}.{kind}", grey(0))
    assert len(load_folder(tmp_path, colours="grey").test.y) == 6 + len(kinds)


def test_what_is_not_read_is_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedhet.data")
    place = tmp_path / "mine"
    write_images(place, (4, 6))
    (place / ".cache" / "deep").mkdir(parents=True)
    for hidden in (".cache/deep/0.png", "train/a/._0.png", "train/.DS_Store"):
        (place / hidden).touch()
    load_folder(tmp_path)
    assert "not read" not in caplog.text
    (place / "train" / "a" / "0.gif").touch()
    load_folder(tmp_path)  # the arrays are cached, and it is said again
    assert f"{place}: 1 file is not read: train/a/0.gif" in caplog.messages
    (place / "valid" / "a").mkdir(parents=True)
    for other in ("labels.csv", "test/0.png", "train/a/1.dcm", "valid/a/0.png"):
        (place / other).touch()
    load_folder(tmp_path)
    named = "labels.csv, test/0.png, train/a/0.gif and 2 more"
    assert caplog.messages[-1] == f"{place}: 5 files are not read: {named}"


def test_a_folder_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "mine", (4, 6))
    closed = tmp_path / "mine" / "train" / "a" / "closed"
    closed.mkdir()
    scan = os.scandir

    def scandir(path: str) -> Any:  # this process may be root's, whom no folder refuses
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"closed .*read: Permission denied"):
        load_folder(tmp_path)


def test_a_class_without_images_and_a_broken_link(tmp_path: Path) -> None:
    write_images(tmp_path / "mine", (4, 4, 3))
    (tmp_path / "mine" / "train" / "b2").mkdir()  # would be a class
    with pytest.raises(DataError, match=r"mine/train/b2 .*images"):
        load_folder(tmp_path)
    (tmp_path / "mine" / "train" / "b2").rmdir()
    (tmp_path / "mine" / "test" / "b" / "9.png").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"test/b/9\.png .*read: No .*file"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("folder", 5), ("folder", None), ("mean", "automatic"), ("std", 0.5), ("mean[0]", ["x"])],
)
def test_settings_of_the_wrong_type_are_named(tmp_path: Path, key: str, value: object) -> None:
    write_images(tmp_path / "mine", (4, 4, 3))
    keys = {"folder": "mine", key.partition("[")[0]: value}
    with pytest.raises(ConfigError, match=rf"^dataset\.{re.escape(key)}="):
        load("image_folder", data_dir=str(tmp_path), **keys)


# ---- published datasets


def test_cinic10_is_coloured_throughout(tmp_path: Path) -> None:
    write_images(tmp_path / "CINIC-10", (32, 32, 3))
    save_image(tmp_path / "CINIC-10" / "train" / "a" / "0.png", grey(200, (32, 32)))
    data = load("cinic10", data_dir=str(tmp_path), augment="crop_flip")
    assert data.x[0].unique().tolist() == [200] and data.x.shape == (9, 3, 32, 32)
    with pytest.raises(ConfigError, match=r"dataset\.augment=flip .*none, crop_flip"):
        load("cinic10", data_dir=str(tmp_path), augment="flip")


def test_tiny_imagenet(tmp_path: Path) -> None:
    place = tmp_path / "tiny-imagenet-200"
    for c, name in enumerate(("n02", "n01")):
        folder = place / "train" / name / "images"
        folder.mkdir(parents=True)
        for i in range(2):
            save_image(folder / f"{name}_{i}.JPEG", np.full((64, 64, 3), 10 * c + i, np.uint8))
    (place / "val" / "images").mkdir(parents=True)
    # some of the publisher's images are grey
    save_image(place / "val" / "images" / "val_0.JPEG", grey(100, (64, 64)))
    annotations = place / "val" / "val_annotations.txt"
    annotations.write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n")
    data = load("tiny_imagenet", data_dir=str(tmp_path))
    assert data.classes == ("n01", "n02")
    assert (data.y.tolist(), data.test.y.tolist()) == ([0, 0, 1, 1], [1])
    assert data.x[:, 0, 0, 0].tolist() == [10, 11, 0, 1] and data.test.x.shape == (1, 3, 64, 64)
    for content, message in (
        (
            b"val_0.JPEG\tn02\nval_0.JPEG\tn03\t0\n",
            "row 1: 'val_0.JPEG.*n03.*one .*2 folders",
        ),
        (b"val_0.JPEG\tn02\nval_1.JPEG\tn01\n", "val_1.JPEG .*read"),
        (b"", "annotations.txt .*empty"),
        (b"\xff", "annotations.txt .*damaged"),
    ):
        annotations.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load("tiny_imagenet", data_dir=str(tmp_path))


def test_real_chest_xray_is_owned_by_its_sources(real: str) -> None:
    data = load("chest_xray", data_dir=real)
    assert (data.shape, data.classes) == ((1, 64, 64), ("NORMAL", "PNEUMONIA"))
    assert data.owner_names == ("kermany", "nih_chestxray8")
    assert data.owners is not None
    for owner in (0, 1):
        assert counts(data.y[torch.from_numpy(data.owners == owner)]) == [75, 75]
    assert counts(data.test.y) == [50, 50]
    one = load("chest_xray", data_dir=real, sources=["nih_chestxray8"])
    assert torch.equal(one.x, data.x[data.owners == 1]) and one.owner_names == ("nih_chestxray8",)
    only = load("chest_xray", data_dir=real, folder="chest_xray/kermany")  # without siblings
    assert only.owner_names == ("kermany",)
    assert load("chest_xray", data_dir=real, size=32).shape == (1, 32, 32)
    with pytest.raises(DataError, match=r"chest_xray .*nobody/train/, nobody/test/"):
        load("chest_xray", data_dir=real, sources=["nobody"])


@pytest.mark.parametrize("sources", ["kermany", [], ["a", "a"], [5]])
def test_sources_are_distinct_folders(sources: object) -> None:
    with pytest.raises(ConfigError, match=r"^dataset\.sources"):
        load("chest_xray", data_dir="/nowhere", sources=sources)


def test_the_second_load_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "chest_xray" / "here", (4, 4))
    first = load("chest_xray", data_dir=str(tmp_path), size=4)
    with monkeypatch.context() as patched:
        patched.setattr("fedhet.data.images.read_images", None)
        again = load("chest_xray", data_dir=str(tmp_path), size=4)
        patched.setattr("fedhet.data.images._DECODER", 99)
        with pytest.raises(TypeError):  # another decoder decodes again
            load("chest_xray", data_dir=str(tmp_path), size=4)
    assert torch.equal(again.x, first.x) and torch.equal(again.test.x, first.test.x)
    changed = tmp_path / "chest_xray" / "here" / "train" / "a" / "0.png"
    save_image(changed, grey(77, (4, 4)))
    assert 77 in load("chest_xray", data_dir=str(tmp_path), size=4).x  # the change is noticed
