"""Phases, a second slot, early stopping, extras both ways and client state, by a strategy made for
the purpose.

`explore`: everyone sends how far one epoch takes each weight; the model stays. `density`: a second
slot moves half way to the mean of the data, until it moves no more; afterwards its best value is
put back. `train`: gradients are masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.common import RecordDict
from torch import Tensor

from fedhet import trees
from fedhet.client import FedClient
from fedhet.data.toy import toy_task
from fedhet.errors import RunFailed
from fedhet.flower import wire
from fedhet.messages import Broadcast, Extras, Failure, Update
from fedhet.methods.fedavg import FedAvg
from fedhet.phases import Phase
from fedhet.plugin import Plugin
from fedhet.server_opt import FedAvgM
from fedhet.setting import Setting
from fedhet.state import ContextStore, DiskStore, MemoryStore
from fedhet.strategy import FedStrategy
from fedhet.trees import Tree

CLIENTS, TOLERANCE = 5, 0.02


class ThreeClient(FedClient):
    def explore(self, msg: Broadcast) -> Update:
        assert msg.extras["three.pid"] == self.pid
        self.train_model(self.site.load(self.start(msg)), self.data, epochs=1)
        far = trees.map(
            lambda d: d.square().float(),
            trees.Difference(self.site.read(self.site.trained), msg.weights),
        )
        return Update(self.pid, self.num_examples, extras={"three.far": far})

    def density(self, msg: Broadcast) -> Update:
        mean = msg.weights["mean"]
        moved = {
            "mean": mean + (self.data.x.double().mean(0) - mean) / 2,
            "seen": msg.weights["seen"] + self.pid,
        }
        return Update(self.pid, self.num_examples, moved)

    def train(self, msg: Broadcast) -> Update:
        mask = msg.extras["three.mask"]
        assert isinstance(mask, dict)
        self.mask = [mask[name] for name in self.site.trained]
        return super().train(msg)

    def gradient(self, grads: list[Tensor]) -> None:
        if self.msg.trains:
            torch._foreach_mul_(grads, self.mask)


class Three(FedStrategy):
    name = "three"
    client_cls = ThreeClient

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.far: dict[int, Tree] = {}
        self.path: list[Tensor] = []
        self.closed: list[int] = []

    def slots(self) -> dict[str, Tree]:
        return {"density": {"mean": torch.zeros(4, dtype=torch.float64), "seen": torch.tensor(0)}}

    def phases(self) -> list[Phase]:
        density = Phase(
            "density",
            20,
            self.walk,
            slot="density",
            cohort=1.0,
            until=self.still,
            after=self.restore,
        )
        return [
            Phase("explore", 1, self.note, cohort=1.0, uploads=False),
            density,
            *super().phases(),
        ]

    def client_extras(self, phase: Phase, pid: int) -> Extras:
        return {"three.pid": pid} if phase.name == "explore" else {}

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        if phase.name != "train":
            return {}
        return {
            "three.mask": trees.map(
                lambda d: (d > d.median()).float(),
                trees.mean((far, 1.0) for far in self.far.values()),
            )
        }

    def note(self, updates: Iterator[Update], old: Tree) -> Tree:
        self.far = {update.pid: update.tree("three.far", self.site.initial) for update in updates}
        return {}

    def walk(self, updates: Iterator[Update], old: Tree) -> Tree:
        new = self.merge(updates, old)
        self.path.append(new["mean"])
        return new

    def still(self) -> bool:
        return len(self.path) > 1 and float((self.path[-1] - self.path[-2]).abs().max()) < TOLERANCE

    def restore(self) -> None:
        self.closed.append(self.current.round)
        self.weights["density"] = {**self.weights["density"], "mean": self.path[1]}


def test_three_phases(federation: Callable[..., Any]) -> None:
    task = toy_task(CLIENTS)
    run = federation(task, Three, rounds=3, fraction=0.4)
    strategy, start = run.strategy, trees.map(torch.clone, run.model)

    plan = run.step()
    assert [msg.pid for msg in plan] == [4, 3, 2, 1, 0] and set(strategy.far) == set(range(CLIENTS))
    assert all(torch.equal(run.model[name], start[name]) for name in start) and not strategy.due
    assert all((far["head.bias"] > 0).all() for far in strategy.far.values())
    assert strategy.current.bytes["up"] == {"three.far": CLIENTS * trees.nbytes(start)}
    assert strategy.current.bytes["down"] == {
        "model": CLIENTS * trees.nbytes(start),
        "three.pid": CLIENTS * 8,
    }

    # w <- w + (m - w)/2 goes through m (1 - 2^-t), m the mean of all samples, so it moves by m 2^-t
    # in step t.
    m = torch.cat([client.train.x for client in task.clients]).double().mean(0)
    steps = next(t for t in range(2, 20) if float(m.max()) * 0.5**t < TOLERANCE)
    for t in range(1, steps + 1):
        plan = run.step()
        assert (
            plan[0].phase == "density"
            and plan[0].step == t
            and plan[0].slot == "density"
            and list(plan[0].weights) == ["mean", "seen"]
        )
        torch.testing.assert_close(strategy.path[-1], m * (1 - 0.5**t), rtol=1e-9, atol=1e-12)
        assert (
            int(strategy.weights["density"]["seen"]) == 4 * t
        )  # whole numbers: the largest of the replies
    assert strategy.closed == [1 + steps] and torch.equal(
        strategy.weights["density"]["mean"], strategy.path[1]
    )
    assert [(entry.name, entry.rounds) for entry in strategy.timetable] == [
        ("explore", 1),
        ("density", steps),
        ("train", 3),
    ]

    density = strategy.weights["density"]
    plan = run.step()
    assert (plan[0].phase, plan[0].step, plan[0].round, len(plan)) == (
        "train",
        1,
        2 + steps,
        2,
    ) and strategy.due
    mask = plan[0].extras["three.mask"]
    for name in mask:  # masked entries stay where they were, the others move
        moved = run.model[name] != start[name]
        assert not moved[mask[name] == 0].any() and moved[mask[name] == 1].any()
    run.run()
    assert run.round == 1 + steps + 3 and strategy.weights["density"] is density
    with pytest.raises(RunFailed, match="past the end of the timetable"):
        strategy.plan(run.round + 1)


def test_a_phase_that_is_never_still_ends_after_its_rounds(
    federation: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Three, "still", lambda self: False)
    strategy = federation(toy_task(CLIENTS), Three, rounds=1).run().strategy
    assert [entry.rounds for entry in strategy.timetable] == [1, 20, 1] and strategy.closed == [21]


def test_server_optimisers_act_on_the_training_only(federation: Callable[..., Any]) -> None:
    plain, slow = (
        federation(toy_task(CLIENTS), Three, rounds=1, server_opt=opt).run()
        for opt in (None, FedAvgM(lr=0.5))
    )
    assert torch.equal(
        slow.strategy.weights["density"]["mean"], plain.strategy.weights["density"]["mean"]
    )
    assert slow.sha256 != plain.sha256


def test_everything_survives_the_wire(
    federation: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes when every message passes through Flower's types, with extras inline and as
    blocks."""
    expected = federation(toy_task(CLIENTS), Three, rounds=2).run().sha256
    for limit in (0, 2**25):
        monkeypatch.setattr(wire, "INLINE_LIMIT", limit)
        run = federation(toy_task(CLIENTS), Three, rounds=2)

        def carried(plan: list[Broadcast], replies: list[Any], run: Any = run) -> list[Any]:
            packer = wire.Packer()
            return [
                wire.read_result(msg, run.client().to_client().fit(wire.fit_ins(msg, packer)))
                for msg in plan
            ]

        assert run.run(alter=carried).sha256 == expected


