"""FedNorm: aggregation weights normalised by latent similarity (Kundalwal et al. 2024).

Kundalwal, Saraswat, Mishra and Mishra, "Client contribution normalization for enhanced federated
learning". A plug-in for any host: w_r takes the place of the host's aggregation weight nu_r.

    z_r      = mean of h(x) over all training samples x of client r
    S_rp     = cos(z_r, z_p), S_rr = 1                      (eq. 3, 4)
    a_r      = sum_p S_rp / T                               (eq. 8)
    Lambda_r = 1 - softmax(a)_r                             (eq. 5)
    w_r      = Lambda_r nu_r / sum_q Lambda_q nu_q          (eq. 6, 7)

h(x) is the input of the last linear layer of the client's trained model, in eval mode. A client
with fewer than `privacy.min_count` training samples withholds z and keeps its nu (0 is the paper's
method). The sums then run over the clients C that send theirs, and so does the share that these
divide among themselves: w_r = Lambda_r nu_r / sum_{q in C} Lambda_q nu_q * sum_{q in C} nu_q.

    down: what the host sends
    up: what the host sends, `fednorm.z` (d,), or (0,) where it is withheld
    client keeps: nothing
    server keeps: nothing

Outliers gain weight, by design: FedNorm is no defence against a poisoned or broken client. Under
uniform nu no weight exceeds 1 / (R - 1) with R participants. With two participants the similarities
cannot tell them apart, and the weights are the host's.

Deviations and choices:
- The paper computes z both before training and in its last epoch; here it is computed after
  training, with the model that is sent, or as a mean over the last epoch, as
  the model in train mode saw each sample, generated ones included (`z_when`).
- The paper requires T to be less than 1, which sharpens the softmax, but prints no value; the
  default is .5.
- Line 3 of algorithm 1 draws a "random group of clients" once, before the loop over the rounds, and
  does not say how many. Here every round draws its clients anew, as the hosts do (`fraction`). With
  `fraction=1`, the default, everyone takes part and both readings are the same; literally, clients
  outside the group would never train, which is a federation of fewer clients.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedhet.core import check
from fedhet.core.check import setting
from fedhet.core.messages import Broadcast, Update
from fedhet.core.metrics import outputs
from fedhet.core.plugin import Plugin, Terms
from fedhet.core.training import Batch, usable
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.methods.fedavg import FedAvg
from fedhet.models.base import require_features

log = logging.getLogger("fedhet")

Z = "fednorm.z"
ROWS = "fednorm.rows"  # recorded: one entry for each sample of each epoch
LAST_EPOCH = "last_epoch"
WHEN = ("after_training", "before_training", LAST_EPOCH)
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

    Raises:
        ValueError: an argument is out of range; the message gives its value and the positions of
            the participants concerned.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature={temperature}; it must be positive and finite")
    if z.ndim != 2 or nu.shape != z.shape[:1] or len(nu) == 0:
        raise ValueError(
            f"latents of shape {tuple(z.shape)} and weights of shape {tuple(nu.shape)};"
            " expected (R, d) and (R,) with R >= 1"
        )
    if bad := (~torch.isfinite(z).all(1)).nonzero().flatten().tolist():
        raise ValueError(f"the mean latents of participants {bad} hold NaN or infinite values")
    nu = nu.double()
    if not torch.isfinite(nu).all() or (nu < 0).any() or not nu.sum() > 0:
        raise ValueError(f"host weights {nu.tolist()}; they must be finite, >= 0 and not all zero")
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


@dataclass(kw_only=True, eq=False)
class FedNormPlugin(Plugin):
    """Replaces the host's weights nu by w, for everything that the host averages."""

    name = "fednorm"
    needs_all = True
    memory = ("_width", "_pair_reported")
    releases = {"train": 1}

    temperature: float = setting(0.5, open_low=0)
    z_when: str = setting("after_training", allowed=WHEN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.z_when == LAST_EPOCH:  # a hook is found by the class, and costs time in every step
            self.__class__ = _LastEpoch

    # ---- client
    def prepare(self, msg: Broadcast) -> None:
        if self.z_when == "before_training":
            self.client.workspace.load(self.client.start(msg))
            self._z = self._mean_latents()

    def finish(self, update: Update) -> None:
        if self.z_when == "after_training":
            self._z = self._mean_latents()
        update.extras[Z] = self._z

    @torch.no_grad()
    def _mean_latents(self) -> Tensor:
        """z (d,) in float32, over all real training samples, without augmentation.

        It is empty, (0,), where these are fewer than `workspace.min_count`.
        """
        workspace = self.client.workspace
        workspace.model.eval()
        data = workspace.train_data(self.client.pid)
        if len(data) < workspace.min_count:
            return torch.empty(0, device=workspace.device)
        total = torch.zeros((), dtype=torch.float64, device=workspace.device)
        for z in outputs(workspace.model, data.x, workspace.performer, "features"):
            total = total + z.flatten(1).sum(0, dtype=torch.float64)
        return (total / len(data)).float()

    # ---- server
    def setup(self) -> None:
        require_features(self.server.workspace.model, "fednorm")
        head = self.server.workspace.model.head
        # Where the head does not say how wide its input is, the first client's z decides.
        self._width: int | None = getattr(head, "in_features", None)
        self._pair_reported = False

    def check(self, update: Update) -> None:
        z = update.tensor(Z, ndim=1)
        if not len(z):  # withheld
            return
        self._width = self._width or len(z)
        if len(z) != self._width:
            entries = check.counted(len(z), "entry", "entries")
            raise ValueError(f"extra {Z!r} has {entries}; expected: {self._width}")

    def incoming(self, updates: Iterator[Update], old: Tree) -> list[Update]:
        received = list(updates)
        latents = {update.pid: update.tensor(Z).cpu() for update in received}
        compared = [update for update in received if len(latents[update.pid])]
        if len(compared) == 2 and not self._pair_reported:
            log.warning(
                "fednorm: with two participants its weights are the host's,"
                " so it does nothing in such rounds"
            )
            self._pair_reported = True
        idle = {"idle": 1} if len(compared) <= 2 else {}
        if not compared:
            self.recorded = {"withheld": len(received), **idle}
            return received
        z = torch.stack([latents[update.pid] for update in compared])
        nu = torch.tensor([update.weight for update in compared], dtype=torch.float64)
        similarity, factors, weights = contribution(z, nu, self.temperature)
        if len(compared) < len(received):
            weights = weights * nu.sum()  # of the others' weights nothing moves
        for update, weight in zip(compared, weights.tolist(), strict=True):
            update.weight = weight
        self.recorded = {
            "similarity": similarity,
            "factors": factors,
            "weights": weights,
            "pids": torch.tensor([update.pid for update in compared]),
            "weight_max": float(weights.max()),
            **idle,
        }
        if len(compared) < len(received):
            self.recorded["withheld"] = len(received) - len(compared)
        return received


class _LastEpoch(FedNormPlugin):
    """z_when=last_epoch: the latents are recorded as the model sees each batch."""

    def losses(self, params: AnyTree, batch: Batch, own: Prepared) -> Terms:
        records = {Z: batch.z.detach().flatten(1), ROWS: batch.index}
        return batch.logits.new_zeros(len(batch.y)), records

    def finish(self, update: Update) -> None:
        client = self.client
        self._z = torch.empty(0, device=client.workspace.device)
        if client.steps and client.num_examples >= client.workspace.min_count:
            z = client.recorded(Z).reshape(len(client.recorded(ROWS)), -1)
            used = usable(client.workspace.model, len(client.data), client.local.batch_size)
            *_, last = client.local.epoch_sizes(used)
            self._z = z[-min(last, used) :].double().mean(0).float()
        super().finish(update)


FedNorm = FedAvg.preset("FedNorm", FedNormPlugin)
