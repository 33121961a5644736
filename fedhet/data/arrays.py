"""From arrays to a dataset: labels and owners as numbers, the cut into training and test set,
standardisation."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedhet import check
from fedhet.data.array_cache import Arrays
from fedhet.data.dataset import Dataset
from fedhet.errors import ConfigError, DataError
from fedhet.streams import generator
from fedhet.task import Samples

log = logging.getLogger("fedhet.data")
CHUNK = 1024  # rows at a time where a pass needs float64

# `dataset.mean` or `dataset.std`: "auto", or one number for each column or channel, or one for all
Standard = Sequence[float] | str
Classes = int | Sequence[str] | None  # `dataset.classes`


@dataclass(frozen=True)
class Part:
    """Samples as they were found: x (n, ...), labels y (n,), owners (n,) or None, and where from,
    for messages: (of x, of y)."""

    x: np.ndarray
    y: np.ndarray
    owners: np.ndarray | None
    where: tuple[str, str]

    def __post_init__(self) -> None:
        for what, values in (("labels", self.y), ("owners", self.owners)):
            if values is not None and values.shape != (len(self.x),):
                raise DataError(
                    f"{self.where[0]}: {what} have shape {values.shape}; expected ({len(self.x)},),"
                    " one for each sample"
                )
        if (
            self.owners is not None
            and self.owners.dtype.kind == "f"
            and (missing := np.isnan(self.owners)).any()
        ):
            raise DataError(
                f"{self.where[0]}, row {int(missing.argmax())}: its owner is nan; each sample"
                " needs one"
            )
        if not len(self.x):
            raise DataError(f"{self.where[0]} has no sample")


def gather(train: Part, test: Part | None, classes: Classes, test_fraction: float = 0.0) -> Arrays:
    """What `assemble` makes a dataset of.

    Args: test: None: `test_fraction` of the training part, the same samples whatever the seed of
        the run. classes: None: the labels that occur in the training part, sorted; C: they are 0 ..
        C-1; or the labels in this order.

    Raises: DataError: a label is none of the classes, or missing; it names file and row. Or a part
        would be empty.
    """
    labels, test_labels = _plain(train), None if test is None else _plain(test)
    names = np.unique(labels).astype(np.str_) if classes is None else _named(classes)
    x, y, owners = train.x, _places(labels, names, train.where[1]), train.owners
    if test is None or test_labels is None:
        rows, held = _cut(len(x), test_fraction, train.where[0])
        test_x, test_y = x[held], y[held]
        x, y, owners = x[rows], y[rows], None if owners is None else owners[rows]
    else:
        test_x, test_y = test.x, _places(test_labels, names, test.where[1])
    found = {"x": x, "y": y, "test_x": test_x, "test_y": test_y, "classes": names, **_moments(x)}
    return found if owners is None else {**found, **owned(owners)}


def owned(owners: np.ndarray) -> Arrays:
    """Owners as numbers in the order of their names."""
    names, numbers = np.unique(
        owners if owners.dtype.kind in "iu" else owners.astype(np.str_), return_inverse=True
    )
    return {"owners": numbers.astype(np.int64), "owner_names": names.astype(np.str_)}


def assemble(name: str, arrays: Arrays, mean: Standard = (0.0,), std: Standard = (1.0,)) -> Dataset:
    """The dataset of the arrays x, y, test_x, test_y, classes and, where samples have owners,
    owners and owner_names.

    "auto" stands for the arrays mean and std: those of `gather` are over all training samples.
    """
    x, y, test_x, test_y = (torch.from_numpy(arrays[key]) for key in ("x", "y", "test_x", "test_y"))
    given: dict[str, Any] = {"mean": mean, "std": std}
    if "auto" in given.values():
        given = {
            key: arrays[key].tolist() if value == "auto" else value for key, value in given.items()
        }
        log.info(
            "%s: standardised by mean %s and std %s; auto took them from all %d training samples",
            name,
            *given.values(),
            len(x),
        )
    owners = arrays.get("owners")
    return Dataset(
        name,
        x,
        y,
        Samples(test_x, test_y),
        tuple(arrays["classes"].tolist()),
        given["mean"],
        given["std"],
        owners,
        () if owners is None else tuple(arrays["owner_names"].tolist()),
    )


def _moments(x: np.ndarray) -> Arrays:
    """`mean` and `std` per column or channel, in float64; the std of a constant, 0 but for
    rounding, becomes 1."""
    scale, axes = 255 if x.dtype == np.uint8 else 1, (0, *range(2, x.ndim))
    chunks = [x[at : at + CHUNK] for at in range(0, len(x), CHUNK)]
    mean = sum((chunk / scale).sum(axes, np.float64) for chunk in chunks) * x.shape[1] / x.size
    centre = np.expand_dims(mean, axes)
    std = np.sqrt(
        sum(((chunk / scale - centre) ** 2).sum(axes) for chunk in chunks) * x.shape[1] / x.size
    )
    return {"mean": mean, "std": np.where(std <= np.finfo(np.float32).eps * np.abs(mean), 1.0, std)}


def _named(classes: int | Sequence[str]) -> np.ndarray:
    if isinstance(classes, int):
        return np.arange(check.integer("dataset.classes", classes, low=1)).astype(np.str_)
    if isinstance(classes, str) or not classes or len(set(map(str, classes))) < len(classes):
        raise ConfigError(
            f"dataset.classes={classes}: must be null, a number of classes, or a list of different"
            " labels"
        )
    return np.array([str(label) for label in classes])


def _plain(part: Part) -> np.ndarray:
    """Labels as whole numbers or text."""
    labels, where = part.y, part.where[1]
    if labels.dtype.kind == "f":
        with np.errstate(
            invalid="ignore"
        ):  # NaN and infinite ones become some number, which they do not equal
            wrong = labels.astype(np.int64) != labels
        if wrong.any():
            row = int(wrong.argmax())
            raise DataError(
                f"{where}, row {row}: label {labels[row]}; expected a class: a whole number or text"
            )
    return labels.astype(np.int64 if labels.dtype.kind in "iuf" else np.str_)


def _places(labels: np.ndarray, names: np.ndarray, where: str) -> np.ndarray:
    """(n,) int64: where each label stands among the names."""
    wrong = ~np.isin(labels.astype(np.str_), names)
    if wrong.any():
        row, more = int(wrong.argmax()), f" and {len(names) - 10} more" if len(names) > 10 else ""
        raise DataError(
            f"{where}, row {row}: label {labels[row].item()!r}; expected one of the classes"
            f" {names[:10].tolist()}{more}"
        )
    order = np.argsort(names)
    return order[np.searchsorted(names, labels.astype(np.str_), sorter=order)].astype(np.int64)


def _cut(n: int, fraction: float, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train and those to test, ascending."""
    held = math.floor(n * fraction + 0.5)
    if not 0 < held < n:
        raise DataError(
            f"{where}: dataset.test_fraction={fraction} of its {n} samples are {held}; training and"
            " test set need one at least"
        )
    order = generator(0, "test_fraction").permutation(n)
    return np.sort(order[held:]), np.sort(order[:held])
