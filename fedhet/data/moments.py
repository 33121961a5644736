"""Mean and standard deviation of samples that come in parts, such as one for each client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from fedhet.core.errors import DataError
from fedhet.data.array_cache import Arrays

_ROWS = 1024  # at a time: a copy in float64


@dataclass(frozen=True)
class Moments:
    """What is known of a set of values per column or channel, in float64.

    Args:
        count: the number of values in each column.
        mean: (C,).
        squares: (C,), the sum of the squared deviations from `mean`.
    """

    count: int = 0
    mean: np.ndarray = field(default_factory=lambda: np.zeros(()))
    squares: np.ndarray = field(default_factory=lambda: np.zeros(()))

    def joined(self, other: Moments) -> Moments:
        """Those of both sets together (Chan et al. 1979)."""
        count = self.count + other.count
        if not count:
            return self
        step = other.mean - self.mean
        mean = self.mean + step * (other.count / count)
        squares = self.squares + other.squares + step**2 * (self.count * other.count / count)
        return Moments(count, mean, squares)

    @property
    def arrays(self) -> Arrays:
        """`mean` (C,) and `std` (C,); that of a constant, which is 0 up to rounding, becomes 1.

        Raises:
            DataError: there are no samples.
        """
        if not self.count:
            raise DataError(
                "no client has a training sample on which mean and std could be measured"
            )
        std = np.sqrt(self.squares / self.count)
        constant = std <= np.finfo(np.float32).eps * np.abs(self.mean)
        return {"mean": self.mean, "std": np.where(constant, 1.0, std)}


def joined(sets: Iterable[Moments]) -> Moments:
    """The moments of several sets together, joined in this order."""
    total = Moments()
    for each in sets:
        total = total.joined(each)
    return total


def moments(parts: Iterable[np.ndarray]) -> Moments:
    """The moments per column or channel of all parts together.

    Each part contributes its number of values, its mean and its sum of squared deviations: nothing
    is computed on the samples of two parts together.

    Args:
        parts: the samples (n, C, ...) of each part; uint8 stands for pixels k/255. A part may be
            empty.
    """
    return joined(chunk for part in parts for chunk in _chunks(part))


def _chunks(part: np.ndarray) -> Iterator[Moments]:
    scale = 255 if part.dtype == np.uint8 else 1
    axes = (0, *range(2, part.ndim))
    for start in range(0, len(part), _ROWS):
        rows = part[start : start + _ROWS].astype(np.float64) / scale
        centre = rows.mean(axes)
        spread = ((rows - np.expand_dims(centre, axes)) ** 2).sum(axes)
        yield Moments(rows.size // len(centre), centre, spread)
