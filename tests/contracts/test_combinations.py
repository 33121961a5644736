"""Which methods and plug-ins fit together follows from what they do, not from lists of names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from contracts.short import shortened, slow_unless
from torch import Tensor, nn

from fedhet.config import catalogue
from fedhet.core import trees
from fedhet.core.errors import ConfigError
from fedhet.core.messages import Broadcast, Update
from fedhet.core.optimizers import Optimizer
from fedhet.core.phases import locate
from fedhet.core.plugin import Plugin
from fedhet.core.training import Batch
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.data.toy import toy_task
from fedhet.job import Job
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednova import FedNova
from fedhet.methods.fedpcl import FedPCL
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.fedsa import FedSA
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.scaffold import Scaffold
from fedhet.stores import MemoryStore

Federation = Callable[..., Any]


class Newcomer(Plugin):
    """No method knows these plug-ins."""

    name = "newcomer"


class Clips(Newcomer):
    def scale(self, grads: Tree, own: Prepared) -> None:
        torch.nn.utils.get_total_norm(grads.values())


class Adds(Newcomer):
    def gradient(self, grads: Tree, params: AnyTree, own: Prepared) -> None:
        next(iter(grads.values())).add_(1)


class Wraps(Newcomer):
    def optimizer(
        self, inner: Optimizer, params: dict[str, nn.Parameter], own: Prepared
    ) -> Optimizer:
        return inner


class Penalises(Newcomer):
    def penalty(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        return batch.logits.square().mean()


class Weighs(Newcomer):
    def incoming(self, updates: Iterator[Update], old: Tree) -> Iterator[Update]:
        return updates


class Refers(Newcomer):
    needs_model = True

    def prepare(self, msg: Broadcast) -> None:
        assert msg.weights or not msg.trains


class AddsATerm(Adds):
    changes_gradients = False


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
        (Scaffold, {}, Penalises, None),
        (Scaffold, {}, AddsATerm, None),
        (Scaffold, {}, FedProxPlugin, None),
        (Scaffold, {}, Weighs, None),
        (Scaffold, OPTION_I, Clips, None),
        (Scaffold, OPTION_I, Adds, None),
        (Scaffold, OPTION_I, Wraps, None),
        (FedNova, {}, Wraps, "knows the length of SGD's steps only"),
        (FedNova, {}, Clips, None),
        (FedSGD, {}, Wraps, "this method's clients take none"),
        (FedSGD, {}, FedProxPlugin, "this method's clients take none"),
        (FedSGD, {}, Clips, None),
        (FedSA, UNIFORM, Weighs, "method.client_weighting=samples"),
        (FedSA, SAMPLES, Weighs, None),
        (FedPCL, {}, Weighs, "weights.*ignores"),
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
    with pytest.raises(ConfigError, match=f"method={cls.name} refuses plugin '{plugin.name}'.*"):
        federation(toy_task(), cls, plugins=lambda: [plugin()], options=options)
    with pytest.raises(ConfigError, match=reason):
        federation(toy_task(), cls, plugins=lambda: [plugin()], options=options)


def weights_after(job: Job, favoured: int | None) -> str:
    """The hash of all weights after the run, in which one client weighs fives times as much."""
    strategy = job.strategy
    store = MemoryStore()
    usual = strategy.base_weight
    strategy.base_weight = lambda update: usual(update) * (5 if update.pid == favoured else 1)  # type: ignore[method-assign]
    number = 1
    while locate(strategy.timetable, number):
        plan = strategy.plan(number)
        strategy.settle([job.client(store).handle(msg) for msg in plan])
        number += 1
    return trees.sha256(strategy.weights)


# FedAvg's class, with another server or a plug-in; and FedDisk, which FedDiskAb stands for.
LIKE_FEDAVG = {"fedadagrad", "fedadam", "fedavgm", "fedntd", "fedprox", "fedyogi", "moon"}


@pytest.mark.parametrize("method", slow_unless(set(METHODS) - LIKE_FEDAVG - {"feddisk"}, METHODS))
def test_a_method_says_truly_whether_its_merge_uses_the_weights(method: str) -> None:
    """`weighted` decides which plug-ins the method refuses."""
    settings = shortened(method, None)
    hashes = {weights_after(Job(settings, toy_task()), favoured) for favoured in (None, 1)}
    strategy = Job(settings, toy_task()).strategy
    uses = "uses" if len(hashes) == 2 else "does not use"
    assert strategy.weighted is (len(hashes) == 2), (
        f"{type(strategy).__name__}.merge {uses} update.weight: set weighted accordingly"
    )


def test_one_plugin_acts_once(federation: Federation) -> None:
    with pytest.raises(ConfigError, match=r"the plug-in 'fedprox' is in Setting\.plugins twice"):
        federation(toy_task(), FedAvg, plugins=lambda: [FedProxPlugin(), FedProxPlugin(mu=1)])
