"""The server holds the weights of few clients at one time, however many reply in a step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import fedhet
from fedhet.core.kernel import Update
from fedhet.core.messages import Upload
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg


def test_replies_are_merged_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    merge = FedAvg.merge

    def watched(updates: Iterator[Update]) -> Iterator[Update]:
        # One tensor of each client's weights; a tensor may outlive its message.
        known: dict[int, weakref.ref[Tensor]] = {}
        for update in updates:
            for each in gc.get_objects():
                if type(each) is Upload and each.weights:
                    first = next(iter(each.weights.values()))
                    known[id(first)] = weakref.ref(first)
            held.append(sum(ref() is not None for ref in known.values()))
            yield update

    def merging(self: FedAvg, step: Any, state: Any, old: Any, updates: Iterator[Update]) -> Any:
        return merge(self, step, state, old, watched(updates))

    monkeypatch.setattr(FedAvg, "merge", merging)
    lines = ["method=fedavg", "rounds=2", "eval.clients=false", f"hydra.run.dir={tmp_path}/run"]
    fedhet.run(lines, task=toy_task(8))
    assert len(held) == 16
    assert 1 <= max(held) <= 3
