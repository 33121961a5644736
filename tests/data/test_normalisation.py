"""`auto`: mean and std of the clients' training samples, and of no other sample."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from composing import data_main as main
from data.image_data import write_images, write_mnist
from data.own_data import load
from data.schemes import run_data

from fedhet.core.errors import ConfigError, DataError
from fedhet.data.federation import transform
from fedhet.data.moments import moments
from fedhet.runs import run_data as run_data_module
from fedhet.runs.run_data import RunData

SPLIT = "partition.split=[.5,.25,.25]"


def table(folder: Path, n: int = 200, **columns: Any) -> str:
    """A csv file of two columns and three classes; returns the overrides of its dataset."""
    draw = np.random.default_rng(0)
    rows = {"a": draw.normal(5, 2, n), "b": draw.exponential(1, n), "label": np.arange(n) % 3}
    pandas.DataFrame(rows | columns).to_csv(folder / "train.csv", index=False)
    return f"dataset=csv dataset.train={folder}/train.csv"


def arrays(folder: Path, x: np.ndarray, **others: np.ndarray) -> str:
    """An npz file of these inputs and three classes."""
    y = np.arange(len(x)) % 3
    test = {"x_test": x[:9] / 2 if x.dtype.kind == "f" else x[:9] // 2, "y_test": y[:9]}
    np.savez(folder / "data.npz", x_train=x, y_train=y, **test, **others)
    return f"dataset=npz dataset.file={folder}/data.npz"


def datasets(folder: Path) -> dict[str, str]:
    """Datasets of every kind of loader, with `auto`."""
    draw = np.random.default_rng(1)
    auto = "dataset.mean=auto dataset.std=auto"
    mnist = write_mnist(folder / "MNIST")
    (mnist / "train-images-idx3-ubyte").write_bytes(
        (mnist / "train-images-idx3-ubyte").read_bytes()[:16]
        + draw.integers(0, 256, 12 * 30, dtype=np.uint8).tobytes()
    )
    write_images(folder / "mine", (4, 6, 3))
    return {
        "csv": table(folder),
        "npz": arrays(folder, draw.integers(0, 256, (90, 3, 4, 4), dtype=np.uint8)),
        "mnist": f"dataset=mnist data_dir={folder} {auto}",
        "image_folder": f"dataset=image_folder dataset.folder={folder}/mine {auto}",
        "digits": f"dataset=digits {auto}",
        "noisy digits": f"dataset=digits {auto} partition.noise=.3",
    }


def measured(data: RunData) -> tuple[list[float], list[float]]:
    """By numpy, of all training samples in one array."""
    x = torch.cat([client.train.x for client in data.clients]).double().numpy()
    if data.dataset.x.dtype == torch.uint8 and not data.scheme.noise:
        x = x / 255
    axes = (0, *range(2, x.ndim))
    return x.mean(axes).tolist(), x.std(axes).tolist()


@pytest.mark.parametrize("kind", ["csv", "npz", "mnist", "image_folder", "digits", "noisy digits"])
def test_they_are_those_of_the_training_samples(tmp_path: Path, kind: str) -> None:
    overrides = [*datasets(tmp_path)[kind].split(), "partition=iid", "partition.clients=3", SPLIT]
    data = run_data(*overrides)
    mean, std = measured(data)
    assert data.dataset.mean == pytest.approx(mean, rel=1e-12)
    assert data.dataset.std == pytest.approx(std, rel=1e-12)
    whole = run_data(*overrides, "partition.split=[1,0,0]")
    assert data.dataset.mean != pytest.approx(whole.dataset.mean, rel=1e-4)
    # what the model sees
    normalize = transform(data.dataset)
    assert (normalize.mean, normalize.std) == (data.dataset.mean, data.dataset.std)


def test_samples_for_validation_and_test_do_not_matter(tmp_path: Path) -> None:
    overrides = [*table(tmp_path).split(), "partition.clients=4", SPLIT, "dataset.test_fraction=.1"]
    before = run_data(*overrides)
    trained = torch.cat([client.train.x for client in before.clients])[:, 0].tolist()
    frame = pandas.read_csv(tmp_path / "train.csv")
    elsewhere = ~frame["a"].isin(trained)
    assert 0.4 < elsewhere.mean() < 0.7
    frame.loc[elsewhere, "a"] = 1e6
    frame.to_csv(tmp_path / "train.csv", index=False)
    after = run_data(*overrides)
    assert 1e6 in after.clients[0].val.x and 1e6 in after.dataset.test.x
    assert (after.dataset.mean, after.dataset.std) == (before.dataset.mean, before.dataset.std)


def test_what_is_stated_stays(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    stated = {"mean": np.array([1.0, 2.0]), "std": np.array([3.0, 4.0])}
    overrides = arrays(tmp_path, x, **stated).split()
    data = run_data(*overrides, SPLIT).dataset
    assert (data.mean, data.std) == ((1, 2), (3, 4))
    assert run_data(*overrides, "dataset.mean=[7]").dataset.mean == (7, 7)
    # the file states one of them: the other is measured
    data = run_data(*arrays(tmp_path, x, mean=stated["mean"]).split(), SPLIT)
    assert data.dataset.mean == (1, 2)
    assert data.dataset.std == pytest.approx(measured(data)[1])


def test_a_run_is_that_with_the_numbers_given(tmp_path: Path, launch: Callable[..., Any]) -> None:
    run = [*table(tmp_path).split(), "model=mlp", "rounds=1", "partition.clients=3", SPLIT]
    auto = launch(*run)
    record = json.loads((Path(auto.dir) / "partition.json").read_text())["normalised"]
    mean, std = measured(run_data(*run))
    assert record == {"mean": pytest.approx(mean), "std": pytest.approx(std)}
    given = launch(*run, *(f"dataset.{key}={record[key]}" for key in record))
    saved = launch(*run[:-2], "partition=saved", f"partition.name={auto.dir}")
    assert len({one.summary["weights_sha256"] for one in (auto, given, saved)}) == 1


@pytest.mark.slow
def test_two_workers_give_the_same_bytes(tmp_path: Path, launch: Callable[..., Any]) -> None:
    run = [*table(tmp_path).split(), "model=mlp", "rounds=2", "partition.clients=3", SPLIT]
    one, two = (launch(*run, f"engine.workers={n}") for n in (1, 2))
    assert one.summary["weights_sha256"] == two.summary["weights_sha256"]


def test_describe_and_export_state_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fedhet.runs.record.terminal.log_to_stderr", lambda: None)
    caplog.set_level(logging.INFO, "fedhet")
    overrides = [*table(tmp_path).split(), "partition.clients=3", SPLIT]
    data = run_data(*overrides).dataset
    caplog.clear()
    assert main(["describe", *overrides, "--out", str(tmp_path / "figures")]) == 0
    assert f"training samples: mean {list(data.mean)}, std {list(data.std)}" in caplog.text
    assert main(["export", *overrides, "--client", "1", "--out", str(tmp_path)]) == 0
    with np.load(tmp_path / "client-1.npz") as file:
        assert (tuple(file["mean"]), tuple(file["std"])) == (data.mean, data.std)
    own = f"dataset=npz dataset.file={tmp_path}/client-1.npz partition=iid partition.clients=1"
    assert run_data(*own.split()).dataset.mean == data.mean


def test_the_cache_tells_them_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).random((200, 1, 3, 3))
    overrides = [*arrays(tmp_path, images).split(), "partition.clients=3", SPLIT]
    others = ["seed=1", "partition.split=[.6,.2,.2]", "partition.noise=.1", "partition=shards"]
    settings = [overrides, *([*overrides, other] for other in others)]
    found = []
    for one in settings:
        data = run_data(*one)
        assert data.dataset.mean == pytest.approx(measured(data)[0], rel=1e-12)
        found.append(data.dataset.mean)
    assert len(set(found)) == len(settings)
    with monkeypatch.context() as patched:
        patched.setattr(run_data_module, "moments", None)
        assert [run_data(*one).dataset.mean for one in settings] == found
    arrays(tmp_path, 1 - images)
    assert run_data(*overrides).dataset.mean == pytest.approx((1 - found[0][0],), rel=1e-6)


# ---- the computation


@pytest.mark.parametrize("shape", [(5000, 3), (700, 3, 4, 5)])
def test_moments_of_parts_are_those_of_the_whole(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(1e4, 1e-2, shape)
    x[:, 1] = 0.1  # a constant
    cuts = [0, 0, 1, 7, 1500, len(x)]
    found = moments(x[start:end] for start, end in itertools.pairwise(cuts)).arrays
    axes = (0, *range(2, x.ndim))
    assert found["mean"] == pytest.approx(x.mean(axes), rel=1e-14)
    std = x.std(axes)
    assert found["std"].tolist() == pytest.approx([std[0], 1, std[2]], rel=1e-7)


def test_moments_of_pixels_and_of_nothing() -> None:
    pixels = np.array([[[[0, 255]]], [[[255, 255]]]], np.uint8)
    found = moments([pixels]).arrays
    assert (found["mean"].tolist(), found["std"].tolist()) == ([0.75], [0.1875**0.5])
    with pytest.raises(DataError, match=r"client .*training sample"):
        _ = moments([pixels[:0]]).arrays


def test_a_dataset_that_is_not_measured_cannot_be_normalised(tmp_path: Path) -> None:
    arrays(tmp_path, np.eye(4))
    with pytest.raises(ConfigError, match=r"npz .*auto: .*measures .*clients' train"):
        transform(load("npz", tmp_path))
