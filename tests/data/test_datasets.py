"""Loaders: the real subsets' counts, where files are looked for, and what damaged files say."""

from __future__ import annotations

import hashlib
import logging
import pickle  # only to write what CIFAR-10's publisher ships
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image

from fedhet.data import images
from fedhet.data.dataset import Dataset
from fedhet.errors import ConfigError, DataError
from fedhet.task import Samples

CONF = Path(__file__).parents[2] / "conf" / "dataset"


def load(name: str, /, **keys: object) -> Dataset:
    conf = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return getattr(images, conf.pop("_target_").split(".")[-1])(**{**conf, **keys})


def counts(y: torch.Tensor) -> list[int]:
    return torch.bincount(y).tolist()


@pytest.mark.parametrize(
    ("name", "shape", "train", "test"),
    [
        ("mnist", (1, 28, 28), 700, 200),
        ("fashion_mnist", (1, 28, 28), 700, 200),
        ("cifar10", (3, 32, 32), 250, 50),
    ],
)
def test_real_subsets_have_the_counts_of_their_readme(
    real: str, name: str, shape: tuple[int, ...], train: int, test: int
) -> None:
    data = load(name, data_dir=real)
    assert data.shape == shape
    assert data.x.dtype == data.test.x.dtype == torch.uint8
    assert counts(data.y) == [train] * 10
    assert counts(data.test.y) == [test] * 10
    # mean and std of the yaml are those of the full sets; evenly spaced subsets of the training set
    # come close
    pixels = data.x.float().div(255).transpose(0, 1).flatten(1)
    assert pixels.mean(1).numpy() == pytest.approx(data.mean, abs=0.01)
    assert pixels.std(1).numpy() == pytest.approx(data.std, abs=0.01)


@pytest.mark.parametrize("source", ["kermany", "nih_chestxray8"])
def test_real_image_folder(real: str, source: str) -> None:
    data = load("image_folder", data_dir=real, folder=f"chest_xray/{source}", name=source)
    assert (data.name, data.shape, data.classes) == (source, (1, 64, 64), ("NORMAL", "PNEUMONIA"))
    assert (counts(data.y), counts(data.test.y)) == ([75, 75], [25, 25])


def test_digits_are_a_fixed_stratified_cut() -> None:
    from sklearn.datasets import load_digits

    data, again = load("digits"), load("digits", data_dir="anywhere")
    assert torch.equal(data.x, again.x) and torch.equal(data.test.y, again.test.y)
    assert data.shape == (1, 8, 8) and data.x.dtype == torch.float32
    every = torch.cat([data.x, data.test.x]).mul(16).flatten(1)
    # every image once
    assert sorted(map(tuple, every.tolist())) == sorted(map(tuple, load_digits().data.tolist()))
    total = counts(torch.from_numpy(load_digits().target))
    assert len(data.test) == 360
    assert all(
        abs(part - 0.2 * whole) <= 1 for part, whole in zip(counts(data.test.y), total, strict=True)
    )
    assert (round(float(data.x.mean()), 2), round(float(data.x.std()), 2)) == (
        data.mean[0],
        data.std[0],
    )


# ---- where files are looked for


def idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(
        size.to_bytes(4, "big") for size in array.shape
    )
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_mnist(folder: Path, value: int = 0) -> Path:
    raw = folder / "raw"
    raw.mkdir(parents=True)
    for part, n in (("train", 12), ("t10k", 4)):
        idx(raw / f"{part}-images-idx3-ubyte", np.full((n, 5, 6), value))
        idx(raw / f"{part}-labels-idx1-ubyte", np.arange(n) % 10)
    return raw


def test_places_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, work = tmp_path / "env", tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("FEDHET_DATA_DIR", str(env))
    for value, place in (
        (3, work / "data"),
        (2, env),
        (1, env / "data"),
    ):  # the later written, the sooner found
        write_mnist(place / "MNIST", value)
        data = load("mnist", data_dir="data")
        assert int(data.x.max()) == int(data.x.min()) == value
        assert data.x.shape == (12, 1, 5, 6)
    assert (
        int(load("mnist", data_dir=str(work / "data")).x.max()) == 3
    )  # absolute: there and nowhere else
    write_mnist(env / "mine" / "digits", 4)
    assert int(load("mnist", data_dir="mine", folder="digits").x.max()) == 4
    with pytest.raises(DataError, match="not found"):
        load("mnist", data_dir="MNIST")  # FEDHET_DATA_DIR itself stands for the default name only


