"""scripts/subsets cuts the published subsets, and refuses to cut others."""

from __future__ import annotations

import hashlib
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from data.image_data import write_mnist
from torchvision.datasets import MNIST

FOLDER = Path(__file__).parents[2] / "scripts" / "subsets"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The functions of the script."""
    return runpy.run_path(str(FOLDER / "__main__.py"))


def run(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["subsets", *words])
    script["main"]()


def test_the_sums_are_those_of_the_subsets(real: str) -> None:
    for line in (FOLDER / "SHA256SUMS").read_text().splitlines():
        expected, path = line.split()
        if path == "cifar10":  # of its pixels; the next test has its files
            continue
        assert hashlib.sha256((Path(real) / path).read_bytes()).hexdigest() == expected


def test_cifar10_lists_the_files_of_the_subset(real: str) -> None:
    listed = {
        f"cifar10/{row['split']}/{row['class']}/{int(number):04}.png"
        for row in pd.read_csv(FOLDER / "cifar10.csv").to_dict("records")
        for number in row["numbers"].split()
    }
    there = {str(path.relative_to(real)) for path in (Path(real) / "cifar10").rglob("*.png")}
    assert listed == there


def test_samples_are_evenly_spaced_within_their_class(script: dict[str, Any]) -> None:
    labels = np.array([1, 0, 1, 1, 0, 1, 1, 0, 1], np.uint8)  # class 1: 0, 2, 3, 5, 6, 8
    # Two of the three zeros: places 0 and 1; two of the six ones: places 0 and 3.
    assert script["evenly_spaced"](labels, 2).tolist() == [0, 1, 4, 5]


def test_files_are_written_as_torchvision_reads_them(script: dict[str, Any], real: str) -> None:
    subset = MNIST(real, train=False)
    path = Path(real) / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    assert script["idx"](subset.data.numpy()) == path.read_bytes()


def test_another_data_set_is_refused_and_nothing_written(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path / "source" / "MNIST")
    folders = ["--source", str(tmp_path / "source"), "--target", str(tmp_path / "target")]
    with pytest.raises(SystemExit, match=r"train-images-idx3-ubyte .*SHA-256"):
        run(script, monkeypatch, "mnist", *folders)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_missing_data_are_told_how_to_get(
    script: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=f"python -m fedhet data download {name}"):
        run(script, monkeypatch, name, "--source", str(tmp_path))
