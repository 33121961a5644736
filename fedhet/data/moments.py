"""Mean and standard deviation of samples that come in parts, such as one for each client."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedhet.data.array_cache import Arrays
from fedhet.errors import DataError

_ROWS = 1024  # at a time: a copy in float64


def moments(parts: Iterable[np.ndarray]) -> Arrays:
    """`mean` and `std` per column or channel over all parts together, in float64.

    Each part contributes its number of values, its mean and its sum of squared deviations, which
    are merged (Chan et al. 1979): nothing is computed on the samples of two parts together.

    Args:
        parts: the samples (n, C, ...) of each part; uint8 stands for pixels k/255. A part may be
            empty.

    Returns:
        mean: (C,).
        std: (C,); that of a constant, which is 0 up to rounding, becomes 1.

    Raises:
        DataError: there are no samples.
    """
    count = 0
    mean = np.zeros(())
    squares = np.zeros(())
    for part in parts:
        scale = 255 if part.dtype == np.uint8 else 1
        axes = (0, *range(2, part.ndim))
        for start in range(0, len(part), _ROWS):
            rows = part[start : start + _ROWS].astype(np.float64) / scale
            centre = rows.mean(axes)
            size = rows.size // len(centre)
            total = count + size
            step = centre - mean
            spread = ((rows - np.expand_dims(centre, axes)) ** 2).sum(axes)
            mean = mean + step * (size / total)
            squares = squares + spread + step**2 * (count * size / total)
            count = total
    if not count:
        raise DataError("no client has a training sample on which mean and std could be measured")
    std = np.sqrt(squares / count)
    constant = std <= np.finfo(np.float32).eps * np.abs(mean)
    return {"mean": mean, "std": np.where(constant, 1.0, std)}
