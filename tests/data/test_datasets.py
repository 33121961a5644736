"""Datasets as a whole: the real subsets' counts, the dataset type, and the yaml files."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from data.image_data import CONF, counts, load
from hydra.utils import instantiate
from omegaconf import OmegaConf

from fedhet.core.errors import ConfigError, DataError
from fedhet.core.task import Samples
from fedhet.data import images
from fedhet.data.dataset import Dataset


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
    # The yaml has the mean and std of the full sets; evenly spaced subsets of the training set
    # come close.
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

    data = load("digits")
    again = load("digits", data_dir="anywhere")
    assert torch.equal(data.x, again.x) and torch.equal(data.test.y, again.test.y)
    assert data.shape == (1, 8, 8) and data.x.dtype == torch.float32
    every = torch.cat([data.x, data.test.x]).mul(16).flatten(1)
    # every image once
    assert sorted(map(tuple, every.tolist())) == sorted(map(tuple, load_digits().data.tolist()))
    assert len(data.test) == 360
    total = counts(torch.from_numpy(load_digits().target))
    for part, whole in zip(counts(data.test.y), total, strict=True):
        assert abs(part - 0.2 * whole) <= 1
    assert round(float(data.x.mean()), 2) == data.mean[0]
    assert round(float(data.x.std()), 2) == data.std[0]


# ---- the type


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("mean", [0.1, 0.2]),
        ("mean", []),
        ("std", [1, 1, 1]),
        ("std", [0.0]),
        ("std", [-1]),
    ],
)
def test_wrong_mean_or_std(key: str, values: list[float]) -> None:
    with pytest.raises(ConfigError, match=f"dataset.{key}="):
        load("digits", **{key: values})


def test_labels_out_of_range() -> None:
    x, y = torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 0])
    with pytest.raises(DataError, match=r"toy, training, sample 1: .*target .*-1; .*classes=2"):
        Dataset("toy", x, y * -1, Samples(x, y), ("a", "b"), (0.5,), (0.5,))


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([0, 1], r"3 samples .*owners .*shape \(2,\)"),
        ([0, 1, 2], "owner .*0 .*1"),
        ([0, -1, 1], "owner .*0 .*1"),
        ([1, 1, 1], "owner.*sample"),
    ],
)
def test_wrong_owners(owners: list[int], message: str) -> None:
    x, y = torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 0])
    with pytest.raises(DataError, match=message):
        Dataset(
            "toy",
            x,
            y,
            Samples(x, y),
            ("a", "b"),
            owners=np.array(owners),
            owner_names=("ada", "bert"),
        )


# ---- the yaml files and the imports


@pytest.mark.slow
def test_importing_is_light() -> None:
    code = (
        "import sys, fedhet.data.images, fedhet.runs.data_commands.download\n"
        "heavy = {'torchvision', 'sklearn', 'PIL', 'pyarrow', 'datasets', 'filelock'}\n"
        "print(heavy & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


def test_every_yaml_names_its_loader() -> None:
    for path in CONF.glob("*.yaml"):
        conf = OmegaConf.load(path)
        module, _, loader = conf["_target_"].rpartition(".")
        assert conf["name"] == path.stem
        assert module != images.__name__ or loader == path.stem
    # Hydra passes lists of its own type
    digits = instantiate(OmegaConf.load(CONF / "digits.yaml"), data_dir="data")
    assert digits.name == "digits"
