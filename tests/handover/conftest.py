"""Small runs that are handed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from sklearn import datasets as published
from torch import nn

import fedhet

Start = Callable[..., fedhet.Run]


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Patients with a tumour, malignant or not: train.csv and test.csv, and test.parquet."""
    folder = tmp_path_factory.mktemp("tables")
    frame = published.load_breast_cancer(as_frame=True).frame.iloc[:, [0, 1, 3, -1]]
    frame.columns = ["radius", "texture", "area", "kind"]
    frame["kind"] = np.where(frame["kind"] == 0, "malignant", "benign")
    frame[:400].to_csv(folder / "train.csv", index=False)
    frame[400:].to_csv(folder / "test.csv", index=False)
    frame[400:].to_parquet(folder / "test.parquet", index=False)
    return folder


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bright and dark images as {train,test}/<class>/*.png, of two sizes."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for part, n in (("train", 40), ("test", 20)):
        for name, level in (("bright", 150), ("dark", 60)):
            place = folder / "images" / part / name
            place.mkdir(parents=True)
            for i in range(n):
                size = (8, 8, 3) if i % 2 else (12, 10, 3)
                pixels = np.clip(rng.normal(level, 60, size), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{i:02}.png")
    return folder


@pytest.fixture(scope="session")
def onnxruntime() -> ModuleType:
    """The package, after a first export, which loads what all others need."""
    missing = "the extra onnx is not installed"
    pytest.importorskip("onnxscript", reason=missing)
    module: ModuleType = pytest.importorskip("onnxruntime", reason=missing)
    torch.onnx.export(nn.Linear(1, 1).eval(), (torch.zeros(1, 1),), dynamo=True, verbose=False)
    return module


def start(folder: Path, data: Path, *overrides: str) -> fedhet.Run:
    return fedhet.run(
        [
            f"data_dir={data}",
            "partition=iid",
            "partition.clients=2",
            "rounds=2",
            "client.lr=.05",
            "figures=false",
            f"hydra.run.dir={folder}",
            *overrides,
        ]
    )


@pytest.fixture(scope="session")
def of_a_table(tmp_path_factory: pytest.TempPathFactory, tables: Path) -> fedhet.Run:
    """Ditto on the patients, with personal models."""
    return start(
        tmp_path_factory.mktemp("run") / "table",
        tables,
        "dataset=csv",
        "dataset.test=test.csv",
        "dataset.label=kind",
        "model.hidden=[8]",
        "method=ditto",
    )


@pytest.fixture(scope="session")
def of_numbers(tmp_path_factory: pytest.TempPathFactory, tables: Path) -> fedhet.Run:
    """Radius and texture predicted from the area; the tumour's kind is not among the features."""
    return start(
        tmp_path_factory.mktemp("run") / "numbers",
        tables,
        "dataset=csv",
        "dataset.test=test.csv",
        "dataset.label=[radius,texture]",
        "dataset.target=number",
        "dataset.features=[area]",
        "model=logistic",
        "method=fedavg",
    )


@pytest.fixture(scope="session")
def of_images(tmp_path_factory: pytest.TempPathFactory, images: Path) -> fedhet.Run:
    """Images that the run resizes and converts to grey."""
    return start(
        tmp_path_factory.mktemp("run") / "images",
        images,
        "dataset=image_folder",
        "dataset.size=8",
        "dataset.colours=grey",
        "method=fedavg",
        "model.hidden=[8]",
    )


@pytest.fixture
def table_frame(tables: Path) -> pandas.DataFrame:
    return pandas.read_csv(tables / "test.csv")
