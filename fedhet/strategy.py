"""FedStrategy: the one adapter between Flower's Strategy and a method. Its defaults are FedAvg.

One step: `plan` decides who gets what; the engine carries it; `settle` turns the replies into the
slot's new value. Flower's own six methods, at the end, are these two with Flower's types around
them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from flwr.common import (
    EvaluateIns,
    FitIns,
    Parameters,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.client_manager import ClientManager
from flwr.server.strategy import Strategy
from torch import nn

from fedhet import messages, trees
from fedhet.client import FINETUNE, STATE, FedClient
from fedhet.errors import ConfigError, RunFailed
from fedhet.flower import wire
from fedhet.flower.nodes import Roster
from fedhet.messages import Broadcast, Extras, Reply, Update
from fedhet.metrics import score
from fedhet.phases import Entry, Phase, locate, sample_cohort
from fedhet.plugin import Plugin, Report
from fedhet.replies import Buffers, Step, accepted, normalised
from fedhet.setting import Setting
from fedhet.site import Scope
from fedhet.trees import Tree

log = logging.getLogger("fedhet")


class FedStrategy(Strategy):
    """A method overrides `base_weight`, `shared`, `private`, `merge`, and `slots` and `phases` for
    more than one."""

    name: ClassVar[str] = "fedavg"
    client_cls: ClassVar[type[FedClient]] = FedClient
    needs_all: bool = False  # `merge` gets a list, else an iterator that is read once
    evaluates: tuple[str, ...] = ("global",)
    evaluating: Extras = {}  # for clients that evaluate

    def __init__(self, setting: Setting) -> None:
        self.setting, self.site, self.plugins = setting, setting.site, list(setting.plugins)
        self.seed, self.rounds, self.sizes = self.site.seed, setting.rounds, self.site.task.sizes
        self._check_composition()
        self._slots: dict[str, Tree] = {"model": dict(self.site.initial), **self.slots()}
        for plugin in self.plugins:
            plugin.server = self
            plugin.setup()
            self._slots |= plugin.slots()
        own = [Entry("", phase, phase.rounds) for phase in self.phases()]
        self.timetable = [
            Entry(p.name, phase, phase.rounds) for p in self.plugins for phase in p.phases()
        ] + own
        self.versions: dict[int, int] = {}  # pid -> the round whose client state was accepted
        self.kept: dict[int, int] = {}  # pid -> the bytes of that state
        self.local = setting.local  # of the step in progress
        self.roster = Roster()
        self.now: Step

    def _check_composition(self) -> None:
        by_name = {plugin.name: plugin for plugin in self.plugins}
        for name, reason in self.refuses.items():
            if name in by_name:
                raise ConfigError(f"method={self.name} refuses plugin {name!r}: {reason}")
        if self.setting.finetune_epochs and "global" not in self.evaluates:
            raise ConfigError(
                f"eval.finetune_epochs={self.setting.finetune_epochs}: method={self.name} has no"
                " global model to fine-tune"
            )
        for plugin in self.plugins:
            for other, reason in plugin.refuses.items():
                if other == self.name or other in by_name:
                    raise ConfigError(f"plugin {plugin.name!r} refuses {other!r}: {reason}")

    # ---- what a method overrides
    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        """What clients train and what they share."""
        return Scope()

    @property
    def refuses(self) -> dict[str, str]:
        """Names of plug-ins that it cannot work with -> the reason."""
        return {}

    def slots(self) -> dict[str, Tree]:
        """Further named weights beside "model", with their initial values."""
        return {}

    def phases(self) -> list[Phase]:
        return [Phase("train", self.rounds, self.merge, trains=True, evaluate=True)]

    def base_weight(self, update: Update) -> float:
        """n_k; only ratios matter."""
        return float(update.num_examples)

    def shared(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        """Extras for the whole cohort."""
        return {}

    def private(self, phase: Phase, pid: int) -> Extras:
        """Extras for one client."""
        return {}

    def check(self, update: Update) -> None:
        """Refuse a bad extra with a ValueError; it counts as that client's failure."""

    def merge(self, updates: Iterator[Update], old: Tree | None) -> Tree | None:
        """The new value of the slot's trainable tensors: old + sum_k w_k delta_k / sum_k w_k."""
        assert old is not None
        return trees.add(trees.mean((u.change, u.weight) for u in updates), old)

    def report(self) -> Report:
        return {}

    # ---- one step
    def begin(self, server_round: int) -> bool:
        """Move to this round; false past the end of the timetable."""
        found = locate(self.timetable, server_round)
        if found is None:
            return False
        index, step = found
        entry = self.timetable[index]
        drawn = sample_cohort(
            self.sizes, entry.phase.cohort, self.setting.fraction, self.seed, entry.header, step
        )
        sent = self.sent(entry.phase.slot) if entry.phase.slot else None
        old = None if sent is None else trees.pick(sent, self._mergeable(entry.phase.slot))
        self.now = Step(entry, server_round, step, drawn, sent, old, self.site.device)
        return True

    def _mergeable(self, slot: str | None) -> list[str]:
        """Names that merges, plug-ins and server optimisers see: trainable, shared. Buffers never
        are among them."""
        if slot == "model":
            return [n for n in self.site.trained if n in self.site.shared]
        return [n for n, t in self._slots[slot or ""].items() if t.is_floating_point()]

    def sent(self, slot: str) -> Tree:
        """The slot as it travels."""
        return (
            trees.pick(self._slots[slot], self.site.shared)
            if slot == "model"
            else self._slots[slot]
        )

    def plan(self, server_round: int) -> list[Broadcast]:
        """The messages of a round, in the cohort's order."""
        if not self.begin(server_round):
            raise RunFailed(f"round {server_round} is past the timetable")
        now, phase = self.now, self.now.entry.phase
        local = self.setting.local
        if phase.trains:
            local = replace(local, lr=local.lr * self.setting.rate(now.step))
        msg = Broadcast(
            now.entry.header,
            now.step,
            server_round,
            phase.slot,
            now.sent,
            dict(self.shared(phase, now.step, now.cohort)) if not now.entry.piece else {},
            local,
            phase.trains,
            {plugin.name: plugin.digest() for plugin in self.plugins},
        )
        for plugin in self.active:
            plugin.outgoing(msg, now.cohort)
        self.local = msg.local
        plan = [
            msg.to(
                pid,
                self.versions.get(pid, 0),
                self.private(phase, pid) if not now.entry.piece else {},
            )
            for pid in now.cohort
        ]
        for each in plan:
            now.count("down", messages.payload(each.slot, each.weights, each.extras))
        return plan

    @property
    def active(self) -> list[Plugin]:
        """The plug-ins whose hooks run: all where the model is trained, else only the phase's
        own."""
        entry = self.now.entry
        return (
            self.plugins
            if entry.phase.trains
            else [p for p in self.plugins if p.name == entry.piece]
        )

    def settle(self, replies: Iterable[Reply]) -> None:
        """Aggregate the replies, which come in the cohort's order. RunFailed where a client failed
        and on_failure is "stop"."""
        now, phase = self.now, self.now.entry.phase
        received = accepted(now, replies, self._accept, self.setting.on_failure)
        first = next(received, None)
        if first is None:
            raise RunFailed(
                "; ".join(str(f) for f in now.failures)
                or f"phase {phase.name!r}: no client replied"
            )
        updates: Iterator[Update] | list[Update] = itertools.chain([first], received)
        if self.needs_all or any(plugin.needs_all for plugin in self.active):
            updates = list(updates)
        for plugin in reversed(self.active):
            updates = plugin.incoming(updates, now.old)  # type: ignore[arg-type]
        merged = Buffers(normalised(updates) if isinstance(updates, list) else updates)
        new = phase.merge(iter(merged), now.old)
        for _ in merged:  # a merge that stopped early has still to hear every client
            pass
        if new is not None and phase.slot:
            self._install(phase, new, merged)
        self._finish_step(phase)

    def _finish_step(self, phase: Phase) -> None:
        """Close the phase when it says so, or when its last step is done."""
        stop = phase.until() if phase.until else False
        if stop or self.now.step == self.now.entry.rounds:
            self.close()

    def close(self) -> None:
        """End the phase in progress; its timetable entry becomes the steps executed."""
        self.timetable[self._index] = replace(self.now.entry, rounds=self.now.step)
        if self.now.entry.phase.after:
            self.now.entry.phase.after()

    @property
    def _index(self) -> int:
        return next(
            i for i, entry in enumerate(self.timetable) if entry.phase is self.now.entry.phase
        )

    def _install(self, phase: Phase, new: Tree, merged: Buffers) -> None:
        now, slot = self.now, self._slots[phase.slot or ""]
        assert now.old is not None
        for plugin in reversed(self.active):
            new = plugin.merged(new, now.old)
        if phase.trains and self.setting.server_opt:
            new = self.setting.server_opt.step(now.old, new)
        values = {**new, **merged.values()}
        if bad := trees.first_nonfinite(values):
            raise RunFailed(
                f"round {now.round}: the aggregated tensor {bad!r} holds NaN or infinite values"
            )
        self._slots[phase.slot or ""] = {**slot, **trees.cast(values, slot)}

    def _accept(self, update: Update) -> None:
        """The pieces' own checks, then the base weight; a ValueError makes it the client's
        failure."""
        if not self.now.entry.piece:
            self.check(update)
        for plugin in self.active:
            plugin.check(update)
        update.weight = self.base_weight(update)
        if update.keeps:
            self.versions[update.pid] = self.now.round
            self.kept[update.pid] = int(update.metrics.pop(STATE, 0))

    # ---- evaluation
    @property
    def views(self) -> tuple[str, ...]:
        """The models that clients evaluate; the first one is "the" model of the clients'
        accuracies."""
        return (*self.evaluates, "finetuned") if self.setting.finetune_epochs else self.evaluates

    @property
    def due(self) -> bool:
        """Whether the step in progress is followed by an evaluation."""
        phase, step = self.now.entry.phase, self.now.step
        return phase.evaluate and (
            step % self.setting.eval_every == 0 or step == self.timetable[self._index].rounds
        )

    def evaluations(self) -> list[Broadcast]:
        """Messages that ask every client with data to evaluate the model as it now stands."""
        tuned = {FINETUNE: self.setting.finetune_epochs} if self.setting.finetune_epochs else {}
        msg = Broadcast(
            "evaluate",
            self.now.step,
            self.now.round,
            "model",
            self.sent("model"),
            {**self.evaluating, **tuned},
            self.local,
            plugins={plugin.name: plugin.digest() for plugin in self.plugins},
        )
        return [msg.to(pid, self.versions.get(pid, 0), {}) for pid, n in enumerate(self.sizes) if n]

    def evaluate_global(self, weights: Tree | None = None) -> dict[str, float]:
        """Loss and accuracy of the global model (or of `weights`) on the global test set; empty
        where one of them is missing."""
        if self.site.task.test is None or "global" not in self.evaluates:
            return {}
        if not hasattr(self, "_test"):
            self._test = self.site.prepared(self.site.task.test)
        return score(self.site.load(weights or self._slots["model"]), self._test, self.site.task)

    @property
    def client_state(self) -> dict[str, int]:
        """What clients remember between rounds: how many of them, the bytes of all, and of the
        largest."""
        return {
            "clients": len(self.kept),
            "bytes": sum(self.kept.values()),
            "largest": max(self.kept.values(), default=0),
        }

    def reports(self) -> dict[str, Report]:
        """What the pieces want recorded, by piece."""
        return {
            name: found
            for name, found in [
                (self.name, self.report()),
                *((p.name, p.report()) for p in self.active),
            ]
            if found
        }

    @property
    def weights(self) -> dict[str, Tree]:
        """Every slot."""
        return self._slots

    # ---- Flower's six methods
    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        return self._parameters()

    def _parameters(self) -> Parameters:
        return ndarrays_to_parameters([t.cpu().numpy() for t in self.sent("model").values()])

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[Any, FitIns]]:
        packer = wire.Packer()
        self._plan = {msg.pid: msg for msg in self.plan(server_round)}
        return [
            (self.roster.proxy(pid, client_manager), wire.fit_ins(msg, packer))
            for pid, msg in self._plan.items()
        ]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, Any]], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Any]]:
        self.settle(self.roster.in_order(self._plan, results, failures))
        return self._parameters(), {}

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[Any, EvaluateIns]]:
        packer = wire.Packer()
        return [
            (self.roster.proxy(m.pid, client_manager), wire.evaluate_ins(m, packer))
            for m in self.evaluations()
        ]

    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[Any, Any]], failures: list[Any]
    ) -> tuple[float | None, dict[str, Any]]:
        return None, {}

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Any]] | None:
        arrays = [torch.from_numpy(a) for a in parameters_to_ndarrays(parameters)]
        found = self.evaluate_global(
            {**self._slots["model"], **dict(zip(self.sent("model"), arrays, strict=True))}
        )
        return (found.pop("loss"), dict(found)) if found else None
