"""Phases of plug-ins: they come before those of the method, and only their owner's hooks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contracts.three import Three

from fedhet.core.messages import Broadcast, Update
from fedhet.core.phases import Phase
from fedhet.core.plugin import Plugin
from fedhet.core.trees import Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg

CLIENTS = 5


class Gauge(Plugin):
    """Before the training every client sends its largest input.

    The server sends the largest of them to the clients that train.
    """

    name = "gauge"

    def __init__(self, rounds: int = 1) -> None:
        super().__init__(rounds=rounds)
        self.rounds = rounds
        self.most = 0.0

    def phases(self) -> list[Phase]:
        return [Phase("fit", self.rounds, self.collect, check=self.look, slot="", cohort=1.0)]

    def look(self, update: Update) -> None:
        update.scalar("gauge.most")

    def fit(self, msg: Broadcast) -> Update:
        client = self.client
        most = float(client.data.x.max())
        return Update(client.pid, client.num_examples, extras={"gauge.most": most})

    def collect(self, updates: Iterator[Update], old: Tree) -> Tree:
        self.most = max(update.scalar("gauge.most") for update in updates)
        return {}

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        if msg.trains:
            msg.extras["gauge.most"] = self.most

    def prepare(self, msg: Broadcast) -> None:
        if msg.trains and msg.scalar("gauge.most") != pytest.approx(1.0, abs=0.2):
            raise ValueError(f"gauge.most is {msg.extras['gauge.most']}")


class Witness(Plugin):
    """Notes the phases in which its hooks run."""

    name = "witness"
    seen: set[str] = set()

    def prepare(self, msg: Broadcast) -> None:
        self.seen.add(msg.phase)

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        self.seen.add(f"out {msg.phase}")


def test_phases_of_plugins_come_first_and_run_no_other_hooks(
    federation: Callable[..., Any],
) -> None:
    Witness.seen.clear()
    run = federation(toy_task(CLIENTS), Three, plugins=lambda: [Witness(), Gauge(2)], rounds=1)
    timetable = [(entry.name, entry.rounds) for entry in run.strategy.timetable]
    assert timetable == [("gauge.fit", 2), ("explore", 1), ("density", 20), ("train", 1)]
    plan = run.step()
    assert len(plan) == CLIENTS
    assert (plan[0].phase, plan[0].weights, plan[0].extras) == ("gauge.fit", {}, {})
    assert run.strategy.current.bytes == {"down": {}, "up": {"gauge.most": 8 * CLIENTS}}
    run.run()
    assert Witness.seen == {"train", "out train"}


def test_phases_before_the_training_do_not_change_it(federation: Callable[..., Any]) -> None:
    plain = federation(toy_task(), FedAvg, rounds=2).run()
    gauged = federation(toy_task(), FedAvg, plugins=lambda: [Gauge(3)], rounds=2).run()
    assert plain.sha256 == gauged.sha256
    assert gauged.round == 5
