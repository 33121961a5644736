"""FedPCL: prototype-wise contrastive learning (Tan et al. 2022).

Clients exchange class prototypes, not weights. Each client trains its features f(x), the input of
the last layer, so that a sample lies near the prototypes of its class and far from the others.

    z = f(x) / |f(x)|
    client:     C_k^c = mean of z over the training samples of class c, after training
    server:     C^c = mean of C_k^c over the clients k that have class c
                C_k with missing classes filled from C, for each of the K' clients
    loss:       L(z, C) + 1/K' sum_k L(z, C_k)
                L(z, P) = -z.P_y / tau + log sum_c exp(z.P_c / tau)
    prediction: argmax_c cos(z, C_k^c)

Phase `collect`, once, all clients, without training:

    down:          `fedpcl.renormalise`
    up:            `fedpcl.prototypes` (classes x d, and which classes these are)
    client keeps:  its prototypes
    server keeps:  C (slot `prototypes`), the K' sets

Phase `train`:

    down:          `fedpcl.prototypes` (C, and the K' sets of the last step), `fedpcl.tau`,
                   `fedpcl.denominator`, `fedpcl.renormalise`
    up:            `fedpcl.prototypes`
    client keeps:  its whole model but the last layer, its prototypes
    server keeps:  C, the K' sets

A client sends those of the classes of which it has at least `privacy.min_count` samples. To all
others, the server included, it is as if it had none of the rest; its own predictions use all of its
prototypes. The paper has no such limit (`privacy.min_count=0`).

No weights travel and no model is shared: the model slot keeps its initial value, from which every
client starts, and only personal models are evaluated. The C^c of a class that no participant has
stays unchanged. A class is therefore unknown only where all its owners have failed in `collect`, or
have too few samples of it: its column is then left out, and its samples have the loss 0.

Deviations and choices: the paper trains a projection on frozen pre-trained encoders; here
everything that `features` reads is trained, as in the FedDisk paper's comparison. A model that
freezes its encoder (requires_grad) and ends `features` with a projection is the paper's.

Defaults: `tau = 0.07`, as in the paper; gradients are clipped at norm 10, as in PFLlib.

Reference: Tan et al. 2022, "Federated learning from pre-trained models: a contrastive learning
approach".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedhet.core import check
from fedhet.core.client import FedClient
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.metrics import outputs
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.training import Batch
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.core.workspace import Scope
from fedhet.maths import fedpcl as maths
from fedhet.models.base import feature_head

log = logging.getLogger("fedhet")
Closeness = Callable[[Tensor, Tensor, Tensor], Tensor]

SLOT = "prototypes"
PROTOTYPES = "fedpcl.prototypes"
ROUNDING = 1e-3  # of a norm in the model's precision
TAU = "fedpcl.tau"
DENOMINATOR = "fedpcl.denominator"
RENORMALISE = "fedpcl.renormalise"
OWN = "fedpcl.own"  # client state: its prototypes


class PrototypeClassifier(nn.Module):
    """Scores classes by how close the features are to the prototypes.

    Args:
        model: a model with features(x).
        prototypes: "mean" (C, d), and "has" (C,), which classes have a prototype.
        closeness: (z (B, d), mean, has) -> (B, C), least for a class without a prototype.
    """

    def __init__(
        self, model: nn.Module, prototypes: Tree, closeness: Closeness = maths.cosines
    ) -> None:
        super().__init__()
        self.model = model
        self.closeness = closeness
        self.register_buffer("mean", prototypes["mean"])
        self.register_buffer("has", prototypes["has"])

    def forward(self, x: Tensor) -> Tensor:
        """x (B, ...) -> scores (B, C)."""
        z = self.model.features(x)  # type: ignore[operator]
        return self.closeness(z, self.mean, self.has)  # type: ignore[arg-type]

    @classmethod
    def around(cls, model: nn.Module, closeness: Closeness = maths.cosines) -> PrototypeClassifier:
        """A classifier without prototypes yet, into which `fedhet.load` puts them."""
        mean = torch.zeros_like(model.head.weight)  # type: ignore[union-attr, arg-type]
        return cls(model, {"mean": mean, "has": torch.zeros(len(mean)) > 0}, closeness)


@torch.no_grad()
def class_means(
    client: FedClient, model: nn.Module, unit: Callable[[Tensor], Tensor] = lambda z: z
) -> tuple[Tensor, Tensor]:
    """Return the means over the classes of the client's real training samples, in eval mode.

    Args:
        client: whose samples they are.
        model: a model with features(x).
        unit: changes the features (B, d) before the means.

    Returns:
        As `maths.prototypes`.
    """
    model.eval()
    workspace = client.workspace
    data = workspace.train_data(client.pid)
    z = torch.cat([unit(z) for z in outputs(model, data.x, workspace.performer, "features")])
    return maths.prototypes(z, data.y, workspace.task.classes)


def no_prototypes(head: nn.Linear, classes: int) -> Tree:
    """Return the initial slot: "mean" (C, d) and "has" (C,), without any class."""
    mean = head.weight.new_zeros(classes, head.in_features).detach()
    return {"mean": mean, "has": torch.zeros(classes, dtype=torch.bool, device=mean.device)}


def renewed(before: Tree, mean_Cd: Tensor, present_C: Tensor) -> Tree:
    """Return the slot with the means of the classes that are present; others keep their value."""
    mean = torch.where(present_C[:, None], mean_Cd, before["mean"]).to(before["mean"].dtype)
    return {"mean": mean, "has": before["has"] | present_C}


class FedPCLClient(FedClient):
    """Keeps its model, and sends prototypes; under privacy.noise one of every class."""

    public = (f"{PROTOTYPES}.has",)

    def collect(self, msg: Broadcast) -> Update:
        """The phase `collect`: send the prototypes of the initial model."""
        model = self.workspace.load(self.start(msg))
        return self._with_prototypes(Update(self.pid, self.num_examples), model)

    def train(self, msg: Broadcast) -> Update:
        return self._with_prototypes(super().train(msg), self.model)

    def _with_prototypes(self, update: Update, model: nn.Module) -> Update:
        """The update with the prototypes that may be sent; the client keeps all of its own."""
        prototypes = self._prototypes(model, renormalise=self.msg.boolean(RENORMALISE))
        self.state.put(OWN, prototypes)
        counts = self.workspace.train_data(self.pid).y.bincount(
            minlength=self.workspace.task.classes
        )
        sent = prototypes["has"] & (counts >= self.workspace.min_count)
        mean = prototypes["mean"].where(sent[:, None], 0)
        if self.workspace.noise:
            sent = torch.ones_like(sent)
        update.extras[PROTOTYPES] = {"mean": mean, "has": sent}
        return update

    def released(self, update: Update) -> None:
        if PROTOTYPES in update.extras and self.msg.boolean(RENORMALISE):
            noised = update.tree(PROTOTYPES)
            update.extras[PROTOTYPES] = {**noised, "mean": normalize(noised["mean"])}

    def prepare(self, msg: Broadcast) -> Tree:
        return msg.tree(PROTOTYPES)

    def losses(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        return maths.losses(
            normalize(batch.z),
            batch.y,
            own["mean"],
            own["clients"],
            own["has"],
            self.msg.scalar(TAU),
            self.msg.text(DENOMINATOR),
        )

    def _prototypes(self, model: nn.Module, *, renormalise: bool = False) -> Tree:
        """The class means of z, and which classes there are."""
        mean, has = class_means(self, model, normalize)
        if renormalise:
            mean = normalize(mean)
        return {"mean": mean.to(self.workspace.initial["head.weight"].dtype), "has": has}

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        return {"personal": lambda: self._classifier(msg)}

    @classmethod
    def personal_module(cls, model: nn.Module) -> nn.Module:
        return PrototypeClassifier.around(model)

    def _classifier(self, msg: Broadcast) -> nn.Module:
        """The personal model: this client's features and prototypes.

        Where the message has prototypes, they stand in for the classes that the client lacks.
        """
        model = self.workspace.load(self.start(msg))
        prototypes = self.state.get(OWN)
        if prototypes is None:  # the client failed in the phase `collect`
            prototypes = self._prototypes(model)
        if PROTOTYPES in msg.extras:
            own = prototypes
            shared = msg.tree(PROTOTYPES)
            prototypes = {
                "mean": torch.where(own["has"][:, None], own["mean"], shared["mean"]),
                "has": own["has"] | shared["has"],
            }
        return PrototypeClassifier(model, prototypes)


class FedPCL(FedStrategy):
    """Averages prototypes instead of weights."""

    name = "fedpcl"
    client_cls = FedPCLClient
    evaluates = ("personal",)
    weighted = False
    enters = "prototypes"
    memory = ("_client_prototypes",)
    releases = 1
    _client_prototypes: Tensor  # (K', C, d) the last step's sets, missing classes filled

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
        if setting.local.clip is None:
            setting = replace(setting, local=replace(setting.local, clip=self.clip))
        super().__init__(setting)

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        return Scope(
            trained=lambda name: not name.startswith("head."),
            shared=lambda name: False,
            why="method=fedpcl trains only the layers before the head",
        )

    def setup(self) -> None:
        self.workspace.task.check_classes("method=fedpcl")
        why = "method=fedpcl compares the features that a model's last layer reads, by class"
        self._head = feature_head(self.workspace.model, why)

    def slots(self) -> dict[str, Tree]:
        return {SLOT: no_prototypes(self._head, self.workspace.task.classes)}

    def phases(self) -> list[Phase]:
        collect = Phase("collect", 1, self.merge, check=self.check, cohort=1.0, uploads=False)
        return [collect, *super().phases()]

    def base_weight(self, update: Update) -> float:
        return 1.0

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        if not phase.trains:
            return {RENORMALISE: self.renormalise}
        return {
            PROTOTYPES: {**self.weights[SLOT], "clients": self._client_prototypes},
            TAU: self.tau,
            DENOMINATOR: self.denominator,
            RENORMALISE: self.renormalise,
        }

    def check(self, update: Update) -> None:
        means = update.tree(PROTOTYPES, like=self.weights[SLOT])["mean"]
        longest = float(means.norm(dim=1).max())
        if longest > 1 + ROUNDING and not self.workspace.noise:
            raise ValueError(
                f"extra {PROTOTYPES!r} has a prototype of norm {longest:.4g}; means of unit vectors"
                " have at most 1"
            )

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        """The new prototypes, in both phases; the model slot keeps its value."""
        before = self.weights[SLOT]
        sets = [update.tree(PROTOTYPES) for update in updates]
        means = torch.stack([prototypes["mean"] for prototypes in sets])
        has = torch.stack([prototypes["has"] for prototypes in sets])
        mean, present = maths.pooled(means, has)
        if self.renormalise:
            mean = normalize(mean)
        self.weights[SLOT] = renewed(before, mean, present)
        self._warn_of_unknown()
        self._client_prototypes = torch.where(has[..., None], means, self.weights[SLOT]["mean"])
        if self.unseen == "global":
            self.evaluation_extras = {PROTOTYPES: self.weights[SLOT]}
        return {}

    def _warn_of_unknown(self) -> None:
        """After the phase `collect`, warn of classes of which no client has sent one."""
        unknown = (~self.weights[SLOT]["has"]).nonzero().flatten().tolist()
        if unknown and self.current.entry.name == "collect":
            log.warning(
                "fedpcl: no client has sent a prototype of the classes %s (privacy.min_count=%d);"
                " their samples are not trained on until one does",
                unknown,
                self.workspace.min_count,
            )
