"""FedNorm (Kundalwal et al., "Client contribution normalization for enhanced federated learning"):
a wrapper of any host.

    z_r = mean over the client's training samples of the input of the last linear layer, trained
    local model, eval mode S_rp = cos(z_r, z_p), S_rr = 1 (eq. 3, 4)      Lambda_r = 1 -
    softmax(sum_p S_rp / T)_r (eq. 5, 8) w_r = Lambda_r nu_r / sum_q Lambda_q nu_q, in place of the
    host's weights nu (eq. 6, 7)

    down: what the host sends      up: what the host sends, `fednorm.z` (d,)      client keeps: nothing      server keeps: nothing

It raises the weight of outliers, by design: it is no defence against a poisoned or broken client.
With uniform nu no weight exceeds 1/(R-1), and with two participants the weights are the host's. The
paper prints no value for T, only "less than 1" (which sharpens the softmax); the default is .5. It
computes z both before and in the last epoch of training; the default here is after training, with
the model that is sent."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from fedhet import check
from fedhet.client import FedClient
from fedhet.maths.fednorm import contribution
from fedhet.messages import Broadcast, Update
from fedhet.metrics import chunks
from fedhet.plugin import Plugin
from fedhet.strategy import FedStrategy
from fedhet.trees import Tree

log = logging.getLogger("fedhet")
Z = "fednorm.z"


class FedNormPlugin(Plugin):
    """Replaces the host's weights nu by w, for everything that the host averages."""

    name = "fednorm"
    needs_all = True

    def __init__(self, *, temperature: float = 0.5, z_when: str = "after_training") -> None:
        self.temperature = check.number("plugin.fednorm.temperature", temperature, open_low=0)
        self.z_when = check.one_of(
            "plugin.fednorm.z_when", z_when, ("after_training", "before_training")
        )
        super().__init__(temperature=self.temperature, z_when=self.z_when)
        self._dim: int | None = None
        self._told = False

    # ---- client
    def prepare(self, msg: Broadcast) -> None:
        if self.z_when == "before_training":
            self.client.site.load(self.client.start(msg))
            self._z = self._latents()

    def finish(self, update: Update) -> None:
        update.extras[Z] = self._latents() if self.z_when == "after_training" else self._z

    @torch.no_grad()
    def _latents(self) -> Tensor:
        """(d,) float32: the mean of features(x) over all real training samples, without
        augmentation."""
        site = self.client.site
        features = getattr(site.model, "features", None)
        if features is None:
            raise ValueError(
                f"fednorm needs a model with features(x) and head(f); {type(site.model).__name__}"
                " has no features"
            )
        site.model.eval()
        data = site.train_data(self.client.pid)
        total = sum(features(x).flatten(1).sum(0, dtype=torch.float64) for x in chunks(data.x))
        assert isinstance(total, Tensor)
        return (total / len(data)).float()

    # ---- server
    def setup(self) -> None:
        self._dim = getattr(getattr(self.server.site.model, "head", None), "in_features", None)

    def check(self, update: Update) -> None:
        z = update.tensor(Z, ndim=1)
        self._dim = self._dim or len(z)  # a head that does not tell its width: the first client's
        if len(z) != self._dim:
            raise ValueError(f"extra {Z!r} has {len(z)} entries; {self._dim} are expected")

    def incoming(self, updates: Iterator[Update], old: Tree) -> list[Update]:
        out = list(updates)
        if len(out) == 2 and not self._told:
            log.info(
                "fednorm: with two participants its weights are the host's, so it does nothing in"
                " such rounds"
            )
            self._told = True
        z = torch.stack([update.tensor(Z).cpu() for update in out])
        found = contribution(
            z,
            torch.tensor([update.weight for update in out], dtype=torch.float64),
            self.temperature,
        )
        for update, weight in zip(out, found.weights.tolist(), strict=True):
            update.weight = weight
        self.report = {
            "similarity": found.similarity,
            "factors": found.factors,
            "weights": found.weights,
            "pids": torch.tensor([update.pid for update in out]),
            "weight_max": float(found.weights.max()),
        }
        return out


class FedNormClient(FedClient):
    """Plain FedAvg training; the plug-in adds the latents."""


class FedNorm(FedStrategy):
    """FedAvg with the plug-in above (conf/method/fednorm.yaml lists it)."""

    name = "fednorm"
    client_cls = FedNormClient
    requires = "fednorm"
