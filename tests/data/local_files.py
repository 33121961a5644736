"""Files of several sites, and the declarations that they meet."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas
from composing import composed
from sklearn.datasets import load_digits

from fedhet.runs.local_data import LocalData

SHORT = ["method=fedavg", "rounds=2", "client.epochs=1"]
CUTS = (0, 100, 180, 300)
SITES = "abc"


def digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    return (x * 15).astype(np.uint8).reshape(-1, 1, 8, 8), y


def write_digits(folder: Path) -> list[str]:
    """A file for each of three sites, of which b has test samples of its own."""
    x, y = digits()
    for site, (start, end) in zip(SITES, pairwise(CUTS), strict=True):
        arrays = {"x_train": x[start:end], "y_train": y[start:end]}
        if site == "b":
            arrays |= {"x_test": x[400:420], "y_test": y[400:420]}
        np.savez(folder / f"{site}.npz", **arrays)
    return [
        "dataset=local",
        f"data_dir={folder}",
        "dataset.sites=[a,b,c]",
        "dataset.classes=10",
        "dataset.shape=[1,8,8]",
        "dataset.dtype=uint8",
        "dataset.files={a:a.npz,b:b.npz,c:c.npz}",
    ]


def data_of(*overrides: str) -> LocalData:
    return LocalData.simulated(composed(*overrides).cfg, "local")


def write_tables(folder: Path) -> list[str]:
    draw = np.random.default_rng(0)
    for site in "ab":
        frame = pandas.DataFrame(draw.normal(5, 2, (60, 3)), columns=["age", "height", "price"])
        frame["old"] = (frame["age"] > 5).astype(int)
        columns = frame.columns if site == "a" else frame.columns[::-1]
        frame[columns].to_csv(folder / f"{site}.csv", index=False)
    return [
        "dataset=local",
        f"data_dir={folder}",
        "dataset.sites=[a,b]",
        "dataset.target=number",
        "dataset.features=[age,height]",
        "dataset.label=price",
        "dataset.files={a:a.csv,b:b.csv}",
    ]