def test_missing_data_says_where_what_and_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDHET_DATA_DIR", str(tmp_path / "env"))
    with pytest.raises(DataError) as caught:
        load("fashion_mnist", data_dir="data")
    for place in ("env/data/FashionMNIST", "env/FashionMNIST", "data/FashionMNIST"):
        assert f"{tmp_path / place} with raw/train-images-idx3-ubyte" in str(caught.value)
    assert "Get it with: python -m fedhet.data download fashion_mnist, or" in str(caught.value)
    monkeypatch.delenv("FEDHET_DATA_DIR")
    with pytest.raises(DataError) as caught:
        load("cifar10", data_dir="data")
    assert "cifar-10-batches-py with data_batch_1" in str(
        caught.value
    ) and "cifar10 with train/, test/" in str(caught.value)
    with pytest.raises(
        DataError, match=f"python -m fedhet.data download mnist --data-dir {tmp_path}/x"
    ):
        load("mnist", data_dir=f"{tmp_path}/x")


# ---- damaged idx files


@pytest.mark.parametrize(
    "file",
    [
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ],
)
@pytest.mark.parametrize("length", [0, 2, 6, -1])
def test_truncated_idx_file_is_named(tmp_path: Path, file: str, length: int) -> None:
    path = write_mnist(tmp_path / "MNIST") / file
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match=f"{path} is damaged"):
        load("mnist", data_dir=str(tmp_path))


def test_other_wrong_idx_files(tmp_path: Path) -> None:
    raw = write_mnist(tmp_path / "MNIST")
    (raw / "train-images-idx3-ubyte").write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match="train-images-idx3-ubyte is damaged"):
        load("mnist", data_dir=str(tmp_path))
    idx(raw / "train-images-idx3-ubyte", np.zeros((11, 5, 6)))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte holds 11 images.* 12"):
        load("mnist", data_dir=str(tmp_path))
    idx(raw / "train-images-idx3-ubyte", np.zeros((12, 5, 5)))
    with pytest.raises(DataError, match=r"\(1, 5, 5\).*\(1, 5, 6\)"):
        load("mnist", data_dir=str(tmp_path))
    idx(raw / "train-images-idx3-ubyte", np.zeros((12, 5, 6)))
    idx(raw / "t10k-labels-idx1-ubyte", np.array([0, 1, 10, 3]))
    with pytest.raises(
        DataError, match="t10k-labels-idx1-ubyte: row 2 has label 10; labels go from 0 to 9"
    ):
        load("mnist", data_dir=str(tmp_path))


# ---- image folders


def write_images(folder: Path, shape: tuple[int, ...], suffix: str = ".png") -> None:
    for part, per_class in (("train", 3), ("test", 2)):
        for label, name in enumerate(("b", "a", "c")):
            place = folder / part / name
            place.mkdir(parents=True)
            for i in range(per_class):
                Image.fromarray(np.full(shape, 10 * label + i, np.uint8)).save(
                    place / f"{i}{suffix}"
                )


def folder(tmp_path: Path, **keys: object) -> Dataset:
    return load("image_folder", data_dir=str(tmp_path), folder="mine", **keys)


@pytest.mark.parametrize(("shape", "channels"), [((4, 6), 1), ((4, 6, 3), 3)])
def test_image_folder_keeps_pixels_and_sorts_classes(
    tmp_path: Path, shape: tuple[int, ...], channels: int
) -> None:
    write_images(tmp_path / "mine", shape)
    (tmp_path / "mine" / "train" / "a" / "notes.txt").write_text("not an image")
    data = folder(tmp_path)
    assert (data.classes, data.shape) == (("a", "b", "c"), (channels, 4, 6))
    assert data.mean == (0.5,) * channels  # one number stands for all channels
    assert (data.y.tolist(), data.test.y.tolist()) == (
        [0, 0, 0, 1, 1, 1, 2, 2, 2],
        [0, 0, 1, 1, 2, 2],
    )
    assert data.x[:, 0, 0, 0].tolist() == [10, 11, 12, 0, 1, 2, 20, 21, 22]
    assert data.test.x[:, -1, -1, -1].tolist() == [10, 11, 0, 1, 20, 21]


def test_jpeg_and_resizing(tmp_path: Path) -> None:
    write_images(tmp_path / "mine", (4, 6), ".JPG")
    Image.fromarray(np.full((9, 5), 200, np.uint8)).save(
        tmp_path / "mine" / "test" / "c" / "large.jpeg"
    )
    with pytest.raises(
        DataError, match=r"large.jpeg is \(C, H, W\) = \(1, 9, 5\), but .*a/0.JPG is \(1, 4, 6\)"
    ):
        folder(tmp_path)
    data = folder(tmp_path, size=8)
    assert data.shape == (1, 8, 8)
    assert folder(tmp_path, size=8, colours="rgb").shape == (3, 8, 8)
    with pytest.raises(ConfigError, match=r"dataset\.colours=red"):
        folder(tmp_path, colours="red")
    assert data.test.x[-1].unique().tolist() == [200]
    for size in (0, -1, 2.5, "8"):
        with pytest.raises(ConfigError, match=r"dataset\.size="):
            folder(tmp_path, size=size)


