"""Merges that select or refuse updates: the same weights in every engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedhet.runs.record.outcome import Run

LINES = ["method=scaffold", "rounds=2", "partition.clients=6", "client.epochs=1", "client.lr=.1"]
LINES += ["model.hidden=[8]", "eval.clients=false"]
MERGES = {
    "krum": ["merge=krum", "merge.attackers=1"],
    "norm_filter": [
        "merge=norm_filter",
        "merge.factor=1.2",
        "on_failure=skip",
        "replies.max_lost=1",
    ],
}
ENGINES = [
    ["engine.workers=2"],
    pytest.param(["engine=ray"], marks=pytest.mark.matrix),
    pytest.param(["engine=flwr", "engine.workers=2"], marks=pytest.mark.matrix),
]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda lines: lines[0])
@pytest.mark.parametrize("merge", MERGES)
def test_the_same_weights(launch: Callable[..., Run], merge: str, engine: list[str]) -> None:
    here = launch(*LINES, *MERGES[merge])
    there = launch(*LINES, *MERGES[merge], *engine)
    assert here.summary["weights_sha256"] == there.summary["weights_sha256"]
    assert here.summary["weights_sha256"] != launch(*LINES).summary["weights_sha256"]
    assert (merge == "norm_filter") == bool(there.summary["failures"])
    assert here.summary["rejected"] == there.summary["rejected"]