def test_a_density_that_is_bad_names_client_phase_and_step(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(CLIENTS), Three)
    run.step()
    run.step()

    def damage(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        replies[1].weights["mean"] = replies[1].weights["mean"].float()
        return replies

    with pytest.raises(
        RunFailed,
        match=(
            r"client 3 failed in phase 'density', step 2: weights, tensor 'mean'.*float32.*float64"
        ),
    ):
        run.step(damage)


def test_weights_in_a_phase_without_a_slot_are_refused(federation: Callable[..., Any]) -> None:
    class Slotless(Three):
        def phases(self) -> list[Phase]:
            return [Phase("density", 1, lambda updates, old: None, slot="")]

    run = federation(toy_task(CLIENTS), Slotless)
    with pytest.raises(
        RunFailed, match=r"client 4 failed in phase 'density', step 1: .*carries weights"
    ):
        run.step(
            lambda plan, replies: [Update(msg.pid, 5, {"mean": torch.zeros(4)}) for msg in plan]
        )


# ---- phases of plug-ins


class Gauge(Plugin):
    """Before the training: every client tells its largest input, the server remembers the overall
    one and sends it along."""

    name = "gauge"

    def __init__(self, rounds: int = 1) -> None:
        super().__init__(rounds=rounds)
        self.rounds = rounds
        self.most = 0.0

    def phases(self) -> list[Phase]:
        return [Phase("fit", self.rounds, self.collect, slot="", cohort=1.0)]

    def fit(self, msg: Broadcast) -> Update:
        return Update(
            self.client.pid,
            self.client.num_examples,
            extras={"gauge.most": float(self.client.data.x.max())},
        )

    def collect(self, updates: Iterator[Update], old: Tree) -> Tree:
        self.most = max(update.scalar("gauge.most") for update in updates)
        return {}

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        if msg.trains:
            msg.extras["gauge.most"] = self.most

    def prepare(self, msg: Broadcast) -> None:
        if msg.trains and msg.extras["gauge.most"] != pytest.approx(1.0, abs=0.2):
            raise ValueError(f"gauge.most is {msg.extras['gauge.most']}")


class Witness(Plugin):
    """Notes the phases in which its hooks run."""

    name = "witness"
    seen: set[str] = set()

    def prepare(self, msg: Broadcast) -> None:
        self.seen.add(msg.phase)

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        self.seen.add(f"out {msg.phase}")


def test_phases_of_plugins_come_first_and_are_theirs_alone(federation: Callable[..., Any]) -> None:
    Witness.seen.clear()
    run = federation(toy_task(CLIENTS), Three, plugins=lambda: [Witness(), Gauge(2)], rounds=1)
    assert [(e.name, e.rounds) for e in run.strategy.timetable] == [
        ("gauge.fit", 2),
        ("explore", 1),
        ("density", 20),
        ("train", 1),
    ]
    plan = run.step()
    assert (plan[0].phase, plan[0].weights, plan[0].extras, len(plan)) == (
        "gauge.fit",
        {},
        {},
        CLIENTS,
    )
    assert run.strategy.current.bytes == {"down": {}, "up": {"gauge.most": 8 * CLIENTS}}
    run.run()
    assert Witness.seen == {"train", "out train"}


def test_warm_ups_do_not_move_the_training(federation: Callable[..., Any]) -> None:
    plain, warm = (
        federation(toy_task(), FedAvg, rounds=2),
        federation(toy_task(), FedAvg, plugins=lambda: [Gauge(3)], rounds=2),
    )
    assert plain.run().sha256 == warm.run().sha256 and warm.round == 5


# ---- what clients remember


class CountingClient(FedClient):
    """Counts its participations, and sends the count."""

    def train(self, msg: Broadcast) -> Update:
        found = self.state.get("counting.n")
        n = {"n": (found["n"] if found else torch.tensor(0)) + 1}
        self.state.put("counting.n", n)
        if n["n"] == 2 and self.pid == 1 and self.site.seed == 7:
            self.site.seed = 8  # fails once
            raise OSError("battery")
        update = super().train(msg)
        update.extras["counting.n"] = int(n["n"])
        return update


class Counting(FedAvg):
    client_cls = CountingClient

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        held = list(updates)
        self.counts = {update.pid: int(update.scalar("counting.n")) for update in held}
        return super().merge(iter(held), old)


@pytest.mark.parametrize("kind", ["memory", "disk", "context"])
def test_state_advances_only_where_the_server_accepted(
    federation: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    run = federation(toy_task(3), Counting, seed=7, rounds=6, on_failure="skip")
    run.store = {
        "memory": MemoryStore,
        "disk": lambda: DiskStore(tmp_path),
        "context": lambda: ContextStore(RecordDict()),
    }[kind]()

    # client 2 has done its work, but the reply is damaged
    def lost(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        for reply in replies:
            if reply.pid == 2:
                reply.num_examples = 0
        return replies

    counts = []
    for alter in (None, None, lost, lost, None, None):
        run.step(*([alter] if alter else []))
        counts.append(dict(sorted(run.strategy.counts.items())))
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
    assert run.strategy.versions == {0: 6, 1: 6, 2: 6}


def test_a_lost_state_is_told(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(3), Counting, rounds=2)
    run.step()
    run.store = MemoryStore()
    with pytest.raises(
        RunFailed, match=r"client 2 failed in phase 'train', step 2: .*state of round 1 is missing"
    ):
        run.step()


def test_a_phase_that_nobody_serves_is_told(federation: Callable[..., Any]) -> None:
    class Asking(FedAvg):
        def phases(self) -> list[Phase]:
            return [Phase("explore", 1, lambda updates, old: None)]

    run = federation(toy_task(3), Asking)
    reply = run.client().handle(run.strategy.plan(1)[0])
    assert isinstance(reply, Failure) and "phase 'explore' is not served here" in reply.cause
