"""Which methods and plug-ins fit together follows from what they do, not from lists of names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from contracts.short import shortened, slow_unless
from torch import Tensor

from fedhet.core import trees
from fedhet.core.client.context import ClientContext
from fedhet.core.client.training import Batch
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.kernel import Message, Plugin, State, Step, Term, Update
from fedhet.core.messages import Recorded, Upload
from fedhet.core.server.compatibility import broken
from fedhet.core.server.phases import OpenStep, locate
from fedhet.core.trees import AnyTree, Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednova import FedNova
from fedhet.methods.fedpcl import FedPCL
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.fedsa import FedSA
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.scaffold import Scaffold
from fedhet.runs.config import catalogue
from fedhet.runs.job import Job
from fedhet.runs.stores import MemoryStore

Federation = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Newcomer(Plugin):
    """No method knows these plug-ins."""

    name = "newcomer"


def unchanged(params: AnyTree, batch: None, own: Tree) -> Tree:
    return own


def falls(params: AnyTree, batch: None, own: Tree) -> Tree:
    return trees.map(torch.ones_like, params)


def square(params: AnyTree, batch: Batch, own: Tree) -> Tensor:
    return batch.logits.square().mean()


class OwnTerm(Newcomer):
    """It has one term, whose `own` is one for each trained parameter."""

    term: ClassVar[tuple[str, Callable[..., Any]]]

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        workspace = ctx.workspace
        ones = trees.map(torch.ones_like, trees.pick(workspace.initial, workspace.trained))
        return [Term(*self.term, ones)]


@dataclass(frozen=True, kw_only=True)
class Clips(OwnTerm):
    breaks = {"plain steps": "it scales gradients"}
    term = "scale", unchanged


@dataclass(frozen=True, kw_only=True)
class Adds(OwnTerm):
    breaks = {"plain steps": "no loss has this gradient"}
    term = "gradient", falls


@dataclass(frozen=True, kw_only=True)
class Wraps(OwnTerm):
    breaks = {"plain steps": "it masks steps", "sgd steps": "it masks steps"}
    term = "step", unchanged


@dataclass(frozen=True, kw_only=True)
class WrapsAlone(Wraps):
    """What it does to the steps matters to nothing else, so that it needs some."""

    needs = frozenset({"local steps"})


@dataclass(frozen=True, kw_only=True)
class Penalises(OwnTerm):
    term = "penalty", square


@dataclass(frozen=True, kw_only=True)
class Weighs(Newcomer):
    needs = frozenset({"used weights"})

    def weight(self, step: Step, state: State, update: Update) -> float:
        return update.weight


@dataclass(frozen=True, kw_only=True)
class WeighsAll(Newcomer):
    needs = frozenset({"used weights"})

    def weights(
        self, step: Step, state: State, updates: Sequence[Update]
    ) -> tuple[list[float], Recorded]:
        return [update.weight for update in updates], {}


@dataclass(frozen=True, kw_only=True)
class Refers(Newcomer):
    needs = frozenset({"model"})

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        assert msg.weights
        return []


@dataclass(frozen=True, kw_only=True)
class AddsATerm(OwnTerm):
    term = "gradient", falls


@dataclass(frozen=True, kw_only=True)
class ScalesInSilence(OwnTerm):
    term = Clips.term


@dataclass(frozen=True, kw_only=True)
class WrapsInSilence(OwnTerm):
    term = Wraps.term


@dataclass(frozen=True, kw_only=True)
class Scales(OwnTerm):
    """Its steps are SGD's but for a factor that all clients share."""

    breaks = Clips.breaks
    term = Wraps.term


METHODS = catalogue.choices("method")
OPTION_I = {"control": "gradient"}
UNIFORM = {"client_weighting": "uniform"}
SAMPLES = {"client_weighting": "samples"}


