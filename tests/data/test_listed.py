"""partition=listed: the classes of each client are chosen by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from data.schemes import counts, labels, make

from fedhet.core.errors import ConfigError
from fedhet.data.partition import Listed

OTHERS = [*range(8)]


def test_clients_that_list_a_class_share_it_equally() -> None:
    y = labels(each=31)
    scheme = make(Listed, clients=3, classes=[OTHERS, OTHERS, [8, 9]])
    held = counts(y, scheme.assign(y, seed=0))
    assert held[2].tolist() == [0] * 8 + [31, 31]
    assert np.array_equal(held[:2].sum(0), [31] * 8 + [0, 0])
    assert np.abs(held[0, :8] - held[1, :8]).max() == 1


def test_the_lists_are_used_in_turn_and_the_samples_are_drawn() -> None:
    y = labels()
    scheme = make(Listed, clients=5, classes=[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])
    partition = scheme.assign(y, seed=0)
    has = (counts(y, partition) > 0).astype(int)
    assert np.array_equal(has, [[1] * 5 + [0] * 5, [0] * 5 + [1] * 5] * 2 + [[1] * 5 + [0] * 5])
    other = scheme.assign(y, seed=1)
    assert any(
        not np.array_equal(a, b) for a, b in zip(partition.indices, other.indices, strict=True)
    )


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (3, "partition.classes=3 .*list"),
        ([], r"partition.classes=\[\]: .*lists"),
        ([3], r"partition.classes\[0\]=3 .*list"),
        ([[0, 0]], r"partition.classes=\[\[0, 0\]\]: .*lists .*different classes"),
        ([[0], []], r"partition.classes=\[\[0\], \[\]\]: .*lists .*least one "),
        ([[0, -1]], r"partition.classes\[0\]\[1\]=-1 .*>= 0"),
        ([[True]], r"partition.classes\[0\]\[0\]=true "),
        ([[0, 1]], r"clients' .*\[0, 1\], .*data .*\[0, 1, 2,"),
        ([[*range(10)], [10]], r"clients' .*9, 10\], .*data .*9\]"),
    ],
)
def test_what_does_not_fit_is_refused(classes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(Listed, clients=2, classes=classes).assign(labels(), seed=0)
