"""FedBN (Li et al. 2021, "FedBN: federated learning on non-IID features via local batch
normalization", algorithm 1).

    x <- sum_k p_k w_k on all but batch norm, whose parameters and statistics stay with each client

    down: x, average: `fedbn.send`      up: w_k, n_k, average: `fedbn.bn`      client keeps: its
    batch norms server keeps: x, average: their mean

Neither travels. Batch norms are found by type. Whoever has never taken part has the initial ones.
Statistics are local whatever `buffers` says of others, and buffers=frozen is refused: it would take
from the method what it localises. There is no global model, so only the personal ones are
evaluated; acc_global is null. A model without batch norm has nothing to keep: that is FedAvg, bit
for bit, and is said once.

`server_bn=average` changes no training: clients also send their batch norms, and the server keeps
the mean of the round's participants, weighted as w_k. With it x is a global model, which is
evaluated and saved, and clients that have never taken part are evaluated with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import cast

from torch import nn

from fedhet import check, trees
from fedhet.client import KEPT, FedClient
from fedhet.errors import ConfigError
from fedhet.messages import Broadcast, Extras, Update
from fedhet.models.base import norms
from fedhet.phases import Phase
from fedhet.setting import Setting
from fedhet.site import Scope
from fedhet.strategy import FedStrategy
from fedhet.trees import Tree

log = logging.getLogger("fedhet")
SEND, NORMS = "fedbn.send", "fedbn.bn"


def names(model: nn.Module) -> list[str]:
    """Of the parameters and buffers of the model's batch norms."""
    own = {id(t) for norm in norms(model) for t in norm.state_dict(keep_vars=True).values()}
    return [name for name, t in model.state_dict(keep_vars=True).items() if id(t) in own]


def floating(model: nn.Module) -> list[str]:
    """`names` without the counters of batches, which no evaluation reads."""
    state = model.state_dict()
    return [name for name in names(model) if state[name].is_floating_point()]


class FedBNClient(FedClient):
    """FedAvg's training, from its own batch norms."""

    def reply(self, extras: Extras | None = None) -> Update:
        update = super().reply(extras)
        if self.msg.extras.get(SEND):
            update.extras[NORMS] = self.site.read(floating(self.site.model))
        return update

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        if not names(self.site.model):
            return super().views(msg)
        start, mean = self.start(msg), cast(Tree, msg.extras.get(NORMS, {}))
        averaged = {**start, **mean}
        personal = {"personal": lambda: self.site.load(start if self.state.get(KEPT) else averaged)}
        return {"global": lambda: self.site.load(averaged), **personal} if mean else personal


class FedBN(FedStrategy):
    """FedAvg of all but batch norm."""

    name = "fedbn"
    client_cls = FedBNClient
    evaluates: tuple[str, ...] = ("personal",)

    def __init__(self, setting: Setting, *, server_bn: str = "none") -> None:
        self.server_bn = check.one_of("method.server_bn", server_bn, ("none", "average"))
        if setting.site.frozen_norms:
            raise ConfigError(
                "buffers=frozen: method=fedbn keeps batch norm local, statistics included; use"
                " buffers=average or local"
            )
        self._norms = floating(setting.site.model)
        self._averages = self.server_bn == "average" and bool(self._norms)
        if self._averages:
            self.evaluates = ("global", "personal")
        elif not self._norms:
            log.warning(
                "fedbn: the model %s has no batch norm, so this is FedAvg",
                type(setting.site.model).__name__,
            )
            self.evaluates = FedStrategy.evaluates
        super().__init__(setting)

    def setup(self) -> None:
        if self._averages:
            self.evaluation_extras = {NORMS: self._mean}

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        kept = frozenset(names(model))
        return Scope(shared=lambda name: name not in kept)

    @property
    def _mean(self) -> Tree:
        return trees.pick(self.weights["model"], self._norms)

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {SEND: True} if self._averages else {}

    def check(self, update: Update) -> None:
        if self._averages:
            update.tree(NORMS, self._mean)

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        if not self._averages:
            return super().merge(updates, old)
        total = trees.Sum()

        def heard() -> Iterator[Update]:
            for update in updates:
                total.add(update.tree(NORMS, self._mean), update.weight)
                yield update

        new = super().merge(heard(), old)
        self.weights["model"] = {
            **self.weights["model"],
            **trees.cast(total.mean(reuse=True), self._mean),
        }
        self.evaluation_extras = {NORMS: self._mean}
        return new
