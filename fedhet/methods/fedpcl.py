"""FedPCL (Tan et al. 2022, "Federated learning from pre-trained models: a contrastive learning
approach").

    z = f(x) / |f(x)|, f: all but the last layer       C_k^c = mean of z over client k's training
    samples of class c, after training server: C^c = mean of C_k^c over the clients that have c
    each client's own set, missing classes filled with C^c loss: L(z, C) + 1/K' sum_p L(z, C_p),
    L(z, P) = -z.P_y/tau + log sum_c exp(z.P_c/tau);  prediction: argmax_c cos(z, C_k^c)

    collect  down: `fedpcl.renormalise`      up: `fedpcl.prototypes` (classes x d; which classes it
    has) train    down: `fedpcl.prototypes` (C, and the sets of the K' clients of the last step),
    `fedpcl.tau`, ...  up: `fedpcl.prototypes` client keeps: its whole model but the last layer, its
    prototypes       server keeps: C (slot `prototypes`), the K' sets

No weights travel and no model is shared: the model slot keeps its initial value, from which every
client starts, and only personal models are scored. All clients collect once, without training; the
C^c of a class that no participant has stays as it was. So a class is unknown only where its owners
failed: its column is left out, and its samples have loss 0. Deviations: the paper trains a
projection on frozen pre-trained encoders; here all that `features` reads is trained, as in the
FedDisk paper's comparison. A model that freezes its encoder (requires_grad) and ends `features`
with a projection is the paper's. Defaults: tau .07 as in the paper; gradients are clipped at 10 as
in PFLlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedhet import check
from fedhet.client import FedClient
from fedhet.errors import ConfigError
from fedhet.maths import fedpcl as maths
from fedhet.messages import Broadcast, Extras, Update
from fedhet.metrics import chunks
from fedhet.models.base import feature_head
from fedhet.phases import Phase
from fedhet.setting import Setting
from fedhet.site import Scope
from fedhet.strategy import FedStrategy
from fedhet.training import Batch
from fedhet.trees import Tree

SLOT, PROTOTYPES, OWN = "prototypes", "fedpcl.prototypes", "fedpcl.own"
TAU, DENOMINATOR, RENORMALISE = "fedpcl.tau", "fedpcl.denominator", "fedpcl.renormalise"


class Nearest(nn.Module):
    """x -> the cosines of its features with the prototypes (B, C), -inf for classes without one."""

    def __init__(self, model: nn.Module, mean: Tensor, has: Tensor) -> None:
        super().__init__()
        self.model, self.mean, self.has = model, mean, has

    def forward(self, x: Tensor) -> Tensor:
        return maths.cosines(self.model.features(x), self.mean, self.has)  # type: ignore[operator]


class FedPCLClient(FedClient):
    """Keeps its model, sends prototypes."""

    def collect(self, msg: Broadcast) -> Update:
        """The phase `collect`: the prototypes of the initial model."""
        own = self._prototypes(
            self.site.load(self.start(msg)), renormalise=bool(msg.extras[RENORMALISE])
        )
        self.state.put(OWN, own)
        return Update(self.pid, self.num_examples, extras={PROTOTYPES: own})

    def train(self, msg: Broadcast) -> Update:
        update = super().train(msg)
        own = update.extras[PROTOTYPES] = self._prototypes(
            self.model, renormalise=bool(msg.extras[RENORMALISE])
        )
        self.state.put(OWN, own)
        return update

    def losses(self, batch: Batch) -> Tensor:
        shared = self.msg.tree(PROTOTYPES)
        tau = self.msg.scalar(TAU)
        denominator = self.msg.text(DENOMINATOR)
        return maths.losses(
            normalize(batch.z),
            batch.y,
            shared["mean"],
            shared["clients"],
            shared["has"],
            tau,
            denominator,
        )

    @torch.no_grad()
    def _prototypes(self, model: nn.Module, renormalise: bool = False) -> Tree:
        """Of the client's real training samples, in eval mode."""
        model.eval()
        data = self.site.train_data(self.pid)
        z = torch.cat([normalize(model.features(x)) for x in chunks(data.x)])  # type: ignore[operator]
        mean, has = maths.prototypes(z, data.y, self.site.task.classes)
        return {"mean": (normalize(mean) if renormalise else mean).to(z.dtype), "has": has}

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        return {"personal": lambda: self._nearest(msg)}

    def _nearest(self, msg: Broadcast) -> nn.Module:
        model, shared = self.site.load(self.start(msg)), msg.extras.get(PROTOTYPES)
        # none where its part in `collect` has failed
        own = self.state.get(OWN) or self._prototypes(model)
        if not isinstance(shared, dict):
            return Nearest(model, own["mean"], own["has"])
        return Nearest(
            model,
            torch.where(own["has"][:, None], own["mean"], shared["mean"]),
            own["has"] | shared["has"],
        )


