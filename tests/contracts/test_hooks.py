"""Plug-ins: the order of their hooks, the settings that they may change, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedhet.core.errors import ConfigError
from fedhet.core.messages import Broadcast, Update
from fedhet.core.plugin import Plugin
from fedhet.core.training import Batch
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg, FedAvgClient
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.scaffold import Scaffold

Federation = Callable[..., Any]


class Noting(Plugin):
    """Notes every call of a hook and changes nothing."""

    def __init__(self, name: str, notes: list[str]) -> None:
        super().__init__()
        self.name = name  # type: ignore[misc]
        self.notes = notes

    def note(self, hook: str) -> None:
        self.notes.append(f"{hook} {self.name}")

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        self.note("outgoing")

    def incoming(self, updates: Iterator[Update], old: Tree) -> Iterator[Update]:
        self.note("incoming")
        return updates

    def merged(self, new: Tree, old: Tree) -> Tree:
        self.note("merged")
        assert all(t.dtype == torch.float64 for t in new.values())
        return new

    def prepare(self, msg: Broadcast) -> None:
        self.note("prepare")

    def losses(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        self.note("losses")
        return torch.zeros(len(batch.y))

    def penalty(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        self.note("penalty")
        return torch.zeros(())

    def gradient(self, grads: Tree, params: AnyTree, own: Prepared) -> None:
        self.note("gradient")

    def scale(self, grads: Tree, own: Prepared) -> None:
        self.note("scale")

    def finish(self, update: Update) -> None:
        self.note("finish")


def test_the_order_of_hooks(federation: Federation) -> None:
    """In order on the way out, reversed on the way back; shared work is done once per step."""
    notes: list[str] = []
    run = federation(
        toy_task(1), FedAvg, plugins=lambda: [Noting("a", notes), Noting("b", notes)], batch_size=12
    )
    run.step()
    way_out = ["outgoing", "prepare", "losses", "penalty", "gradient", "scale"]
    way_back = ["finish", "incoming", "merged"]
    in_order = [f"{hook} {name}" for hook in way_out for name in "ab"]
    in_reverse = [f"{hook} {name}" for hook in way_back for name in "ba"]
    assert notes == in_order + in_reverse

    notes.clear()
    run = federation(toy_task(3), FedAvg, plugins=lambda: [Noting("a", notes)])
    run.step()
    hooks = ("outgoing", "prepare", "finish", "incoming", "merged")
    assert [notes.count(f"{hook} a") for hook in hooks] == [1, 3, 3, 1, 1]


def test_hooks_that_change_nothing_change_no_bit(federation: Federation) -> None:
    noted = federation(toy_task(), FedAvg, plugins=lambda: [Noting("a", [])]).run()
    assert noted.sha256 == federation(toy_task(), FedAvg).run().sha256


class Schedule(Plugin):
    """Halves the learning rate after each round."""

    name = "schedule"

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        msg.local = replace(msg.local, lr=msg.local.lr * 0.5 ** (msg.step - 1))


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
def test_a_plugin_can_schedule_the_local_settings(federation: Federation, cls: type) -> None:
    """As lr_decay does, on both sides.

    That servers compute with the decayed rate is shown by test_scaffold and test_fednova.
    """
    scheduled = federation(toy_task(), cls, plugins=lambda: [Schedule()], rounds=3).run()
    decayed = federation(toy_task(), cls, rounds=3, lr_decay=0.5).run()
    assert scheduled.sha256 == decayed.sha256


def test_the_cosine_schedule(federation: Federation) -> None:
    """1, .75, .25 of the rate in three rounds, on top of the decay."""
    rates: list[float] = []

    class Watching(Plugin):
        name = "watching"

        def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
            rates.append(msg.local.lr)

    federation(
        toy_task(),
        FedAvg,
        plugins=lambda: [Watching()],
        rounds=3,
        lr=0.4,
        lr_decay=0.5,
        schedule="cosine",
    ).run()
    assert rates == pytest.approx([0.4, 0.75 * 0.2, 0.25 * 0.1])


class Solitary(Plugin):
    """Refuses a plug-in and a method."""

    name = "solitary"

    @property
    def refuses(self) -> dict[str, str]:
        return {"fedprox": "it pulls", "scaffold": "it corrects"}


class Choosy(FedAvg):
    """Refuses a plug-in."""

    name = "choosy"

    @property
    def refuses(self) -> dict[str, str]:
        return {"solitary": "no company"}


@pytest.mark.parametrize(
    ("cls", "plugins", "message"),
    [
        (FedAvg, lambda: [Solitary(), FedProxPlugin()], "'solitary' refuses 'fedprox': it pulls"),
        (FedAvg, lambda: [FedProxPlugin(), Solitary()], "'solitary' refuses 'fedprox': it pulls"),
        (Scaffold, lambda: [Solitary()], "'solitary' refuses 'scaffold': it corrects"),
        (Choosy, lambda: [Solitary()], "choosy refuses plugin 'solitary': no company"),
    ],
)
def test_refusals(
    federation: Federation, cls: type, plugins: Callable[[], list[Plugin]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        federation(toy_task(), cls, plugins=plugins)


def test_a_plugin_that_records_under_the_old_name_is_refused(federation: Federation) -> None:
    run = federation(toy_task(), FedAvg, plugins=lambda: [Solitary()])
    run.strategy.plugins[0].report = {"pulls": 1.0}  # type: ignore[attr-defined]
    run.step()
    with pytest.raises(ConfigError, match=r"solitary assigns self\.report, which is"):
        run.strategy.all_recorded()


def test_hooks_in_an_old_form_are_refused_where_the_class_is_made() -> None:
    with pytest.raises(
        ConfigError,
        match=r"Old has losses\(self, batch\), which is called as losses\(self, params, batch, own",
    ):

        class Old(Plugin):
            def losses(self, batch: Batch) -> Tensor:  # type: ignore[override]
                return batch.logits.new_zeros(len(batch.y))

    with pytest.raises(
        ConfigError, match=r"gradient\(self, grads\), .*gradient\(self, grads, params, own"
    ):

        class OldClient(FedAvgClient):
            def gradient(self, grads: list[Tensor]) -> None:  # type: ignore[override]
                grads[0].zero_()
