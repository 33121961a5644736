"""A partition in which the classes of each client are chosen by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedhet.core.errors import ConfigError
from fedhet.data.flower_scheme import random_order
from fedhet.data.scheme import DrawnScheme


@dataclass(frozen=True, kw_only=True)
class Listed(DrawnScheme):
    """Client p has the classes of the list number p mod m, where there are m lists.

    Each class is divided at random, and equally, among the clients that have it.

    Args:
        classes: lists of the classes' numbers; together they have all classes of the data.
    """

    by_class: ClassVar[bool] = True
    classes: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        super().__post_init__()
        lists = self.classes
        if isinstance(lists, str) or not isinstance(lists, Sequence) or not lists:
            raise ConfigError(
                f"partition.classes={lists!r}: must be lists of classes, such as [[0,1],[2,3]]"
            )
        for each in lists:
            numbers = [] if isinstance(each, str) or not isinstance(each, Sequence) else [*each]
            fits = all(type(number) is int and number >= 0 for number in numbers)
            if not numbers or not fits or len(set(numbers)) < len(numbers):
                raise ConfigError(
                    f"partition.classes: {each!r} must be a list of different whole numbers >= 0,"
                    " as in [[0,1],[2,3]]"
                )
        object.__setattr__(self, "classes", tuple(tuple(each) for each in lists))

    def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
        has = [set(self.classes[pid % len(self.classes)]) for pid in range(self.clients)]
        present, listed = set(np.unique(labels).tolist()), set().union(*has)
        if present != listed:
            problem = (
                f"there is no class {min(listed - present)}"
                if listed - present
                else f"no client has the class {min(present - listed)}"
            )
            raise ConfigError(
                f"partition.classes: {problem}; the classes of the data are {sorted(present)}"
            )
        order = random_order(labels, seed)
        parts: list[list[np.ndarray]] = [[] for _ in has]
        for label in sorted(present):
            holders = [pid for pid, own in enumerate(has) if label in own]
            shares = np.array_split(order[labels[order] == label], len(holders))
            for pid, share in zip(holders, shares, strict=True):
                parts[pid].append(share)
        return [np.concatenate(own) for own in parts]
