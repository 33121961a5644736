"""MOON: model-contrastive learning (Li, He and Song 2021).

The term pulls the features of each sample towards the features that the received model computes,
and pushes them away from the features that the client's previous local model computes.

    min_w  F_k(w) + mu mean_i l_i(w)
    l_i = -log(e^{s_g / tau} / (e^{s_g / tau} + e^{s_p / tau}))
    s_g = cos(z(w; x_i), z(x; x_i))
    s_p = cos(z(w; x_i), z(w_prev; x_i))

Here z is the input of the head, x the received model, and w_prev the client's own model at the end
of its last participation.

    down:          x
    up:            w_k, n_k
    client keeps:  w_prev, buffers included
    server keeps:  x

x and w_prev are in eval mode and without gradients. In a client's first participation w_prev would
equal x, so the term is log 2 and has no gradient. With mu = 0 the method is FedAvg, bit for bit.

Deviations and choices: the networks of the paper have a projection head (two layers, 256 wide)
before the output layer. It is trained and averaged like every other layer, so it is part of the
model: for a projection head, use a model with `features` that ends with one.

Defaults: mu = 1 (the paper tunes mu in {0.1, 1, 5, 10}, and has 5 for CIFAR-10 and 1 for CIFAR-100
and Tiny-ImageNet); tau = 0.5, as in the paper.

Reference: Li, He and Song 2021, "Model-contrastive federated learning".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedhet.core.authors import (
    AnyTree,
    Batch,
    ClientContext,
    Fitted,
    Message,
    Plugin,
    Prepared,
    Result,
    RunSetup,
    State,
    Term,
    Tree,
    setting,
    trees,
)
from fedhet.methods.fedavg import FedAvg
from fedhet.models.base import require_features

TERM = "moon.term"  # name of the recorded term


def contrastive(z: Tensor, z_global: Tensor, z_previous: Tensor, tau: float) -> Tensor:
    """Return the model-contrastive loss of each sample, shape (B,).

    It is -log(e^{s_g / tau} / (e^{s_g / tau} + e^{s_p / tau})). Here s_g is the cosine similarity
    of z with z_global, and s_p of z with z_previous. The cosine with a zero vector is 0 (norms are
    bounded below by 1e-8).

    Args:
        z: (B, d) features of the model in training.
        z_global: (B, d) features of the global model.
        z_previous: (B, d) features of the client's previous model.
        tau: the temperature.
    """
    s_global = functional.cosine_similarity(z, z_global, dim=1, eps=1e-8)
    s_previous = functional.cosine_similarity(z, z_previous, dim=1, eps=1e-8)
    return -functional.logsigmoid((s_global - s_previous) / tau)


@dataclass(frozen=True, kw_only=True)
class MoonPlugin(Plugin):
    """Adds the contrastive term to the loss of each sample."""

    name = "moon"
    needs = frozenset({"model"})

    mu: float = setting(1.0, low=0)
    tau: float = setting(0.5, open_low=0)

    def setup(self, setup: RunSetup) -> State:
        require_features(setup.workspace.model, "moon")
        return {}

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        if not self.mu:
            return []
        previous, completed = state.get("previous"), ctx.workspace.completed
        own: Prepared = {}
        if previous is not None:
            own = {"global": completed(msg.weights), "previous": completed(previous)}
        return [Term("loss", self._contrast, own)]

    def _contrast(self, params: AnyTree, batch: Batch, own: Prepared) -> tuple[Tensor, Tree]:
        """Return mu times the term of each sample, and the term itself to record."""
        if not own:
            term = torch.full((len(batch.y),), math.log(2), device=batch.y.device)
        else:
            teacher = batch.workspace.teacher
            with torch.no_grad():
                z_global, z_previous = (
                    teacher(own[key]).features(batch.x).flatten(1)  # type: ignore[operator]
                    for key in ("global", "previous")
                )
            term = contrastive(batch.z.flatten(1), z_global, z_previous, self.tau)
        return self.mu * term, {TERM: term}

    def finish(
        self, msg: Message, state: State, ctx: ClientContext, fitted: Fitted
    ) -> tuple[Result, State]:
        """Keep the local model, and record the mean of the term without the factor mu.

        The mean is over the values that the term had in the training steps.
        """
        if not self.mu:
            return Result(), state
        workspace, terms = ctx.workspace, fitted.records.get(TERM, torch.empty(0))
        # No sample is drawn again before all samples are, so the mean covers this many samples.
        covered = min(len(ctx.own), len(terms))
        metrics = {TERM: float(terms.mean())} if covered >= max(1, workspace.min_count) else {}
        previous = trees.pick(fitted.params, [*workspace.shared, *workspace.kept])
        return Result(metrics=metrics), {"previous": previous}


@dataclass(frozen=True, kw_only=True)
class Moon(FedAvg):
    """FedAvg with the plug-in `moon`."""

    name = "moon"
    requires = MoonPlugin
