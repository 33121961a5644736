"""What clients remember, in one process: in memory, and in files beyond a limit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedhet import state
from fedhet.data.toy import toy_task

Launch = Callable[..., Any]


def test_states_beyond_the_limit_lie_on_disk(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = ["method=scaffold", "rounds=4", "fraction=0.5", "client.lr=0.1", "eval.clients=false"]
    reference = launch(*lines, task=toy_task(6))
    largest: list[int] = []

    class Small(state.MemoryStore):
        def __init__(self) -> None:
            super().__init__(limit=1)

        def save(self, *args: Any, **how: Any) -> None:
            super().save(*args, **how)
            largest.append(len(self._states))

    monkeypatch.setattr("fedhet.engines.local.MemoryStore", Small)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spilled = launch(*lines, task=toy_task(6))
    assert spilled.summary["weights_sha256"] == reference.summary["weights_sha256"]
    assert max(largest) == 1 and reference.summary["client_state"]["clients"] > 2


def test_a_full_disk_loses_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails for the client whose state is saved; the one whose state was to leave the memory
    keeps it."""

    def full(self: Any, *args: Any, **how: Any) -> None:
        raise OSError("no space left")

    store = state.MemoryStore(limit=1)
    store.save(0, 1, {"a": torch.ones(8)}, keep=0)
    monkeypatch.setattr(state.DiskStore, "save", full)
    with pytest.raises(OSError, match="no space left"):
        store.save(1, 1, {"a": torch.ones(8)}, keep=0)
    assert store.load(0, 1) is not None


def test_a_spilled_state_keeps_the_version_that_the_server_accepted() -> None:
    store = state.MemoryStore(limit=1)
    tree = {"a": torch.zeros(8)}
    for pid in (0, 1):
        store.save(pid, 1, tree, keep=0)
    store.save(0, 2, {"a": torch.ones(8)}, keep=1)
    store.save(1, 2, tree, keep=1)  # puts client 0's second version on disk
    for version in (1, 2):
        found = store.load(0, version)
        assert found is not None and torch.equal(found["a"], torch.full((8,), version - 1.0))
    store.save(0, 3, tree, keep=2)
    store.save(1, 3, tree, keep=2)
    assert (
        store.load(0, 1) is None and store.load(0, 2) is not None and store.load(0, 3) is not None
    )


@pytest.mark.parametrize("limit", [1, 60, 200])
def test_a_store_is_what_a_dictionary_is(limit: int) -> None:
    """Whoever takes part, changes nothing, or is left out: a client reads what the server last
    accepted."""
    draw, store = random.Random(limit), state.MemoryStore(limit)
    accepted: dict[int, tuple[int, float]] = {}
    for version in range(1, 40):
        for pid in draw.sample(range(5), 3):
            last, value = accepted.get(pid, (0, None))
            own = state.ClientState(store, pid, last)
            found = own.get("piece")
            assert (None if found is None else float(found["x"][0])) == value
            if draw.random() < 0.8:
                own.put("piece", {"x": torch.full((draw.randint(1, 9),), float(version))})
                assert own.commit(version)
                if draw.random() < 0.7:
                    accepted[pid] = version, float(version)
    assert len(accepted) == 5
