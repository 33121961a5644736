"""FedNorm: aggregation weights normalised by latent similarity (Kundalwal et al. 2024).

Kundalwal, Saraswat, Mishra and Mishra, "Client contribution normalization for enhanced federated
learning". A plug-in for any host: w_r takes the place of the host's aggregation weight nu_r.

    z_r      = mean of h(x) over all training samples x of client r
    S_rp     = cos(z_r, z_p), S_rr = 1                      (eq. 3, 4)
    a_r      = sum_p S_rp / T                               (eq. 8)
    Lambda_r = 1 - softmax(a)_r                             (eq. 5)
    w_r      = Lambda_r nu_r / sum_q Lambda_q nu_q          (eq. 6, 7)

h(x) is the input of the last linear layer of the client's trained model, in eval mode (or of
another one, see `z_when` below). A client
with fewer than `privacy.min_count` training samples (0 is the paper's method) withholds z and keeps
its nu; under `z_when=last_epoch`, so does one that took no step. The sums then run over the clients
C that send theirs. Together these keep the weight that the host gave them, and divide it anew:
w_r = Lambda_r nu_r / sum_{q in C} Lambda_q nu_q * sum_{q in C} nu_q.

    down: what the host sends
    up: what the host sends, `fednorm.z` (d,), or (0,) where it is withheld
    client keeps: nothing
    server keeps: nothing

Outliers gain weight, by design: FedNorm is no defence against a poisoned or broken client. Under
uniform nu no weight exceeds 1 / (R - 1) with R participants. With two participants the similarities
cannot tell them apart, and the weights are the host's.

Deviations and choices:
- The paper computes z both before training and in its last epoch; here `z_when` chooses:
  `after_training`, the default, with the model that is sent; `before_training`, with the model that
  was received; `last_epoch`, the mean over the last epoch, as the model in train mode saw each
  sample, generated ones included.
- The paper requires T to be less than 1, which sharpens the softmax, but prints no value; the
  default is .5.
- Line 3 of algorithm 1 draws a "random group of clients" once, before the loop over the rounds, and
  does not say how many. Here every round draws its clients anew, as the hosts do (`fraction`). With
  `fraction=1`, the default, everyone takes part and both readings are the same; literally, clients
  outside the group would never train, which is a federation of fewer clients.
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
    """The similarity S (R, R), the factors Lambda (R,), and the weights w (R,), whose sum is 1."""

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
    scaled = z / z.abs().amax(1, keepdim=True).clamp_min(_TINY)  # so that the norm cannot overflow
    norm = scaled.norm(dim=1, keepdim=True)
    unit = torch.where(norm > 0, scaled / norm.clamp_min(_TINY), 0.0)
    s = unit @ unit.T
    s = ((s + s.T) / 2).clamp(-1.0, 1.0)  # rounding can make a matrix product asymmetric
    return s.fill_diagonal_(1.0)


def contribution(z: Tensor, nu: Tensor, temperature: float) -> Contribution:
    """Return the contribution factors and the weights that replace the host's.

        a_r      = sum_p S_rp / T
        Lambda_r = sum_{q != r} e^{a_q} / sum_q e^{a_q}           (eq. 5, 8)
        w_r      = Lambda_r nu_r / sum_q Lambda_q nu_q            (eq. 6, 7)

    Args:
        z: (R, d) the participants' mean latents, finite.
        nu: (R,) the host's weights, >= 0 and not all zero.
        temperature: T, positive and finite.
    """
    nu = nu.double()
    s = similarity(z)
    if len(nu) == 1:  # eq. 6 would be 0/0; the only participant gets the whole weight
        return Contribution(s, torch.zeros_like(nu), torch.ones_like(nu))
    row_sums = s.sum(1)
    gap = row_sums.max() - row_sums  # a common shift of all a_r cancels in eq. 5
    # The rounding error of a row sum is about R 1e-15. Divided by a tiny T, it would separate
    # clients that are equally central.
    gap = torch.where(gap > len(nu) * 1e-14, gap, 0.0)
    a = (-gap / temperature).clamp_min(-1e300)  # so that a tiny T cannot overflow
    # Leave-one-out log-sum-exp: 1 - softmax(a) would suffer from cancellation where one client
    # dominates.
    diagonal = torch.eye(len(a), dtype=torch.bool, device=a.device)
    others = a.expand(len(a), len(a)).masked_fill(diagonal, -torch.inf)
    log_factors = others.logsumexp(1) - a.logsumexp(0)
    return Contribution(s, log_factors.exp(), (log_factors + nu.log()).softmax(0))


def latents(params: AnyTree, batch: Batch, own: Tree) -> tuple[Tensor, Tree]:
    """Adds nothing to the losses, and records z of each sample, as the model in training saw it."""
    records = {"z": batch.z.detach().flatten(1), "rows": batch.index}
    return batch.logits.new_zeros(len(batch.y)), records


@dataclass(frozen=True, kw_only=True)
class FedNormPlugin(Plugin):
    """Replaces the host's weights nu by w, for everything that the host averages."""

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
        """z (d,) in float32, over all real training samples, without augmentation."""
        total = torch.zeros((), dtype=torch.float64, device=ctx.workspace.device)
        params = fitted.params if self.z_when == "after_training" else fitted.start
        for z in ctx.outputs(params, ctx.own.x, "features"):
            total = total + z.flatten(1).sum(0, dtype=torch.float64)
        return (total / len(ctx.own)).float()

    def _of_last_epoch(self, msg: Message, ctx: ClientContext, fitted: Fitted) -> Tensor | None:
        """The mean over the last epoch; None where no step was taken."""
        if not fitted.steps:
            return None
        rows = len(fitted.records["rows"])
        z = fitted.records["z"].reshape(rows, -1)
        used = usable(ctx.workspace.model, len(ctx.data), msg.local.batch_size)
        *_, last = msg.local.epoch_sizes(used)
        return z[-last:].double().mean(0).float()

    # ---- server
    def setup(self, setup: RunSetup) -> State:
        require_features(setup.workspace.model, "fednorm")
        return {}

    def expects(self, step: Step) -> dict[str, Expected]:
        # Where the head does not say how wide its input is, the first client's z decides.
        width = getattr(step.workspace.model.head, "in_features", -1)
        return {"z": Expected(shape=(width,), statistic=True)}

    def weights(
        self, step: Step, state: State, updates: Sequence[Update]
    ) -> tuple[list[float], Recorded]:
        new = {update.pid: update.weight for update in updates}
        compared = [update for update in updates if update["z"] is not None]
        if len(compared) == 2 and step.number == 1:
            log.warning(
                "fednorm: with two participants its weights are the host's,"
                " so it does nothing in such rounds"
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
        # Clients that withhold z keep their nu.
        scale, total = (nu.sum(), sum(new.values())) if "withheld" in recorded else (1.0, 1.0)
        new |= zip(pids, (weights * scale).tolist(), strict=True)
        weights = weights * scale / total  # as used: with those of the others they sum to 1
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
