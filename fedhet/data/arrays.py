"""From raw arrays to a dataset.

Labels and owners become numbers, and a test set is held out if there is none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhet import check
from fedhet.data.array_cache import Arrays, cached_arrays, identity
from fedhet.data.dataset import AUTO, Dataset, Statistic
from fedhet.errors import ConfigError, DataError
from fedhet.streams import generator
from fedhet.task import Samples

log = logging.getLogger("fedhet.data")

# `dataset.classes`: the classes' labels, their number, or None for the labels in the data.
Classes = int | Sequence[str] | None


@dataclass(frozen=True)
class RawSamples:
    """Samples as a file contains them.

    Args:
        x: (n, ...), the inputs.
        y: (n,), the labels.
        owners: (n,), the samples' owners, or None.
        x_source: where `x` comes from, for messages.
        y_source: where `y` comes from, for messages.

    Raises:
        DataError: there are no samples, or labels or owners are missing.
    """

    x: np.ndarray
    y: np.ndarray
    owners: np.ndarray | None
    x_source: str
    y_source: str

    def __post_init__(self) -> None:
        for what, values in (("labels", self.y), ("owners", self.owners)):
            if values is not None and values.shape != (len(self.x),):
                raise DataError(
                    f"{self.x_source}: the {what} have shape {values.shape}; expected"
                    f" ({len(self.x)},), one for each sample"
                )
        if self.owners is not None and self.owners.dtype.kind == "f":
            missing = np.isnan(self.owners)
            if missing.any():
                raise DataError(
                    f"{self.x_source}, row {int(missing.argmax())}: its owner is nan; each sample"
                    " needs an owner"
                )
        if not len(self.x):
            raise DataError(f"{self.x_source} contains no samples")


def dataset_arrays(
    train: RawSamples, test: RawSamples | None, classes: Classes, test_fraction: float = 0.0
) -> Arrays:
    """The arrays from which `assemble` builds a dataset.

    Args:
        train: the training samples.
        test: the test samples; None: `test_fraction` of the training samples, the same ones
            whatever the seed of the run.
        classes: None: the labels in the training samples, sorted; a number C: the labels are
            0 .. C-1; a list: the labels in this order.
        test_fraction: the fraction that is held out where `test` is None.

    Raises:
        DataError: a label is missing or not among the classes (the message names the file and the
            row), or the training or test set would be empty.
    """
    labels = _plain_labels(train)
    test_labels = None if test is None else _plain_labels(test)
    names = np.unique(labels).astype(np.str_) if classes is None else _class_names(classes)
    x = train.x
    y = _class_numbers(labels, names, train.y_source)
    owners = train.owners
    test_owners = None if test is None else test.owners
    if test is None or test_labels is None:
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
        test_y = _class_numbers(test_labels, names, test.y_source)
    arrays = {"x": x, "y": y, "test_x": test_x, "test_y": test_y, "classes": names}
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
) -> Dataset:
    """The dataset of the arrays x, y, test_x, test_y and classes.

    Where samples have owners, the arrays owners, owner_names and, where it is present, test_owners
    are used too. A `mean` or `std` of
    "auto" stands for the array of that name where the data themselves state it.

    Args:
        name: the dataset's name.
        key: everything that determines the arrays, see `cached_arrays`.
        make: decodes the data into these arrays; called only if they are not in the cache.
        mean, std, augment: see `Dataset`.
    """
    arrays = cached_arrays(name, key, make)
    x, y, test_x, test_y = (
        torch.from_numpy(arrays[part]) for part in ("x", "y", "test_x", "test_y")
    )
    statistics: dict[str, Any] = {"mean": mean, "std": std}
    for statistic, value in statistics.items():
        if value == AUTO and statistic in arrays:
            statistics[statistic] = arrays[statistic].tolist()
            log.info("%s: %s %s, as the data state", name, statistic, statistics[statistic])
    owners = arrays.get("owners")
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


def _class_names(classes: int | Sequence[str]) -> np.ndarray:
    """The names that the setting `dataset.classes` fixes."""
    if isinstance(classes, int):
        return np.arange(check.integer("dataset.classes", classes, low=1)).astype(np.str_)
    if isinstance(classes, str) or not classes or len(set(map(str, classes))) < len(classes):
        raise ConfigError(
            f"dataset.classes={classes}: must be null, a number of classes, or a list of distinct"
            " labels"
        )
    return np.array([str(label) for label in classes])


def _plain_labels(samples: RawSamples) -> np.ndarray:
    """The labels as whole numbers or text."""
    labels = samples.y
    if labels.dtype.kind == "f":
        with np.errstate(invalid="ignore"):  # nan and inf become a number that they do not equal
            wrong = labels.astype(np.int64) != labels
        if wrong.any():
            row = int(wrong.argmax())
            raise DataError(
                f"{samples.y_source}, row {row}: label {labels[row]}; expected a class: a whole"
                " number or text"
            )
    return labels.astype(np.int64 if labels.dtype.kind in "iuf" else np.str_)


def _class_numbers(labels: np.ndarray, names: np.ndarray, source: str) -> np.ndarray:
    """(n,) int64: the position of each label among the classes' names."""
    texts = labels.astype(np.str_)
    unknown = ~np.isin(texts, names)
    if unknown.any():
        row = int(unknown.argmax())
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        raise DataError(
            f"{source}, row {row}: label {labels[row].item()!r}; expected one of the classes"
            f" {names[:10].tolist()}{more}"
        )
    order = np.argsort(names)
    return order[np.searchsorted(names, texts, sorter=order)].astype(np.int64)


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