@pytest.mark.parametrize(
    ("cls", "options", "plugin", "reason"),
    [
        (Scaffold, {}, Clips, "method.control=gradient"),
        (Scaffold, {}, Adds, "method.control=gradient"),
        (Scaffold, {}, Wraps, "method.control=gradient"),
        (Scaffold, {}, Scales, "method.control=gradient"),
        (Scaffold, {}, Penalises, None),
        (Scaffold, {}, AddsATerm, None),
        (Scaffold, {}, FedProxPlugin, None),
        (Scaffold, {}, Weighs, None),
        (Scaffold, OPTION_I, Clips, None),
        (Scaffold, OPTION_I, Adds, None),
        (Scaffold, OPTION_I, Wraps, None),
        (FedNova, {}, Wraps, "SGD"),
        (FedNova, {}, Clips, None),
        (FedNova, {}, Scales, None),
        (FedSGD, {}, WrapsAlone, "clients .* none"),
        (FedSGD, {}, FedProxPlugin, "clients .* none"),
        (FedSGD, {}, Clips, None),
        (FedSA, UNIFORM, Weighs, "method.client_weighting=samples"),
        (FedSA, SAMPLES, Weighs, None),
        (FedPCL, {}, Weighs, "weights.*ignores"),
        (FedPCL, {}, WeighsAll, "weights.*ignores"),
        (FedPCL, {}, Refers, "clients receive none"),
        (FedPCL, {}, Clips, None),
        (FedAvg, {}, Weighs, None),
        (FedAvg, {}, Refers, None),
        (FedAvg, {}, Wraps, None),
    ],
)
def test_a_newcomer_is_refused_by_what_it_does(
    federation: Federation,
    cls: type,
    options: dict[str, Any],
    plugin: type[Plugin],
    reason: str | None,
) -> None:
    """Before a run, so that --list shows it; what is not refused runs."""
    if reason is None:
        federation(toy_task(), cls, plugins=lambda: [plugin()], options=options).run()
        return
    with pytest.raises(ConfigError, match=f"method={cls.name} .*plugin '{plugin.name}'"):
        federation(toy_task(), cls, plugins=lambda: [plugin()], options=options)
    with pytest.raises(ConfigError, match=reason):
        federation(toy_task(), cls, plugins=lambda: [plugin()], options=options)


@pytest.mark.parametrize(
    ("plugin", "word"), [(ScalesInSilence, "plain steps"), (WrapsInSilence, "sgd steps")]
)
def test_a_plugin_that_does_not_say_what_its_terms_break_is_told(
    federation: Federation, plugin: type[Plugin], word: str
) -> None:
    run = federation(toy_task(), FedAvg, plugins=lambda: [plugin()])
    match = rf"TypeError: {plugin.__name__} .*'{word}' .*`breaks`"
    with pytest.raises(RunFailed, match=match):
        run.step()


def weights_after(job: Job, favoured: int | None) -> str:
    """The hash of all weights after the run, in which one client weighs fives times as much."""
    strategy = job.strategy
    store = MemoryStore()
    usual = strategy.weight

    def favouring(step: OpenStep, update: Upload) -> float:
        return usual(step, update) * (5 if update.pid == favoured else 1)

    strategy.weight = favouring  # type: ignore[method-assign]
    number = 1
    while locate(strategy.timetable, number):
        step = strategy.plan(number)
        strategy.finish_step(step, [job.client(store).handle(msg) for msg in step.messages])
        number += 1
    return trees.sha256(strategy.weights)


# FedAvg's class, with another server or a plug-in; and FedDisk, which FedDiskAb stands for.
LIKE_FEDAVG = {"fedadagrad", "fedadam", "fedavgm", "fedntd", "fedprox", "fedyogi", "moon"}


@pytest.mark.parametrize("method", slow_unless(set(METHODS) - LIKE_FEDAVG - {"feddisk"}, METHODS))
def test_a_method_says_truly_whether_its_merge_uses_the_weights(method: str) -> None:
    """The word "used weights" decides which plug-ins the method refuses."""
    settings = shortened(method, None)
    hashes = {weights_after(Job(settings, toy_task()), favoured) for favoured in (None, 1)}
    strategy = Job(settings, toy_task()).strategy
    uses = "uses" if len(hashes) == 2 else "does not use"
    unused = "used weights" in broken(strategy.method, strategy.workspace)
    assert unused is (len(hashes) == 1), (
        f"{type(strategy.method).__name__}.merge {uses} update.weight: state 'used weights' in"
        " `breaks` accordingly"
    )


def test_one_plugin_acts_once(federation: Federation) -> None:
    with pytest.raises(ConfigError, match=r"RunSetup\.plugins .*'fedprox'"):
        federation(toy_task(), FedAvg, plugins=lambda: [FedProxPlugin(), FedProxPlugin(mu=1)])
