"""From raw arrays to a dataset.

Labels and owners become numbers, and a test set is held out if there is none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhet.core.errors import DataError
from fedhet.core.streams import generator
from fedhet.core.task import Samples
from fedhet.data.array_cache import Arrays, cached_arrays, identity
from fedhet.data.dataset import AUTO, Dataset, Statistic
from fedhet.data.raw_samples import RawSamples
from fedhet.data.target import Classes, encoded

log = logging.getLogger("fedhet.data")


def dataset_arrays(
    train: RawSamples,
    test: RawSamples | None,
    classes: Classes,
    test_fraction: float = 0.0,
    target: str | None = None,
) -> Arrays:
    """The arrays from which `assemble` builds a dataset.

    Args:
        train: the training samples.
        test: the test samples; None: `test_fraction` of the training samples, the same ones
            whatever the seed of the run.
        classes: None: the labels in the training samples, sorted; a number C: the labels are
            0 .. C-1; a list: the labels in this order.
        test_fraction: the fraction that is held out where `test` is None.
        target: what the labels are, see `fedhet.data.target.encoded`.

    Raises:
        DataError: a label is missing or not among the classes (the message names the file and the
            row), or the training or test set would be empty.
    """
    ys, described = encoded(train, test, target, classes)
    x = train.x
    y = ys[0]
    owners = train.owners
    test_owners = None if test is None else test.owners
    if test is None:
        kept, held_out = _split_rows(len(x), test_fraction, train.x_source)
        test_x = x[held_out]
        test_y = y[held_out]
        x = x[kept]
        y = y[kept]
        if owners is not None:
            test_owners = owners[held_out]
            owners = owners[kept]
    else:
        test_x = test.x
        test_y = ys[1]
    arrays = {"x": x, "y": y, "test_x": test_x, "test_y": test_y, **described}
    if owners is not None:
        arrays |= _owner_arrays(owners)
        if test_owners is not None:
            arrays["test_owners"] = test_owners.astype(np.str_)
    return arrays


def assemble(
    name: str,
    key: Mapping[str, Any],
    make: Callable[[], Arrays],
    mean: Statistic = (0.0,),
    std: Statistic = (1.0,),
    augment: str = "none",
    target_mean: Statistic = AUTO,
    target_std: Statistic = AUTO,
) -> Dataset:
    """The dataset of the arrays x, y, test_x, test_y and classes.

    Where samples have owners, the arrays owners, owner_names and, where it is present, test_owners
    are used too; and so are target, numbers, vocabulary, padding and columns. A `mean` or `std` of
    "auto", of the inputs or of the numbers to predict, stands for the array of that name where the
    data themselves state it.

    Args:
        name: the dataset's name.
        key: everything that determines the arrays, see `cached_arrays`.
        make: decodes the data into these arrays; called only if they are not in the cache.
        mean, std, augment, target_mean, target_std: see `Dataset`.
    """
    arrays = cached_arrays(name, key, make)
    x, y, test_x, test_y = (
        torch.from_numpy(arrays[part]) for part in ("x", "y", "test_x", "test_y")
    )
    statistics: dict[str, Any] = {
        "mean": mean,
        "std": std,
        "target_mean": target_mean,
        "target_std": target_std,
    }
    for statistic, value in statistics.items():
        if value == AUTO and statistic in arrays:
            statistics[statistic] = arrays[statistic].tolist()
            log.info("%s: %s %s, as the data state", name, statistic, statistics[statistic])
    owners = arrays.get("owners")
    target, reason = arrays["target"].tolist() if "target" in arrays else ("class", "")
    if reason:
        log.info("%s: dataset.target=%s: %s", name, target, reason)
    if target == "class" and len(arrays["classes"]) == 1:
        log.warning(
            "%s: all samples are of the one class %r, so that every model is right: its label is"
            " probably another one",
            name,
            arrays["classes"].tolist()[0],
        )
    return Dataset(
        name,
        x,
        y,
        Samples(test_x, test_y),
        tuple(arrays["classes"].tolist()),
        **statistics,
        owners=owners,
        owner_names=() if owners is None else tuple(arrays["owner_names"].tolist()),
        test_owners=arrays.get("test_owners"),
        augment=augment,
        source=identity(name, key),
        target=target,
        numbers=tuple(arrays["numbers"].tolist()) if "numbers" in arrays else (),
        vocabulary=int(arrays["vocabulary"]) if "vocabulary" in arrays else 0,
        padding=int(arrays["padding"]) if "padding" in arrays else None,
        columns=tuple(arrays["columns"].tolist()) if "columns" in arrays else (),
    )


def labels_from_zero(path: Path, labels: np.ndarray, classes: int, first: int = 0) -> np.ndarray:
    """The labels of a file that counts from `first`, as int64 in 0 .. classes - 1.

    Raises:
        DataError: a label is out of range; the message names the file and the first such row.
    """
    if labels.dtype.kind not in "iu":
        raise DataError(f"{path}: its labels are {labels.dtype}; expected whole numbers")
    last = first + classes - 1
    wrong = np.flatnonzero((labels < first) | (labels > last))
    if len(wrong):
        row = wrong[0]
        raise DataError(
            f"{path}: row {row} has label {labels[row]}; labels go from {first} to {last}"
        )
    return labels.astype(np.int64) - first


def _owner_arrays(owners: np.ndarray) -> Arrays:
    """The owners as numbers, in the order of their names."""
    sortable = owners if owners.dtype.kind in "iu" else owners.astype(np.str_)
    names, numbers = np.unique(sortable, return_inverse=True)
    return {"owners": numbers.astype(np.int64), "owner_names": names.astype(np.str_)}


def _split_rows(n: int, fraction: float, source: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows for training and those for testing, both ascending."""
    n_test = math.floor(n * fraction + 0.5)
    if not 0 < n_test < n:
        raise DataError(
            f"{source}: dataset.test_fraction={fraction} of its {n} samples are {n_test}; the"
            " training set and the test set need at least one each"
        )
    order = generator(0, "test_fraction").permutation(n)
    return np.sort(order[n_test:]), np.sort(order[:n_test])
