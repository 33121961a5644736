"""FedNorm: aggregation weights normalised by latent similarity (Kundalwal et al. 2024).

Kundalwal, Saraswat, Mishra and Mishra, "Client contribution normalization for enhanced federated
learning". The server compares the mean latents z of the participants. A client gets more weight if
its mean latent differs from the other clients' mean latents. FedNorm is a plug-in for any base
method: w_r replaces the aggregation weight nu_r of the base method.

    z_r      = mean of h(x) over all training samples x of client r
    S_rp     = cos(z_r, z_p), S_rr = 1                      (eq. 3, 4)
    a_r      = sum_p S_rp / T                               (eq. 8)
    Lambda_r = 1 - softmax(a)_r                             (eq. 5)
    w_r      = Lambda_r nu_r / sum_q Lambda_q nu_q          (eq. 6, 7)

h(x) is the input of the last linear layer of the client's trained model, in eval mode. `z_when`
chooses other models (see below).

A client withholds z and keeps its nu if it has fewer than `privacy.min_count` training samples (0
is the paper's method). Under `z_when=last_epoch` it also withholds z if it took no step. The sums
then run over the set C of clients that send z. FedNorm divides the total weight of C anew:
w_r = Lambda_r nu_r / sum_{q in C} Lambda_q nu_q * sum_{q in C} nu_q.

    down: what the base method sends
    up: what the base method sends, `fednorm.z` (d,), or (0,) if the client withholds z
    client keeps: nothing
    server keeps: nothing

Outliers gain weight, by design: FedNorm is no defence against a poisoned or broken client. Under
uniform nu and with R participants, no weight exceeds 1 / (R - 1). Two participants are equally
similar to each other, so they keep the weights of the base method.

Deviations and choices:
- The paper computes z both before the training and in its last epoch. Here `z_when` chooses.
  `after_training`, the default, uses the model that the client sends. `before_training` uses the
  model that the client received. `last_epoch` averages the z that the model computed in train mode
  during the last epoch. Samples that plug-ins generated count, too.
- The paper requires T to be less than 1, which sharpens the softmax, but prints no value. The
  default is .5.
- Line 3 of algorithm 1 draws a "random group of clients" once, before the loop over the rounds, and
  does not say how many. Here every round draws its clients anew, as the base methods do
  (`fraction`). With `fraction=1`, the default, everyone takes part and both readings are the same.
  If line 3 is meant literally, clients outside the group never train. This is the same as a
  federation of fewer clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedhet.core.authors import (
    AnyTree,
    Batch,
    ClientContext,
    Expected,
    Fitted,
    Message,
    Plugin,
    Recorded,
    Result,
    RunSetup,
    State,
    Step,
    Term,
    Tree,
    Update,
    log,
    setting,
)
from fedhet.core.client.training import usable
from fedhet.methods.fedavg import FedAvg
from fedhet.models.base import require_features

LAST_EPOCH = "last_epoch"
_TINY = torch.finfo(torch.float64).tiny


class Contribution(NamedTuple):
    """The similarity S (R, R), the factors Lambda (R,), and the weights w (R,), which sum to 1."""

    similarity: Tensor
    factors: Tensor
    weights: Tensor


def similarity(z: Tensor) -> Tensor:
    """Return S_rp = cos(z_r, z_p) with S_rr = 1 (eq. 3, 4), shape (R, R), float64.

    A zero vector has cosine 0 with all other vectors.

    Args:
        z: (R, d) the participants' mean latents.
    """
    z = z.double()
    scaled = z / z.abs().amax(1, keepdim=True).clamp_min(_TINY)  # scaled, so that no norm overflows
    norm = scaled.norm(dim=1, keepdim=True)
    unit = torch.where(norm > 0, scaled / norm.clamp_min(_TINY), 0.0)
    s = unit @ unit.T
    s = ((s + s.T) / 2).clamp(-1.0, 1.0)  # rounding can make a matrix product asymmetric
    return s.fill_diagonal_(1.0)


def contribution(z: Tensor, nu: Tensor, temperature: float) -> Contribution:
    """Return the contribution factors, and the weights that replace the base method's.

        a_r      = sum_p S_rp / T
        Lambda_r = sum_{q != r} e^{a_q} / sum_q e^{a_q}           (eq. 5, 8)
        w_r      = Lambda_r nu_r / sum_q Lambda_q nu_q            (eq. 6, 7)

    Args:
        z: (R, d) the participants' mean latents, finite.
        nu: (R,) the base method's weights, >= 0 and not all zero.
        temperature: T, positive and finite.
    """
    nu = nu.double()
    s = similarity(z)
    if len(nu) == 1:  # eq. 6 would be 0/0, so the only participant gets the whole weight
        return Contribution(s, torch.zeros_like(nu), torch.ones_like(nu))
    row_sums = s.sum(1)
    gap = row_sums.max() - row_sums  # a common shift of all a_r cancels in eq. 5
    # The rounding error of a row sum is about R 1e-15. Divided by a tiny T, it would separate
    # clients that are equally central.
    gap = torch.where(gap > len(nu) * 1e-14, gap, 0.0)
    a = (-gap / temperature).clamp_min(-1e300)  # so that a tiny T cannot overflow
    # Leave-one-out log-sum-exp: 1 - softmax(a) would suffer from cancellation if one client
    # dominates.
    diagonal = torch.eye(len(a), dtype=torch.bool, device=a.device)
    others = a.expand(len(a), len(a)).masked_fill(diagonal, -torch.inf)
    log_factors = others.logsumexp(1) - a.logsumexp(0)
    return Contribution(s, log_factors.exp(), (log_factors + nu.log()).softmax(0))


def latents(params: AnyTree, batch: Batch, own: Tree) -> tuple[Tensor, Tree]:
    """Return zero losses, and record z of each sample, as the model computed it in training."""
    records = {"z": batch.z.detach().flatten(1), "rows": batch.index}
    return batch.logits.new_zeros(len(batch.y)), records


@dataclass(frozen=True, kw_only=True)
class FedNormPlugin(Plugin):
    """Replaces the base method's aggregation weights nu by w.

    This affects everything that the base method averages.
    """

    name = "fednorm"
    needs = frozenset({"used weights"})

    temperature: float = setting(0.5, open_low=0)
    z_when: str = setting(
        "after_training", allowed=("after_training", "before_training", LAST_EPOCH)
    )

    # ---- client
    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        return [Term("loss", latents)] if self.z_when == LAST_EPOCH else []

    def finish(
        self, msg: Message, state: State, ctx: ClientContext, fitted: Fitted
    ) -> tuple[Result, State]:
        z = None
        if len(ctx.own) >= ctx.workspace.min_count:
            mean = self._of_last_epoch if self.z_when == LAST_EPOCH else self._mean
            z = mean(msg, ctx, fitted)
        return Result(extras={"z": z}), state

    def _mean(self, msg: Message, ctx: ClientContext, fitted: Fitted) -> Tensor:
        """Return the mean z over all real training samples, without augmentation, (d,) float32."""
        total = torch.zeros((), dtype=torch.float64, device=ctx.workspace.device)
        params = fitted.params if self.z_when == "after_training" else fitted.start
        for z in ctx.outputs(params, ctx.own.x, "features"):
            total = total + z.flatten(1).sum(0, dtype=torch.float64)
        return (total / len(ctx.own)).float()

    def _of_last_epoch(self, msg: Message, ctx: ClientContext, fitted: Fitted) -> Tensor | None:
        """Return the mean z over the last epoch; None if the client took no step."""
        if not fitted.steps:
            return None
        z = fitted.records["z"].reshape(len(fitted.records["rows"]), -1)
        used = usable(ctx.workspace.model, len(ctx.data), msg.local.batch_size)
        *_, last = msg.local.epoch_sizes(used)
        return z[-last:].double().mean(0).float()

    # ---- server
    def setup(self, setup: RunSetup) -> State:
        require_features(setup.workspace.model, "fednorm")
        return {}

    def expects(self, step: Step) -> dict[str, Expected]:
        # If the head does not state the width of its input, the first client's z decides.
        width = getattr(step.workspace.model.head, "in_features", -1)
        return {"z": Expected(shape=(width,), statistic=True)}

    def weights(
        self, step: Step, state: State, updates: Sequence[Update]
    ) -> tuple[list[float], Recorded]:
        new = {update.pid: update.weight for update in updates}
        compared = [update for update in updates if update["z"] is not None]
        if len(compared) == 2 and step.number == 1:
            log.warning(
                "fednorm: with two participants FedNorm does nothing: they keep the weights of the"
                " base method"
            )
        recorded: Recorded = {"idle": 1} if len(compared) <= 2 else {}
        if len(compared) < len(updates):
            recorded["withheld"] = len(updates) - len(compared)
        if not compared:
            return list(new.values()), recorded
        z = torch.stack([update["z"].cpu() for update in compared])
        nu = torch.tensor([update.weight for update in compared], dtype=torch.float64)
        similarity, factors, weights = contribution(z, nu, self.temperature)
        pids = [update.pid for update in compared]
        # Clients that withhold z keep their nu; the other clients share the rest.
        scale, total = (nu.sum(), sum(new.values())) if "withheld" in recorded else (1.0, 1.0)
        new |= zip(pids, (weights * scale).tolist(), strict=True)
        weights = weights * scale / total  # as the merge uses them: over all clients, they sum to 1
        recorded |= {
            "similarity": similarity,
            "factors": factors,
            "weights": weights,
            "pids": torch.tensor(pids),
            "weight_max": float(weights.max()),
        }
        return list(new.values()), recorded


@dataclass(frozen=True, kw_only=True)
class FedNorm(FedAvg):
    """FedAvg with the plug-in `fednorm`."""

    name = "fednorm"
    requires = FedNormPlugin
