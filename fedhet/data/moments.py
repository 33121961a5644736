"""What samples say of their columns or channels: moments, and what a client takes of its own."""

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

_ROWS = 1024  # of moments at a time: a copy in float64
_ROUNDING = 1e-12  # relative, of a mean in float64 over any number of rows


# ---- mean and standard deviation of samples that come in parts
@dataclass(frozen=True)
class Moments:
    """What is known of a set of values per column or channel, in float64.

    Args:
        count: the number of values in each column, one for all or (C,).
        mean: (C,).
        squares: (C,), the sum of the squared deviations from `mean`.
    """

    count: int | np.ndarray = 0
    mean: np.ndarray = field(default_factory=lambda: np.zeros(()))
    squares: np.ndarray = field(default_factory=lambda: np.zeros(()))

    def joined(self, other: Moments) -> Moments:
        """Those of both sets together (Chan et al. 1979)."""
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
        """`mean` (C,) and `std` (C,), those of a column without values 0 and 1.

        The std of a constant, which is 0 up to rounding, becomes 1.

        Raises:
            DataError: there are no samples.
        """
        if not np.any(self.count):
            raise DataError(
                "no client has a training sample on which mean and std could be measured"
            )
        std = np.sqrt(self.squares / np.maximum(self.count, 1))
        constant = std <= _ROUNDING * np.abs(self.mean)
        return {"mean": self.mean, "std": np.where(constant, 1.0, std)}


def joined(sets: Iterable[Moments]) -> Moments:
    """The moments of several sets together, joined in this order."""
    return reduce(Moments.joined, sets, Moments())


def moments(parts: Iterable[np.ndarray]) -> Moments:
    """The moments per column or channel of all parts together.

    Each part contributes its number of values, its mean and its sum of squared deviations: nothing
    is computed on the samples of two parts together.

    Args:
        parts: the samples (n, C, ...) of each part; uint8 stands for pixels k/255. A part may be
            empty. A column in which a part has NaN is without values there.
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


# ---- what a client takes of its own training part
@dataclass(frozen=True)
class Own:
    """Statistics of one client's training part, by which all parts of its table are made ready.

    Attributes:
        median: (F,) what missing cells (NaN) become, with `dataset.missing=median`; or None. For a
            column without any value in the training part it is the mean by which the column is
            normalised, so that the model sees 0; NaN while that is still to be measured.
        mean, std: (F,) of the training part without missing cells, with `dataset.mean=own`; or
            None.
    """

    median: Tensor | None = None
    mean: Tensor | None = None
    std: Tensor | None = None

    @classmethod
    def of(cls, dataset: Dataset, train: Tensor) -> Own:
        """Those of a training part (n, F), n > 0, of which `dataset` says what is wanted."""
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
        """Those for samples of nobody: missing cells become the mean.

        Raises:
            ConfigError: each client normalises by its own mean.
        """
        if dataset.mean == OWN:
            raise ConfigError(
                f"dataset.mean=own: the global test set of {dataset.name} has samples of which no"
                " client is the owner, so that there is no mean to normalise them by; use"
                " partition=natural with all owners, or partition.pool_test=true, or dataset.mean"
                " and dataset.std as auto or numbers, or, of dataset=local, no dataset.test"
            )
        return cls(torch.tensor(dataset.mean, dtype=torch.float64))

    def __call__(self, x: Tensor) -> Tensor:
        """(n, F), with missing cells filled and normalised, as far as that is wanted."""
        if self.median is not None:
            x = torch.where(x.isnan(), self.median, x)
        return x if self.mean is None or self.std is None else (x - self.mean) / self.std

    def samples(self, samples: Samples) -> Samples:
        """The samples, made ready."""
        return Samples(self(samples.x), samples.y)

    @property
    def record(self) -> dict[str, list[float]]:
        """The numbers, for partition.json."""
        return {key: value.tolist() for key, value in vars(self).items() if value is not None}


def _completed(median: Tensor | None, mean: Any) -> Tensor | None:
    """The medians with the mean for a column without one, where the mean is known."""
    if median is None or isinstance(mean, str):
        return median
    return torch.where(median.isnan(), torch.as_tensor(mean, dtype=torch.float64), median)
