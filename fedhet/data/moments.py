"""Moments of columns or channels, and the statistics of a client's own training part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.core.errors import ConfigError, DataError
from fedhet.core.objects import are_pixels
from fedhet.core.task import Samples
from fedhet.data.array_cache import Arrays
from fedhet.data.dataset import MEDIAN, OWN, Dataset

_ROWS = 1024  # rows that are copied to float64 at a time
_ROUNDING = 1e-12  # relative rounding error of a float64 mean


# ---- mean and standard deviation of several parts of samples
@dataclass(frozen=True)
class Moments:
    """Moments of a set of values per column or channel, in float64.

    Args:
        count: the number of values in each column; a single number or (C,).
        mean: (C,).
        squares: (C,), the sum of the squared deviations from `mean`.
    """

    count: int | np.ndarray = 0
    mean: np.ndarray = field(default_factory=lambda: np.zeros(()))
    squares: np.ndarray = field(default_factory=lambda: np.zeros(()))

    def joined(self, other: Moments) -> Moments:
        """Return the moments of both sets together (Chan et al. 1979)."""
        count = self.count + other.count
        if not np.any(count):
            return self
        each = np.maximum(count, 1)
        step = other.mean - self.mean
        mean = self.mean + step * (other.count / each)
        squares = self.squares + other.squares + step**2 * (self.count * other.count / each)
        return Moments(count, mean, squares)

    @property
    def arrays(self) -> Arrays:
        """`mean` (C,) and `std` (C,); 0 and 1 for a column without values.

        If a column is constant (its std is 0 up to rounding), the std becomes 1.

        Raises:
            DataError: there are no samples.
        """
        if not np.any(self.count):
            raise DataError("no client has a training sample to measure mean and std on")
        std = np.sqrt(self.squares / np.maximum(self.count, 1))
        constant = std <= _ROUNDING * np.abs(self.mean)
        return {"mean": self.mean, "std": np.where(constant, 1.0, std)}


def joined(sets: Iterable[Moments]) -> Moments:
    """Return the moments of several sets together, joined in this order."""
    return reduce(Moments.joined, sets, Moments())


def moments(parts: Iterable[np.ndarray]) -> Moments:
    """Return the moments per column or channel of all parts together.

    Each part contributes only its number of values, mean and sum of squared deviations, as sites
    do. No computation uses samples of two parts.

    Args:
        parts: the samples (n, C, ...) of each part. uint8 k means the pixel k/255. A part may be
            empty. If a chunk of up to _ROWS rows has NaN in a column, the whole chunk counts as
            having no values in this column.
    """
    return joined(chunk for part in parts for chunk in _chunks(part))


def _chunks(part: np.ndarray) -> Iterator[Moments]:
    scale = 255 if are_pixels(part) else 1
    axes = (0, *range(2, part.ndim))
    for start in range(0, len(part), _ROWS):
        rows = part[start : start + _ROWS].astype(np.float64) / scale
        centre = rows.mean(axes)
        spread = ((rows - np.expand_dims(centre, axes)) ** 2).sum(axes)
        known = ~np.isnan(centre)
        count = known * (rows.size // len(centre))
        yield Moments(count, np.where(known, centre, 0.0), np.where(known, spread, 0.0))


# ---- statistics of a client's own training part
@dataclass(frozen=True)
class Own:
    """Statistics of one client's training part, which prepare all parts of its table.

    Attributes:
        median: (F,), replaces missing values (NaN) with `dataset.missing=median`; else None. If the
            training part has no value in a column, this is the mean that normalises the column, so
            the model sees 0; it is NaN as long as this mean is not measured.
        mean, std: (F,), of the training part after missing values are filled, with
            `dataset.mean=own`; else None.
    """

    median: Tensor | None = None
    mean: Tensor | None = None
    std: Tensor | None = None

    @classmethod
    def of(cls, dataset: Dataset, train: Tensor) -> Own:
        """Compute the statistics of a training part (n, F), n > 0, that `dataset` requires."""
        median = None
        if dataset.missing == MEDIAN:
            columns = [column[~np.isnan(column)] for column in train.numpy().T]
            found = [float(np.median(values)) if len(values) else np.nan for values in columns]
            median = torch.tensor(found, dtype=torch.float64)
        if dataset.mean != OWN:
            return cls(_completed(median, dataset.mean))
        measured = moments([cls(median)(train).numpy()]).arrays
        mean, std = (torch.from_numpy(measured[key]) for key in ("mean", "std"))
        return cls(_completed(median, mean), mean, std)

    @classmethod
    def unknown(cls, dataset: Dataset) -> Own:
        """Return the statistics for samples without an owner: missing values become the mean.

        Raises:
            ConfigError: each client normalises by its own mean.
        """
        if dataset.mean == OWN:
            raise ConfigError(
                f"dataset.mean=own: the global test set of {dataset.name} has samples that"
                " belong to no client, so no mean normalises them; use partition=natural"
                " with all owners, or partition.pool_test=true, or set dataset.mean and"
                " dataset.std to auto or numbers, or, with dataset=local, leave out dataset.test"
            )
        return cls(torch.tensor(dataset.mean, dtype=torch.float64))

    def __call__(self, x: Tensor) -> Tensor:
        """Fill the missing values of x (n, F), and normalise it, each if it is required."""
        if self.median is not None:
            x = torch.where(x.isnan(), self.median, x)
        return x if self.mean is None or self.std is None else (x - self.mean) / self.std

    def samples(self, samples: Samples) -> Samples:
        """Return the samples with prepared inputs."""
        return Samples(self(samples.x), samples.y)

    @property
    def record(self) -> dict[str, list[float]]:
        """The statistics as lists, for partition.json."""
        return {key: value.tolist() for key, value in vars(self).items() if value is not None}


def _completed(median: Tensor | None, mean: Any) -> Tensor | None:
    """Replace NaN among the medians by the mean of the column, if the means are known."""
    if median is None or isinstance(mean, str):
        return median
    return torch.where(median.isnan(), torch.as_tensor(mean, dtype=torch.float64), median)
