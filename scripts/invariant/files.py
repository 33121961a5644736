"""Makes data files of a user, which some configurations read, from scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image
from sklearn.datasets import load_digits

TRAIN = 900  # training samples, in the order of the seed; the next TEST samples are the test set
TEST = 200
PER_CLASS = 30  # images of a class in the folder of images; a third of them are test images
ROUND = (0, 6, 8, 9)  # the digits with a closed loop


def make(folder: Path) -> None:
    """Write all files into the folder, the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int64)
    whole = _table(images, labels)
    train = whole[:TRAIN]
    train.to_csv(folder / "digits.csv", index=False)
    train.to_parquet(folder / "digits.parquet", index=False)
    whole[TRAIN : TRAIN + TEST].to_csv(folder / "test.csv", index=False)
    for number, site in enumerate("abc"):
        train[number::3].to_csv(folder / f"{site}.csv", index=False)
    owners = np.array(train["writer"].to_numpy(), dtype="U2")
    _write_split(folder / "images.npz", images, labels, owner=owners)
    # As a text, an image is its sums of rows and columns (tokens 0 to 8). The label is its digit.
    tokens = np.rint(np.concatenate([images.sum(axis=1), images.sum(axis=2)], axis=1))
    _write_split(folder / "text.npz", tokens.astype(np.int64), labels, vocabulary=np.int64(10))
    _write_images(folder / "images", images, labels)


def _table(images: np.ndarray, labels: np.ndarray) -> pd.DataFrame:
    """Return a table with a column for each pixel, each target and the owner."""
    table = pd.DataFrame(
        {f"p{row}{column}": images[:, row, column] for row in range(8) for column in range(8)}
    )
    rows = np.arange(8, dtype=np.float32)
    return table.assign(
        label=labels,
        ink=images.mean(axis=(1, 2)),
        height=(images.sum(axis=2) * rows).sum(axis=1) / images.sum(axis=(1, 2)),
        even=(labels % 2 == 0).astype(int),
        round=np.isin(labels, ROUND).astype(int),
        # The owners have unequal numbers of samples, and unequal shares of the classes.
        writer=[f"w{(label + number % 3) % 5}" for number, label in enumerate(labels)],
    )


def _write_split(path: Path, x: np.ndarray, y: np.ndarray, **more: np.ndarray | np.int64) -> None:
    test = slice(TRAIN, TRAIN + TEST)
    np.savez(path, x_train=x[:TRAIN], y_train=y[:TRAIN], x_test=x[test], y_test=y[test], **more)


def _write_images(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    pixels = np.rint(images * 255).astype(np.uint8)
    for label in range(10):
        for number, image in enumerate(pixels[labels == label][:PER_CLASS]):
            part = "test" if number % 3 == 0 else "train"
            path = folder / part / str(label) / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
