"""The smallest number of samples of which a client sends a statistic."""

from __future__ import annotations

import os

from torch import Tensor

from fedhet.check import integer
from fedhet.errors import ConfigError

FLOOR = "FEDHET_MIN_COUNT"


def least_count(configured: int) -> int:
    """Return the smallest number of samples of which this machine's clients send a statistic.

    It is `privacy.min_count`, or what the machine's owner has set in the environment variable
    FEDHET_MIN_COUNT if that is more: a run can raise the number, but not lower it.

    Args:
        configured: the run's `privacy.min_count`.

    Raises:
        ConfigError: the variable is no whole number >= 0.
    """
    text = os.environ.get(FLOOR)
    if text is None:
        return configured
    try:
        own = int(text)
    except ValueError as error:
        raise ConfigError(f"{FLOOR}={text!r} must be a whole number >= 0") from error
    return max(configured, integer(FLOOR, own, low=0))


def suppressed(counts: Tensor, least: int) -> Tensor:
    """Return the counts with 0 in place of those below `least`.

    The number of all samples is known, so a single small count would follow by subtraction. The
    smallest of the others is then suppressed as well.

    Args:
        counts: (C,) the numbers of samples of each class, integers.
        least: the smallest count that is told.
    """
    small = counts < least
    if int(small.sum()) == 1 and len(counts) > 1 and int(counts[small]) > 0:
        small[counts.masked_fill(small, int(counts.max()) + 1).argmin()] = True
    return counts.masked_fill(small, 0)
