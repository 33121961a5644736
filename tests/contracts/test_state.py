"""What clients remember from round to round, and the stores that keep it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.common import RecordDict

from fedhet.core.client import state
from fedhet.core.client.context import ClientContext
from fedhet.core.errors import RunFailed
from fedhet.core.kernel import (
    Client,
    Expected,
    Merged,
    Message,
    Result,
    State,
    Step,
    Update,
    serves,
)
from fedhet.core.messages import Broadcast
from fedhet.core.trees import Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.runs import stores

Launch = Callable[..., Any]


class CountingClient(Client):
    """Counts its participations and sends the count. Client 1 fails in its second one."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        n = state.get("n", torch.tensor(0)) + 1
        if n == 2 and msg.pid == 1 and ctx.workspace.seed == 7:
            ctx.workspace.seed = 8  # so that it fails once
            raise OSError("battery")
        return Result(ctx.fit(msg.weights).params, {"n": int(n)}), {"n": n}


@dataclass(frozen=True, kw_only=True)
class Counting(FedAvg):
    name = "counting"
    client = CountingClient
    breaks = {}

    def expects(self, step: Step) -> dict[str, Expected]:
        return {"n": Expected(whole=True)}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        everyone = list(updates)
        merged = super().merge(step, state, old, iter(everyone))
        return merged._replace(state={"counts": {update.pid: update["n"] for update in everyone}})


