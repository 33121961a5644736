"""The images that come with a library: scikit-learn's digits."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np

from fedhet.data.array_cache import Arrays
from fedhet.data.arrays import assemble
from fedhet.data.dataset import Dataset, Statistic


def digits(*, name: str, mean: Statistic, std: Statistic, data_dir: str = "") -> Dataset:
    """scikit-learn's 1,797 digits of 8x8 pixels in 17 grey levels; `data_dir` is not used.

    The global test set is a fixed stratified 20 %, whatever the seed of the run. The arrays are
    cached although they come with the library: importing scikit-learn takes longer than a short
    run, and in a deployment each message is handled by a new process.
    """
    key = {"loader": "digits", "version": version("scikit-learn")}
    return assemble(name, key, _read_digits, mean, std)


def _read_digits() -> Arrays:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return {
        "x": _pixels(x),
        "y": y.astype(np.int64),
        "test_x": _pixels(test_x),
        "test_y": test_y.astype(np.int64),
        "classes": np.array(list("0123456789")),
    }


def _pixels(images: np.ndarray) -> np.ndarray:
    """(n, 64) in 0 .. 16 -> (n, 1, 8, 8) in [0, 1]; sixteenths are exact in float32."""
    return (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
