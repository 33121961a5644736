"""FedBN: batch norm stays with the clients, everything else is averaged (Li et al. 2021).

    x <- sum_k p_k w_k    on everything but batch norm (algorithm 1)

The parameters and the running statistics of batch norm do not travel.

    down:          x; with server_bn=average `fedbn.send`
    up:            w_k, n_k; with server_bn=average `fedbn.bn`
    client keeps:  its batch norm
    server keeps:  x; with server_bn=average the mean batch norm

Batch norm layers are identified by type. A client that has never taken part has the initial ones.
Statistics of batch norm are local whatever `buffers` says of other buffers; buffers=frozen is
refused, because clients could then not have statistics of their own. There is no global model, so
only the personal models are evaluated, and acc_global is null. A model without batch norm has
nothing to keep local: the method is then FedAvg, bit for bit, and one warning says so.

`server_bn=average` changes no training: clients also send their batch norm, and the server keeps
the mean of the round's participants, with the weights of the w_k. With that mean, x is a global
model, which is evaluated and saved, and with which clients that have never taken part are
evaluated.

Default: server_bn = none, as in the paper.

Reference: Li et al. 2021, "FedBN: federated learning on non-IID features via local batch
normalization".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from torch import nn

from fedhet.core import check, trees
from fedhet.core.client import FedClient
from fedhet.core.errors import ConfigError
from fedhet.core.merging import Average
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.state import UNSHARED
from fedhet.core.strategy import FedStrategy
from fedhet.core.training import norms
from fedhet.core.trees import Tree
from fedhet.core.workspace import Scope

log = logging.getLogger("fedhet")
SEND = "fedbn.send"
NORMS = "fedbn.bn"


def norm_names(model: nn.Module) -> list[str]:
    """The names of the parameters and buffers of the model's batch norms."""
    own = {id(t) for norm in norms(model) for t in norm.state_dict(keep_vars=True).values()}
    return [name for name, t in model.state_dict(keep_vars=True).items() if id(t) in own]


def floating_norm_names(model: nn.Module) -> list[str]:
    """`norm_names` without the batch counters, which play no part in an evaluation."""
    state = model.state_dict()
    return [name for name in norm_names(model) if state[name].is_floating_point()]


class FedBNClient(FedClient):
    """FedAvg's training, with the client's own batch norm."""

    def reply(self, extras: Extras | None = None) -> Update:
        update = super().reply(extras)
        if SEND in self.msg.extras:
            update.extras[NORMS] = self.workspace.read(floating_norm_names(self.workspace.model))
        return update

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        if not norm_names(self.workspace.model):
            return super().views(msg)
        own = self.received_weights(msg)
        if NORMS not in msg.extras:
            return {"personal": lambda: self.workspace.load(own)}
        averaged = {**own, **msg.tree(NORMS)}
        personal = own if self.state.get(UNSHARED) else averaged
        return {
            "global": lambda: self.workspace.load(averaged),
            "personal": lambda: self.workspace.load(personal),
        }


class FedBN(FedStrategy):
    """FedAvg of everything but batch norm."""

    name = "fedbn"
    client_cls = FedBNClient
    only_means = True
    enters = "batch norms"
    otherwise = {"only_weights": "method.server_bn=none"}
    evaluates: tuple[str, ...] = ("personal",)
    personal_names = ()  # only the batch norms, which stay with the clients

    def __init__(self, setting: Setting, *, server_bn: str = "none") -> None:
        self.server_bn = check.one_of("method.server_bn", server_bn, ("none", "average"))
        self.releases = int(server_bn == "average")
        self.only_weights = server_bn == "none"
        super().__init__(setting)

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        kept = frozenset(norm_names(model))
        return Scope(shared=lambda name: name not in kept)

    def setup(self) -> None:
        model = self.workspace.model
        if self.workspace.frozen_norms:
            raise ConfigError(
                "buffers=frozen: method=fedbn keeps batch norm local, statistics included; use"
                " buffers=average or local"
            )
        self._norm_names = floating_norm_names(model)
        self._averages_norms = self.server_bn == "average" and bool(self._norm_names)
        if self._averages_norms:
            self.evaluates = ("global", "personal")
            self.evaluation_extras = {NORMS: self._mean_norms}
        elif not self._norm_names:
            self.evaluates = FedStrategy.evaluates
            log.warning(
                "fedbn: the model %s has no batch norm, so this is FedAvg", type(model).__name__
            )

    @property
    def _mean_norms(self) -> Tree:
        return trees.pick(self.weights["model"], self._norm_names)

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {SEND: True} if self._averages_norms else {}

    def check(self, update: Update) -> None:
        if self._averages_norms:
            norms = update.tree(NORMS, like=self._mean_norms)
            if bad := trees.first_negative(
                {n: norms[n] for n in self.workspace.variances if n in norms}
            ):
                raise ValueError(f"extra {NORMS!r}: {bad} has negative values; variances are >= 0")

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        if not self._averages_norms:
            return super().merge(updates, old)
        total = self.setting.merge.average()
        new = super().merge(_adding_norms(updates, total), old)
        mean = trees.cast(total.mean(reuse=True), self._mean_norms)
        self.weights["model"] = {**self.weights["model"], **mean}
        self.evaluation_extras = {NORMS: mean}
        return new


def _adding_norms(updates: Iterator[Update], total: Average) -> Iterator[Update]:
    """Pass the updates on, which can be read only once, and add their batch norms to `total`."""
    for update in updates:
        total.add(update.tree(NORMS), update.weight)
        yield update
