"""Phases of plug-ins: they come before those of the method, and only their owner's hooks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from contracts.three import Three

from fedhet.core.check import setting as option
from fedhet.core.client.context import ClientContext, Fitted
from fedhet.core.kernel import (
    Expected,
    Merged,
    Message,
    Phase,
    Plugin,
    Result,
    State,
    Step,
    Term,
    Update,
    serves,
)
from fedhet.core.messages import Extras
from fedhet.core.server.run_setup import RunSetup
from fedhet.core.task import Samples
from fedhet.core.trees import Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg

CLIENTS = 5


@dataclass(frozen=True, kw_only=True)
class Gauge(Plugin):
    """Before the training every client sends its largest input.

    The server sends the largest of them to the clients that train.
    """

    name = "gauge"

    rounds: int = option(1, low=1)

    def setup(self, setup: RunSetup) -> State:
        return {"most": 0.0}

    def phases(self, setup: RunSetup) -> list[Phase]:
        return [Phase("fit", self.rounds, self._collect, slot="", cohort=1.0)]

    def expects(self, step: Step) -> dict[str, Expected]:
        return {"most": Expected()} if step.phase == "fit" else {}

    @serves
    def fit(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        return Result(extras={"most": float(ctx.data.x.max())}), state

    def _collect(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        return Merged({}, {"most": max(update["most"] for update in updates)})

    def broadcast(self, step: Step, state: State) -> Extras:
        return {"most": state["most"]} if step.trains else {}

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        if msg["most"] != pytest.approx(1.0, abs=0.2):
            raise ValueError(f"most is {msg['most']}")
        return []


@dataclass(frozen=True, kw_only=True)
class Witness(Plugin):
    """Notes the phases in which its hooks run."""

    name = "witness"
    seen: ClassVar[set[str]] = set()

    def data(self, samples: Samples, state: State) -> Samples:
        self.seen.add("data")
        return samples

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        self.seen.add(msg.phase)
        return []

    def finish(
        self, msg: Message, state: State, ctx: ClientContext, fitted: Fitted
    ) -> tuple[Result, State]:
        self.seen.add(f"finish {msg.phase}")
        return Result(), state

    def broadcast(self, step: Step, state: State) -> Extras:
        self.seen.add(f"out {step.phase}")
        return {}

    def after(
        self, step: Step, state: State, old: Tree, new: Tree, updates: Sequence[Update]
    ) -> Merged:
        self.seen.add(f"after {step.phase}")
        return Merged(new, state)


def test_phases_of_plugins_come_first_and_run_no_other_hooks(
    federation: Callable[..., Any],
) -> None:
    Witness.seen.clear()
    run = federation(
        toy_task(CLIENTS), Three, plugins=lambda: [Witness(), Gauge(rounds=2)], rounds=1
    )
    timetable = [(entry.name, entry.rounds) for entry in run.strategy.timetable]
    assert timetable == [("gauge.fit", 2), ("explore", 1), ("density", 20), ("train", 1)]
    plan = run.step()
    assert len(plan) == CLIENTS
    assert (plan[0].phase, plan[0].weights, plan[0].extras) == ("gauge.fit", {}, {})
    assert run.current.bytes == {"down": {}, "up": {"gauge.most": 8 * CLIENTS}}
    run.run()
    assert Witness.seen == {"data", "train", "finish train", "out train", "after train"}


def test_phases_before_the_training_do_not_change_it(federation: Callable[..., Any]) -> None:
    plain = federation(toy_task(), FedAvg, rounds=2).run()
    gauged = federation(toy_task(), FedAvg, plugins=lambda: [Gauge(rounds=3)], rounds=2).run()
    assert plain.sha256 == gauged.sha256
    assert gauged.round == 5
