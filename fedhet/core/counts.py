"""Rules by which a client hides counts and other statistics of few samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def withheld(counts: Sequence[int], least: int) -> list[bool]:
    """Return for each count whether the client withholds it.

    The client withholds all counts below `least`. The server knows the number of all samples, so it
    can compute the sum of the withheld counts, which is a count as well. While this sum is above 0
    and below `least`, the client also withholds the smallest remaining count.

    Args:
        counts: the number of samples of each class.
        least: the smallest count that the client sends.
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
    """Return the counts, with the withheld counts set to 0.

    Args:
        counts: (C,) the number of samples of each class, integers.
        least: the smallest count that the client sends.
    """
    hidden = torch.tensor(withheld(counts.tolist(), least), dtype=torch.bool, device=counts.device)
    return counts.masked_fill(hidden, 0)


def coarse(counts: Tensor, samples: int, least: int) -> Tensor:
    """Round counts so that none of them reveals a group of fewer than `least` samples.

    A count reveals how many samples are counted, and how many are not. The smaller of these two
    numbers is rounded down to a multiple of `least`, so fewer than `least` samples look like none.

    Args:
        counts: integers from 0 to `samples`.
        samples: the number of all samples.
        least: the smallest number that may be revealed; 0 or 1 leaves the counts unchanged.
    """
    fewer = torch.minimum(counts, samples - counts)
    rounded = fewer - fewer % max(1, least)
    return torch.where(2 * counts <= samples, rounded, samples - rounded)


def counts_few(values: np.ndarray, least: int) -> list[bool]:
    """Return for each column whether its moments reveal a group of fewer than `least` samples.

    The moments are the count, the mean and the sum of squares. There are two cases:

    - Fewer than `least` samples differ from the most frequent value. Then the moments describe
      these samples.
    - Some value occurs in fewer than `least` samples, and the column has few distinct values. Three
      moments determine how often each of up to three distinct values occurs. With more distinct
      values, they nearly do if some values are much larger than the rest.

    Args:
        values: (n, C, ...), the samples.
        least: the smallest number of samples that may be revealed.
    """
    return [_counts_few(column, least) for column in np.moveaxis(values, 1, 0)]


def _counts_few(column: np.ndarray, least: int) -> bool:
    found, counts = np.unique(column, return_counts=True)
    groups = [column != found[counts.argmax()]]
    if len(found) <= 3 or len(column) >= 2 * least * len(found):
        groups += [column == value for value in found]
    return any(group.reshape(len(column), -1).any(1).sum() < least for group in groups)