@pytest.mark.parametrize("kind", ["memory", "disk", "context"])
def test_state_advances_only_where_the_server_accepted(
    federation: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    run = federation(toy_task(3), Counting, seed=7, rounds=6, on_failure="skip")
    if kind == "memory":
        run.store = stores.MemoryStore()
    elif kind == "disk":
        run.store = stores.DiskStore(tmp_path)
    else:
        run.store = stores.ContextStore(RecordDict())

    def damage(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        for reply in replies:
            if reply.pid == 2:  # it has done its work, but the server refuses the reply
                reply.num_examples = 0
        return replies

    counts = []
    for alter in (None, None, damage, damage, None, None):
        run.step(*([alter] if alter else []))
        counts.append(dict(sorted(run.strategy.run.states["method"]["counts"].items())))
    # Client 1 raised in its second participation, after it had counted; client 2 was left out in
    # rounds 3 and 4.
    assert counts == [
        {0: 1, 1: 1, 2: 1},
        {0: 2, 2: 2},
        {0: 3, 1: 2},
        {0: 4, 1: 3},
        {0: 5, 1: 4, 2: 3},
        {0: 6, 1: 5, 2: 4},
    ]
    assert run.strategy.run.versions == {0: 6, 1: 6, 2: 6}


def test_a_lost_state_is_reported(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(3), Counting, rounds=2)
    run.step()
    run.store = stores.MemoryStore()
    place = "client 2 .*'train', step 2"
    with pytest.raises(RunFailed, match=rf"{place}: .*round 1 .*missing"):
        run.step()


# ---- the store in memory, which moves states to files beyond a limit


def test_states_beyond_the_limit_lie_on_disk(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = ["method=scaffold", "rounds=4", "fraction=0.5", "client.lr=0.1", "eval.clients=false"]
    reference = launch(*lines, task=toy_task(6))
    largest: list[int] = []

    class Small(stores.MemoryStore):
        def __init__(self) -> None:
            super().__init__(limit=1)

        def save(self, *args: Any, **how: Any) -> None:
            super().save(*args, **how)
            largest.append(len(self._states))

    monkeypatch.setattr("fedhet.engines.in_process.MemoryStore", Small)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spilled = launch(*lines, task=toy_task(6))
    assert spilled.summary["weights_sha256"] == reference.summary["weights_sha256"]
    assert max(largest) == 1 and reference.summary["client_state"]["clients"] > 2


def test_a_full_disk_loses_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving fails for the client whose state is new.

    The state that was to leave the memory stays there.
    """

    def full(self: Any, *args: Any, **how: Any) -> None:
        raise OSError("no space left")

    store = stores.MemoryStore(limit=1)
    store.save(0, 1, {"a": torch.ones(8)}, keep=[0])
    monkeypatch.setattr(stores.DiskStore, "save", full)
    with pytest.raises(OSError, match="no space left"):
        store.save(1, 1, {"a": torch.ones(8)}, keep=[0])
    assert store.load(0, 1) is not None


def test_a_spilled_state_keeps_the_version_that_the_server_accepted() -> None:
    store = stores.MemoryStore(limit=1)
    tree = {"a": torch.zeros(8)}
    for pid in (0, 1):
        store.save(pid, 1, tree, keep=[0])
    store.save(0, 2, {"a": torch.ones(8)}, keep=[1])
    store.save(1, 2, tree, keep=[1])  # moves client 0's second version to disk
    for version in (1, 2):
        kept = store.load(0, version)
        assert kept is not None and torch.equal(kept["a"], torch.full((8,), version - 1.0))
    store.save(0, 3, tree, keep=[2])
    store.save(1, 3, tree, keep=[2])
    assert [store.load(0, version) is not None for version in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize("kind", ["memory", "spilled", "disk", "context"])
def test_pinned_versions_are_kept(tmp_path: Path, kind: str) -> None:
    """Beside the accepted one, and until they are pinned no more."""
    kinds: dict[str, state.Store] = {
        "memory": stores.MemoryStore(),
        "spilled": stores.MemoryStore(limit=1),
        "disk": stores.DiskStore(tmp_path),
        "context": stores.ContextStore(RecordDict()),
    }
    store = kinds[kind]

    def advance(to: int, pinned: list[int]) -> list[int]:
        """Save version `to` of both clients; return the versions of client 0 that are there."""
        for pid in (0, 1):
            own = state.ClientState(store, pid, to - 1, pinned=pinned)
            own.put("piece", {"x": torch.full((8,), float(to))})
            assert own.commit(to)
        there = {version: store.load(0, version) for version in range(1, to + 1)}
        for version, tree in there.items():
            assert tree is None or float(tree["piece/x"][0]) == version
        return [version for version, tree in there.items() if tree is not None]

    assert advance(1, []) == [1]
    assert advance(2, [1]) == [1, 2]
    assert advance(3, [1]) == [1, 2, 3]
    assert advance(4, [1]) == [1, 3, 4]
    assert advance(5, [3]) == [3, 4, 5]
    assert advance(6, []) == [5, 6]


@pytest.mark.parametrize("limit", [1, 60, 200])
def test_the_store_behaves_as_a_dictionary(limit: int) -> None:
    """Clients take part, change nothing, or are left out, at random.

    Each always reads the state that the server accepted last.
    """
    draw = random.Random(limit)
    store = stores.MemoryStore(limit)
    accepted: dict[int, tuple[int, float]] = {}
    for version in range(1, 40):
        for pid in draw.sample(range(5), 3):
            last, value = accepted.get(pid, (0, None))
            own = state.ClientState(store, pid, last)
            kept = own.get("piece")
            assert (None if kept is None else float(kept["x"][0])) == value
            if draw.random() < 0.8:
                own.put("piece", {"x": torch.full((draw.randint(1, 9),), float(version))})
                assert own.commit(version)
                if draw.random() < 0.7:
                    accepted[pid] = version, float(version)
    assert len(accepted) == 5


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_only_put_changes_a_state(tmp_path: Path, disk: bool) -> None:
    """What `get` returns may be changed in place: neither the stored version nor a later `get`
    sees it."""
    store = stores.DiskStore(tmp_path) if disk else stores.MemoryStore()
    first = state.ClientState(store, pid=0, version=0)
    first.put("m.h", {"w": torch.zeros(2)})
    assert first.commit(1)
    second = state.ClientState(store, pid=0, version=1)
    read = second.get("m.h")
    assert read is not None
    read["w"].add_(5)
    for again in (second, state.ClientState(store, pid=0, version=1)):
        kept = again.get("m.h")
        assert kept is not None and kept["w"].tolist() == [0, 0]
