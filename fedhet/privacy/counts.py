"""The smallest number of samples of which a client sends a statistic."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedhet.errors import ConfigError

if TYPE_CHECKING:
    from fedhet.client import FedClient

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
    except ValueError:
        own = -1
    if own < 0:  # a server gets this text, and so it is without the value
        raise ConfigError(f"{FLOOR} in the environment must be a whole number >= 0")
    return max(configured, own)


def told_size(client: FedClient) -> float:
    """Return the size of a client's state in bytes, without what would tell its counts."""
    hidden = [key for plugin in client.plugins for key in plugin.unsized]
    return float(client.state.nbytes(hidden if client.site.min_count else ()))


def withheld(counts: Sequence[int], least: int) -> list[bool]:
    """Return which of the counts are not told.

    They are those below `least`. Their sum follows from the number of all samples, which is known,
    and is a count as well: while it is above 0 and below `least`, the smallest of the others is
    withheld with them. A class without samples adds nothing to the sum.

    Args:
        counts: the numbers of samples of each class.
        least: the smallest count that is told.
    """
    hidden: set[int] = set()
    rest = 0
    for c in sorted(range(len(counts)), key=lambda c: counts[c]):
        if counts[c] >= least and not 0 < rest < least:
            break
        hidden.add(c)
        rest += counts[c]
    return [c in hidden for c in range(len(counts))]


def suppressed(counts: Tensor, least: int) -> Tensor:
    """Return the counts with 0 in place of those that are withheld.

    Args:
        counts: (C,) the numbers of samples of each class, integers.
        least: the smallest count that is told.
    """
    hidden = torch.tensor(withheld(counts.tolist(), least), dtype=torch.bool, device=counts.device)
    return counts.masked_fill(hidden, 0)
