"""Special cases in which one method must be another one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fedhet.data.toy import toy_task

Launch = Callable[..., Any]
COMMON = [
    "seed=1",
    "rounds=2",
    "fraction=0.75",
    "client.epochs=1",
    "client.batch_size=5",
    "client.lr=0.1",
    "eval.every=2",
    "eval.clients=false",
]


def weights_sha256(launch: Launch, overrides: list[str]) -> str:
    return launch(*COMMON, *overrides, task=toy_task()).summary["weights_sha256"]


FAST = [
    (["method=fedprox", "plugin.fedprox.mu=0"], ["method=fedavg"]),
    (["method=fednorm"], ["method=fedavg", "plugin=[fednorm]"]),
    (["method=fedavgm", "server_opt.beta=0"], ["method=fedavg"]),
]
SLOW = [
    (["method=fedprox"], ["method=fedavg", "plugin=[fedprox]"]),
    (["method=fedavgm"], ["method=fedavg", "server_opt=fedavgm"]),
    (["method=fedadam"], ["method=fedavg", "server_opt=fedadam"]),
    (["method=fedyogi"], ["method=fedavg", "server_opt=fedyogi"]),
    (["method=fedadagrad"], ["method=fedavg", "server_opt=fedadagrad"]),
    (["method=scaffold", "plugin=[fedprox]", "plugin.fedprox.mu=0"], ["method=scaffold"]),
]


@pytest.mark.parametrize(
    ("one", "other"),
    [*FAST, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)],
    ids=lambda overrides: "+".join(overrides),
)
def test_same_bytes(launch: Launch, one: list[str], other: list[str]) -> None:
    assert weights_sha256(launch, one) == weights_sha256(launch, other)


def test_no_two_methods_are_the_same(launch: Launch) -> None:
    """So that the equalities above are not those of a setting that nothing reads."""
    runs = [
        ["method=fedavg"],
        ["method=fedprox"],
        ["method=fednorm"],
        ["method=scaffold"],
        ["method=fedavgm"],
        ["method=fedadam"],
        ["method=fedyogi"],
        ["method=fedadagrad"],
        ["method=fednorm", "plugin=[fedprox]"],
        ["method=scaffold", "plugin=[fednorm]"],
        ["method=fedavg", "seed=2"],
        ["method=fedavg", "client.lr=0.2"],
    ]
    hashes = {weights_sha256(launch, overrides) for overrides in runs}
    assert len(hashes) == len(runs)
