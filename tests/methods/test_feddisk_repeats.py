"""FedDisk: runs that must end with equal weights, or with different ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from methods.feddisk_task import COMMON, LINES, Make, kept, plugins

from fedhet.core import trees
from fedhet.core.kernel import Plugin
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
def test_weights_of_one_are_the_host_bit_for_bit(federation: Make, cls: type) -> None:
    settings = {"rounds": 3, "fraction": 0.5}
    ones = federation(toy_task(), cls, plugins=plugins(min_samples=99), **settings).run()
    host = federation(toy_task(), cls, **settings).run()
    weighted = federation(toy_task(), cls, plugins=plugins(), **settings).run()
    sha256 = [trees.sha256({"model": run.model}) for run in (ones, host, weighted)]
    assert sha256[0] == sha256[1] != sha256[2]
    if cls is FedAvg:
        for pid in range(4):
            assert torch.equal(kept(ones, pid), torch.ones(12 + 4 * pid))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["method=feddisk"], ["method=fedavg", "plugin=[feddisk]"]),
        pytest.param(
            ["method=feddisk"], ["method=feddisk", "engine.workers=2"], marks=pytest.mark.slow
        ),
    ],
    ids=["plugin", "workers"],
)
def test_same_bytes(launch: Make, one: list[str], other: list[str]) -> None:
    first, second = (launch(*COMMON, *LINES, *lines, task=toy_task()) for lines in (one, other))
    assert first.summary["weights_sha256"] == second.summary["weights_sha256"]


def test_every_option_changes_the_result(federation: Make) -> None:
    changes: list[dict[str, Any]] = [
        {"ratio": "sampled"},
        {"ratio": "outputs"},
        {"ratio": "raw"},
        {"features": "conditional"},
        {"binarise": True},
        {"masks": "random"},
        {"normalise": "none"},
        {"normalise": "minmax2"},
        {"clf_lr": 0.1},
        {"made_lr": 0.01},
        {"min_samples": 20},
        {"made_local_epochs": 1},
    ]
    sha256 = set()
    for change in changes:
        run = federation(toy_task(), FedAvg, plugins=plugins(**change)).run()
        sha256.add(run.sha256)
    assert len(sha256) == len(changes)


@pytest.mark.parametrize(
    "ratio", ["sampled", *(pytest.param(r, marks=pytest.mark.slow) for r in ("outputs", "raw"))]
)
def test_it_composes_and_repeats(federation: Make, ratio: str) -> None:
    def both() -> list[Plugin]:
        return [*plugins(ratio=ratio)(), FedNormPlugin()]

    def run() -> Any:
        task = toy_task(norm=True)
        return federation(task, Scaffold, plugins=both, rounds=3, fraction=0.5).run()

    first = run()
    second = run()
    assert first.sha256 == second.sha256
    assert trees.first_nonfinite(first.model) is None


def test_the_model_sees_the_same_cohorts_and_batches_with_and_without_it(federation: Make) -> None:
    settings = {"rounds": 2, "fraction": 0.5}
    with_it = federation(toy_task(), FedAvg, plugins=plugins(), **settings)
    without = federation(toy_task(), FedAvg, **settings)
    cohorts = [[msg.pid for msg in without.step()] for _ in range(2)]
    while not with_it.round or with_it.current.entry.name != "feddisk.weigh":
        with_it.step()
    assert [[msg.pid for msg in with_it.step()] for _ in range(2)] == cohorts