class FedPCL(FedStrategy):
    """Averages prototypes."""

    name = "fedpcl"
    client_cls = FedPCLClient
    evaluates = ("personal",)

    def __init__(
        self,
        setting: Setting,
        *,
        tau: float = 0.07,
        clip: float | None = 10.0,
        denominator: str = "all",
        renormalise: bool = False,
        unseen: str = "exclude",
    ) -> None:
        self.tau = check.number("method.tau", tau, open_low=0)
        self.clip = check.optional(check.number, "method.clip", clip, open_low=0)
        self.denominator = check.one_of("method.denominator", denominator, maths.DENOMINATORS)
        self.renormalise = check.boolean("method.renormalise", renormalise)
        self.unseen = check.one_of("method.unseen", unseen, ("exclude", "global"))
        if setting.server_opt is not None:
            raise ConfigError(
                "method=fedpcl has no global model that a server optimiser could step; use"
                " server_opt=none"
            )
        if setting.local.clip is None:
            setting = replace(setting, local=replace(setting.local, clip=self.clip))
        super().__init__(setting)

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        return Scope(trained=lambda name: not name.startswith("head."), shared=lambda name: False)

    @property
    def refuses(self) -> dict[str, str]:
        alone = "clients of this method receive no model, so there is none that it could hold on to"
        return {
            "fednorm": "this method averages no weights",
            "fedlex": "this method's clients share no parameter that could be explored",
            "fedprox": alone,
            "moon": alone,
            "fedntd": alone,
        }

    def slots(self) -> dict[str, Tree]:
        classes = self.site.task.classes
        head = feature_head(
            self.site.model,
            classes,
            "method=fedpcl compares the features that a model's last layer reads, by class",
        )
        mean, has = (
            head.weight.new_zeros(classes, head.in_features).detach(),
            torch.zeros(classes, dtype=torch.bool),
        )
        return {SLOT: {"mean": mean, "has": has.to(self.site.device)}}

    def phases(self) -> list[Phase]:
        return [
            Phase("collect", 1, self.merge, check=self.check, cohort=1.0, uploads=False),
            *super().phases(),
        ]

    def base_weight(self, update: Update) -> float:
        return 1.0

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        if not phase.trains:
            return {RENORMALISE: self.renormalise}
        return {
            PROTOTYPES: {**self.weights[SLOT], "clients": self._clients},
            TAU: self.tau,
            DENOMINATOR: self.denominator,
            RENORMALISE: self.renormalise,
        }

    def check(self, update: Update) -> None:
        update.tree(PROTOTYPES, self.weights[SLOT])

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        """Of both phases. The model stays: nobody shares one."""
        before = self.weights[SLOT]
        sets = [update.tree(PROTOTYPES, before) for update in updates]
        means, has = (torch.stack([one[name] for one in sets]) for name in ("mean", "has"))
        mean, found = maths.pooled(means, has)
        mean = torch.where(
            found[:, None], normalize(mean) if self.renormalise else mean, before["mean"]
        ).to(means.dtype)
        self.weights[SLOT] = {"mean": mean, "has": before["has"] | found}
        self._clients = torch.where(has[..., None], means, mean)
        if self.unseen == "global":
            self.evaluation_extras = {PROTOTYPES: self.weights[SLOT]}
        return {}
