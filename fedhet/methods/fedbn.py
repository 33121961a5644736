"""FedBN: batch norm stays with the clients, everything else is averaged (Li et al. 2021).

    x <- sum_k p_k w_k    for all tensors except batch norm (algorithm 1)

The parameters and the running statistics of batch norm do not travel.

    down:          x; with server_bn=average, for evaluations also `fedbn.bn`
    up:            w_k, n_k; with server_bn=average `fedbn.bn`
    client keeps:  its batch norm
    server keeps:  x; with server_bn=average the mean batch norm

The method identifies batch norm layers by type. A client that has never taken part has the initial
batch norm. The statistics of batch norm are local, whatever `buffers` says about other buffers.
The method refuses buffers=frozen, because clients could then not have statistics of their own.
There is no global model, so only the personal models are evaluated, and acc_global is null. A model
without batch norm has nothing to keep local: the method is then FedAvg, bit for bit, and one
warning says so.

`server_bn=average` does not change the training. Clients also send their batch norm, and the server
keeps the mean over the round's participants, with the weights of the w_k. x with this mean is a
global model, which is evaluated and saved. Clients that have never taken part are also evaluated
with it.

Default: server_bn = none, as in the paper.

Reference: Li et al. 2021, "FedBN: federated learning on non-IID features via local batch
normalization".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fedhet.core.authors import (
    AnyTree,
    Client,
    ClientContext,
    ConfigError,
    Expected,
    Merged,
    Message,
    Method,
    Result,
    RunSetup,
    Scope,
    State,
    Step,
    Tree,
    Update,
    Workspace,
    log,
    serves,
    setting,
    trees,
)
from fedhet.core.client.training import norms
from fedhet.core.server.merging import averaging_buffers


def norm_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers of the model's batch norm layers."""
    own = {id(t) for norm in norms(model) for t in norm.state_dict(keep_vars=True).values()}
    return [name for name, t in model.state_dict(keep_vars=True).items() if id(t) in own]


def sent_norms(method: FedBN, workspace: Workspace) -> list[str]:
    """Return the names of the batch norm tensors that travel.

    Counters of batches do not travel, because evaluations do not use them.
    """
    if method.server_bn == "none":
        return []
    return [
        name for name in norm_names(workspace.model) if workspace.initial[name].is_floating_point()
    ]


class FedBNClient(Client):
    """Trains as in FedAvg, with its own batch norm."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        result, state = super().train(msg, state, ctx)
        bn = trees.pick(result.weights, sent_norms(self.options, ctx.workspace))
        return Result(result.weights, {"bn": bn} if bn else {}), state

    def views(
        self, msg: Message, state: State, ctx: ClientContext
    ) -> dict[str, Callable[[], nn.Module]]:
        if "bn" not in msg:
            return super().views(msg, state, ctx)
        averaged = {**msg.weights, **msg["bn"]}
        initial = ctx.workspace.initial
        trained = not all(torch.equal(msg.weights[name], initial[name]) for name in msg["bn"])
        personal = msg.weights if trained else averaged
        return {"global": partial(ctx.model, averaged), "personal": partial(ctx.model, personal)}


@dataclass(frozen=True, kw_only=True)
class FedBN(Method):
    """Averages all tensors except batch norm, as FedAvg does.

    With server_bn=average its state is "bn", the mean batch norm.
    """

    name = "fedbn"
    client = FedBNClient

    server_bn: str = setting("none", allowed=("none", "average"))

    @property
    def breaks(self) -> dict[str, str]:
        return {"weights alone": "batch norms"} if self.server_bn == "average" else {}

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        kept = frozenset(norm_names(model))
        return Scope(shared=lambda name: name not in kept)

    def evaluates(self, workspace: Workspace) -> dict[str, Sequence[str]]:
        if not norm_names(workspace.model):
            return {"global": ()}
        # The models differ in batch norm only, which stays with the clients.
        return {**({"global": ()} if sent_norms(self, workspace) else {}), "personal": ()}

    def setup(self, setup: RunSetup) -> State:
        workspace = setup.workspace
        if workspace.frozen_norms:
            raise ConfigError(
                "buffers=frozen: method=fedbn keeps batch norm local, and its statistics, too; use"
                " buffers=average or buffers=local"
            )
        if not norm_names(workspace.model):
            name = type(workspace.model).__name__
            log.warning("fedbn: the model %s has no batch norm, so this is FedAvg", name)
        bn = trees.pick(workspace.initial, sent_norms(self, workspace))
        return {"bn": bn} if bn else {}

    def evaluation_extras(self, slots: Mapping[str, Tree], state: State) -> State:
        return state

    def expects(self, step: Step) -> dict[str, Expected]:
        workspace = step.workspace
        bn = trees.pick(workspace.initial, sent_norms(self, workspace))
        variances = [name for name in workspace.variances if name in bn]

        def check(norms: AnyTree, update: object) -> None:
            if bad := trees.first_negative(trees.pick(norms, variances)):
                raise ValueError(f"extra 'fedbn.bn': {bad} has negative values; variances are >= 0")

        return {"bn": Expected(like=bn, check=check)} if bn else {}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        if not state:
            return super().merge(step, state, old, updates)
        total: Tree = {}
        passing = averaging_buffers(updates, step.average(), total, lambda u: u["bn"])
        new = super().merge(step, state, old, passing).weights
        bn = trees.cast(total, state["bn"])
        return Merged(new, {"bn": bn}, slots={"model": bn})
