"""A method's phases: cohorts, slots, extras both ways, early ends, and what may not be sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from contracts.hostile import served
from contracts.three import TOLERANCE, Three

from fedhet.core import trees
from fedhet.core.errors import RunFailed
from fedhet.core.kernel import Merged, Phase, State, Step, Update
from fedhet.core.messages import Broadcast, Failure, Upload
from fedhet.core.server.run_setup import RunSetup
from fedhet.core.server.server_opt import FedAvgM
from fedhet.core.trees import Tree
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.methods.fedavg import FedAvg

CLIENTS = 5


def nothing(step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
    """A merge that changes nothing."""
    return Merged({}, state)


def test_three_phases(federation: Callable[..., Any]) -> None:
    task = toy_task(CLIENTS)
    run = federation(task, Three, rounds=3, fraction=0.4)
    strategy = run.strategy
    start = trees.map(torch.clone, run.model)
    size = trees.nbytes(start)

    plan = run.step()
    assert [msg.pid for msg in plan] == [4, 3, 2, 1, 0]
    assert set(strategy.run.states["method"]["far"]) == set(range(CLIENTS))
    assert all(torch.equal(run.model[name], start[name]) for name in start)
    assert not strategy.evaluates_after(run.current)
    assert all(
        (far["head.bias"] > 0).all() for far in strategy.run.states["method"]["far"].values()
    )
    assert run.current.bytes["up"] == {"three.far": CLIENTS * size}
    assert run.current.bytes["down"] == {"model": CLIENTS * size, "three.step": CLIENTS * 8}

    # w <- w + (m - w)/2 goes through m (1 - 2^-t), m the mean of all samples, so it moves by m 2^-t
    # in step t.
    m = torch.cat([client.train.x for client in task.clients]).double().mean(0)
    steps = next(t for t in range(2, 20) if float(m.max()) * 0.5**t < TOLERANCE)
    for t in range(1, steps + 1):
        msg = run.step()[0]
        assert (msg.phase, msg.step, msg.slot) == ("density", t, "density")
        assert list(msg.weights) == ["mean", "seen"]
        torch.testing.assert_close(
            strategy.run.states["method"]["path"][-1], m * (1 - 0.5**t), rtol=1e-9, atol=1e-12
        )
        # The largest of the replies, as for all whole numbers.
        assert int(strategy.weights["density"]["seen"]) == 4 * t
    assert strategy.run.states["method"]["ended"] == [1 + steps]
    assert torch.equal(
        strategy.weights["density"]["mean"], strategy.run.states["method"]["path"][1]
    )
    timetable = [(entry.name, entry.rounds) for entry in strategy.timetable]
    assert timetable == [("explore", 1), ("density", steps), ("train", 3)]

    density = strategy.weights["density"]
    plan = run.step()
    msg = plan[0]
    assert (msg.phase, msg.step, msg.round, len(plan)) == ("train", 1, 2 + steps, 2)
    assert strategy.evaluates_after(run.current)
    mask = msg.tree("three.mask")
    for name in mask:  # masked entries stay where they were, the others move
        moved = run.model[name] != start[name]
        assert not moved[mask[name] == 0].any() and moved[mask[name] == 1].any()
    run.run()
    assert run.round == 1 + steps + 3
    assert strategy.weights["density"] is density
    with pytest.raises(RunFailed, match="timetable"):
        strategy.plan(run.round + 1)


def test_a_phase_that_never_ends_early_ends_after_its_rounds(
    federation: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Three, "_still", lambda self, state: False)
    strategy = federation(toy_task(CLIENTS), Three, rounds=1).run().strategy
    assert [entry.rounds for entry in strategy.timetable] == [1, 20, 1]
    assert strategy.run.states["method"]["ended"] == [21]


def test_server_optimisers_act_on_the_training_only(federation: Callable[..., Any]) -> None:
    plain = federation(toy_task(CLIENTS), Three, rounds=1).run()
    slow = federation(toy_task(CLIENTS), Three, rounds=1, server_opt=FedAvgM(lr=0.5)).run()
    mean = plain.strategy.weights["density"]["mean"]
    assert torch.equal(slow.strategy.weights["density"]["mean"], mean)
    assert slow.sha256 != plain.sha256


def test_everything_survives_the_wire(federation: Callable[..., Any]) -> None:
    """The same bytes when every message passes through Flower's types."""
    expected = federation(toy_task(CLIENTS), Three, rounds=2).run().sha256
    run = federation(toy_task(CLIENTS), Three, rounds=2)

    def carried(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        packer = wire.MessagePacker()
        return [
            wire.read_result(msg, served(run).fit(wire.fit_ins(msg, packer)), 2**20) for msg in plan
        ]

    assert run.run(alter=carried).sha256 == expected


def test_a_bad_density_is_reported_with_client_phase_and_step(
    federation: Callable[..., Any],
) -> None:
    run = federation(toy_task(CLIENTS), Three)
    run.step()
    run.step()

    def damage(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        replies[1].weights["mean"] = replies[1].weights["mean"].float()
        return replies

    place = "client 3 .*'density', step 2"
    with pytest.raises(RunFailed, match=rf"{place}: .*weights.*'mean'.*float32.*float64"):
        run.step(damage)


def test_weights_in_a_phase_without_a_slot_are_refused(federation: Callable[..., Any]) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Slotless(Three):
        def phases(self, setup: RunSetup) -> list[Phase]:
            return [Phase("density", 1, nothing, slot="")]

    def with_weights(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        return [Upload(msg.pid, 5, {"mean": torch.zeros(4)}) for msg in plan]

    run = federation(toy_task(CLIENTS), Slotless)
    place = "client 4 .*'density', step 1"
    with pytest.raises(RunFailed, match=rf"{place}: .*weights"):
        run.step(with_weights)


def test_a_phase_that_no_object_serves_is_reported(federation: Callable[..., Any]) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Asking(FedAvg):
        def phases(self, setup: RunSetup) -> list[Phase]:
            return [Phase("explore", 1, nothing)]

    run = federation(toy_task(3), Asking)
    reply = run.client().handle(run.strategy.plan(1).messages[0])
    assert isinstance(reply, Failure)
    assert "phase 'explore' is not served here" in reply.cause


@dataclass(frozen=True, kw_only=True)
class WrongNames(FedAvg):
    """Returns a tensor that the phase does not have."""

    breaks = {}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        merged = super().merge(step, state, old, updates)
        return merged._replace(weights={**merged.weights, "x": torch.zeros(1)})


def test_a_merge_with_wrong_names_is_reported(federation: Callable[..., Any]) -> None:
    with pytest.raises(RunFailed, match=r"'train': .*merge.*\['x'\].* names"):
        federation(toy_task(), WrongNames, rounds=1).step()


@dataclass(frozen=True, kw_only=True)
class WrongKind(FedAvg):
    """Returns the new tensors alone."""

    breaks = {}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Any:
        return dict(old)


def test_a_merge_that_returns_something_else_is_reported(federation: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"'train' .* dict.* Merged"):
        federation(toy_task(), WrongKind, rounds=1).step()
