"""Settings of a partition that are wrong, or impossible for the data."""

from __future__ import annotations

import numpy as np
import pytest
from data.schemes import NAMES, OWNERS, labels, make, natural

from fedhet.core.errors import ConfigError
from fedhet.data.partition import (
    Dirichlet,
    DrawnScheme,
    Iid,
    Natural,
    Pathological,
    Quantity,
    Shards,
)

# Of 100 samples in 10 classes.
IMPOSSIBLE = [
    (
        Iid,
        {"clients": 101, "min_size": 0},
        r"partition\.clients=101 .*101 samples, .*100",
    ),
    (
        Iid,
        {"clients": 10, "min_size": 11},
        r"partition\.clients=10 .*partition\.min_size=11: .*110 samples, .*100",
    ),
    pytest.param(
        Dirichlet,
        {"clients": 20, "alpha": 0.01, "min_size": 3},
        r"partition\.clients=20: .*50,000 draws .*partition\.min_size=3 .*100 samples .*10"
        r" classes; .*got [012] .*best.*alpha=0\.01",
        marks=pytest.mark.slow,
    ),
    (Pathological, {"classes": 11}, "partition.classes=11: .*data .*10 classes"),
    (
        Pathological,
        {"classes": 1, "clients": 15, "min_size": 6},
        r"partition\.clients=15: .*1 draws .*partition\.min_size=6 .*100 samples .*got 5 ",
    ),
    (
        Shards,
        {"shards": 11},
        r"partition\.shards=11: 10 clients .*110 shards, .*100 samples",
    ),
    (
        Quantity,
        {"sizes": "square"},
        "Quantity.*sizes='square'.*: .*client .*get none .*100 samples",
    ),
    (
        Quantity,
        {"sizes": "exponential", "clients": 100},
        "Quantity.*sizes='exponential'.*: .*100 samples",
    ),
    (
        Quantity,
        {"sizes": "linear", "min_size": 2},
        "partition.min_size=2: .*client .*get .*1 .*100",
    ),
    (
        Shards,
        {"shards": 3, "clients": 6, "min_size": 16},
        "partition.min_size=16: .*client .*get .*15 .*100",
    ),
]


@pytest.mark.parametrize(("kind", "keys", "message"), IMPOSSIBLE)
def test_impossible_settings_are_refused_with_the_numbers(
    kind: type[DrawnScheme], keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(kind, **keys).assign(labels(each=10), seed=0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"clients": 5},
            r"partition\.clients=5 .*partition\.min_size=0: .*4 .*4 owners",
        ),
        (
            {"clients": 3, "min_size": 14},
            r"partition\.clients=3 .*partition\.min_size=14: .*2 .*4 owners",
        ),
        ({"min_size": 31}, r"partition\.min_size=31: .*0 .*4 owners"),
    ],
)
def test_natural_refusals_have_the_numbers(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        natural(**keys).assign(np.zeros(50), 0, OWNERS, NAMES)


def test_natural_needs_owners() -> None:
    message = r"partition=natural: .*femnist.*shakespeare.*chest_xray"
    with pytest.raises(ConfigError, match=message):
        natural().assign(np.zeros(50), 0)


NAN = float("nan")
SPLITS = [
    [0.8, 0.2],
    [0.8, 0.1, 0.2],
    [0, 0.5, 0.5],
    [1.1, -0.1, 0],
    ["0.8", "0.1", "0.1"],
    0.8,
    "abc",
    [NAN] * 3,
]


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        (Iid, "clients", [0, -1, 2.0, "10", True, None]),
        (Iid, "min_size", [-1, 0.5]),
        (Iid, "split", SPLITS),
        (Dirichlet, "alpha", [0, -0.1, float("inf"), NAN, "0.3", True]),
        (Pathological, "classes", [0, 1.5]),
        (Shards, "shards", [0, "2"]),
        (Quantity, "sizes", ["equal", None]),
        (Quantity, "alpha", [0, "1"]),
        (Iid, "noise", [-0.1, float("inf"), NAN, "0.1", True, None]),
        (Natural, "clients", [0, -1, 2.0, "10", True]),
    ],
)
def test_wrong_values_name_their_key(
    kind: type[DrawnScheme], key: str, values: list[object]
) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"partition.{key}="):
            natural(**{key: value}) if kind is Natural else make(kind, **{key: value})
