"""Counts and other statistics of few samples, which a client does not reveal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def withheld(counts: Sequence[int], least: int) -> list[bool]:
    """Return which of the counts are withheld.

    They are those below `least`. Their sum follows from the number of all samples, which is known,
    and is a count as well: while it is above 0 and below `least`, the smallest of the others is
    withheld with them. A class without samples adds nothing to the sum.

    Args:
        counts: the numbers of samples of each class.
        least: the smallest count that is sent.
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
        least: the smallest count that is sent.
    """
    hidden = torch.tensor(withheld(counts.tolist(), least), dtype=torch.bool, device=counts.device)
    return counts.masked_fill(hidden, 0)


def coarse(counts: Tensor, samples: int, least: int) -> Tensor:
    """Return counts of some samples in steps that reveal no few of them.

    Of the samples that are counted and the others, the smaller number is rounded down to a multiple
    of `least`: fewer than `least` look like none, and one number reveals what the other does.

    Args:
        counts: integers from 0 to `samples`.
        samples: how many there are.
        least: the smallest number that is revealed; with 0 or 1 the counts stay as they are.
    """
    fewer = torch.minimum(counts, samples - counts)
    rounded = fewer - fewer % max(1, least)
    return torch.where(2 * counts <= samples, rounded, samples - rounded)


def counts_few(values: np.ndarray, least: int) -> list[bool]:
    """Return of which columns the moments reveal how many samples have a value, if these are few.

    Count, mean and squares describe fewer than `least` samples if all others have the same value.
    They are three equations, which determine how often each of up to three values occurs, and
    nearly so where some of few values are much larger than the others.

    Args:
        values: (n, C, ...), the samples.
        least: the smallest number of samples that is revealed.
    """
    return [_counts_few(column, least) for column in np.moveaxis(values, 1, 0)]


def _counts_few(column: np.ndarray, least: int) -> bool:
    found, counts = np.unique(column, return_counts=True)
    kinds = [column != found[counts.argmax()]]
    if len(found) <= 3 or len(column) >= 2 * least * len(found):
        kinds += [column == value for value in found]
    return any(kind.reshape(len(column), -1).any(1).sum() < least for kind in kinds)