def test_unusable_images_are_named(tmp_path: Path) -> None:
    write_images(tmp_path / "mine", (4, 6))
    bad = tmp_path / "mine" / "train" / "c" / "2.png"
    good = bad.read_bytes()
    for content in (good[:-30], good[:20], b"not an image", b""):
        bad.write_bytes(content)
        with pytest.raises(DataError, match=f"{bad} is not a readable image"):
            folder(tmp_path)
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(bad)
    with pytest.raises(DataError, match=r"2.png is \(C, H, W\) = \(3, 4, 6\)"):
        folder(tmp_path)
    Image.fromarray(np.zeros((4, 6), np.uint16)).save(bad)
    with pytest.raises(DataError, match=r"2.png is of PIL's mode 'I;16'"):
        folder(tmp_path)
    Image.fromarray(np.zeros((4, 6), np.uint8)).save(bad)
    (tmp_path / "mine" / "test" / "d").mkdir()
    with pytest.raises(DataError, match=r"class folders \['d'\].*\['a', 'b', 'c'\]"):
        folder(tmp_path)


def test_folder_without_images(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / "mine" / part / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="mine/train/a holds no image"):
        folder(tmp_path)
    (tmp_path / "mine" / "train" / "a").rmdir()
    with pytest.raises(DataError, match="mine/train holds no image"):
        folder(tmp_path)


# ---- CIFAR-10 in torchvision's layout


def write_batches(place: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A small stand-in for the published files, whose checksums torchvision is told."""
    from torchvision.datasets import CIFAR10

    place.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
    sums = {}
    for i, (file, _) in enumerate(CIFAR10.train_list + CIFAR10.test_list):
        content = {"data": pixels[2 * i : 2 * i + 2].reshape(2, -1), "labels": [i, 9 - i]}
        (place / file).write_bytes(pickle.dumps(content))
    (place / "batches.meta").write_bytes(
        pickle.dumps({"label_names": [f"class {i}" for i in range(10)]})
    )
    for path in place.iterdir():
        sums[path.name] = hashlib.md5(path.read_bytes()).hexdigest()
    monkeypatch.setattr(
        CIFAR10, "train_list", [[file, sums[file]] for file, _ in CIFAR10.train_list]
    )
    monkeypatch.setattr(CIFAR10, "test_list", [[file, sums[file]] for file, _ in CIFAR10.test_list])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
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
    assert np.array_equal(data.x.numpy(), pixels[:10]) and np.array_equal(
        data.test.x.numpy(), pixels[10:]
    )
    assert (data.y.tolist(), data.test.y.tolist()) == ([0, 9, 1, 8, 2, 7, 3, 6, 4, 5], [5, 4])
    assert data.classes[3] == "class 3"
    place.rename(tmp_path / "elsewhere")
    assert torch.equal(load("cifar10", data_dir=str(tmp_path), folder="elsewhere").x, data.x)
    damaged = tmp_path / "elsewhere" / "data_batch_3"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(DataError, match="data_batch_3 is damaged"):
        load("cifar10", data_dir=str(tmp_path), folder="elsewhere")


# ---- the type itself


def test_wrong_mean_or_std() -> None:
    for keys in (
        {"mean": [0.1, 0.2]},
        {"mean": []},
        {"std": [1, 1, 1]},
        {"std": [0.0]},
        {"std": [-1]},
    ):
        with pytest.raises(ConfigError, match=f"dataset.{next(iter(keys))}="):
            load("digits", **keys)


def test_labels_out_of_range() -> None:
    x, y = torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 0])
    with pytest.raises(DataError, match="training sample 1 has label -1"):
        Dataset("toy", x, y * -1, Samples(x, y), ("a", "b"), (0.5,), (0.5,))


def test_importing_is_light() -> None:
    code = (
        "import sys, fedhet.data.images, fedhet.data.commands.download;print({'torchvision', 'sklearn',"
        " 'PIL', 'pyarrow', 'flwr_datasets', 'datasets', 'filelock'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "set()"
    )


def test_every_yaml_names_its_loader() -> None:
    for path in CONF.glob("*.yaml"):
        conf = OmegaConf.load(path)
        module, _, loader = conf["_target_"].rpartition(".")
        assert conf["name"] == path.stem and (module != images.__name__ or loader == path.stem)
    assert (
        instantiate(OmegaConf.load(CONF / "digits.yaml"), data_dir="data").name == "digits"
    )  # Hydra's own lists do
