"""Where data files are looked for, and the error if they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from data.image_data import load, write_mnist

from fedhet.core.errors import DataError


def test_places_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, work = tmp_path / "env", tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("FEDHET_DATA_DIR", str(env))
    # each place that is written takes precedence over the earlier ones
    for value, place in ((3, work / "data"), (2, env), (1, env / "data")):
        write_mnist(place / "MNIST", value)
        data = load("mnist", data_dir="data")
        assert int(data.x.max()) == int(data.x.min()) == value
        assert data.x.shape == (12, 1, 5, 6)
    # an absolute folder is the only place
    assert int(load("mnist", data_dir=str(work / "data")).x.max()) == 3
    write_mnist(env / "mine" / "digits", 4)
    assert int(load("mnist", data_dir="mine", folder="digits").x.max()) == 4
    with pytest.raises(DataError, match="not found"):
        load("mnist", data_dir="MNIST")  # only the default name stands for FEDHET_DATA_DIR itself


def test_the_error_names_places_files_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDHET_DATA_DIR", str(tmp_path / "env"))
    with pytest.raises(DataError) as caught:
        load("fashion_mnist", data_dir="data")
    message = str(caught.value)
    for place in ("env/data/FashionMNIST", "env/FashionMNIST", "data/FashionMNIST"):
        assert f"{tmp_path / place} with raw/train-images-idx3-ubyte" in message
    assert "python -m fedhet data download fashion_mnist" in message
    monkeypatch.delenv("FEDHET_DATA_DIR")
    with pytest.raises(DataError) as caught:
        load("cifar10", data_dir="data")
    message = str(caught.value)
    assert "cifar-10-batches-py with data_batch_1" in message
    assert "cifar10 with train/, test/" in message
    command = f"python -m fedhet data download mnist --data-dir {tmp_path}/x"
    with pytest.raises(DataError, match=command):
        load("mnist", data_dir=f"{tmp_path}/x")
