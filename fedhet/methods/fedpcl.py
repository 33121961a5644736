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

    down:          nothing
    up:            `fedpcl.prototypes` (classes x d, and which classes these are)
    client keeps:  its prototypes
    server keeps:  C (slot `prototypes`), the K' sets

Phase `train`:

    down:          `fedpcl.prototypes` (C, and the K' sets of the last step)
    up:            `fedpcl.prototypes`
    client keeps:  its whole model but the last layer, its prototypes
    server keeps:  C, the K' sets

A client sends the prototypes of classes with at least `privacy.min_count` samples. The server and
the other clients cannot distinguish the remaining classes from classes that the client lacks. The
client predicts with all of its own prototypes. The paper has no such limit (`privacy.min_count=0`).

No weights travel and no model is shared. The model slot keeps its initial value, from which every
client starts, and only personal models are evaluated. If no participant has class c, C^c stays
unchanged. A class is therefore unknown only if every client that has it failed in `collect` or has
too few samples of it. The sums over c then leave this class out, and its samples have the loss 0.

Deviations and choices: the paper trains a projection on frozen pre-trained encoders. Here clients
train everything that `features` reads, as in the FedDisk paper's comparison. To follow the paper,
use a model that freezes its encoder (requires_grad) and ends `features` with a projection.

Defaults: `tau = 0.07`, as in the paper. Gradients are clipped at norm 10, as in PFLlib.

Reference: Tan et al. 2022, "Federated learning from pre-trained models: a contrastive learning
approach".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedhet.core import messages
from fedhet.core.authors import (
    AnyTree,
    Batch,
    Client,
    ClientContext,
    Expected,
    Extras,
    LocalSettings,
    Merged,
    Message,
    Method,
    Phase,
    Result,
    RunSetup,
    Scope,
    State,
    Step,
    Term,
    Tree,
    Update,
    Workspace,
    log,
    serves,
    setting,
)
from fedhet.models.base import require_feature_head

Closeness = Callable[[Tensor, Tensor, Tensor], Tensor]

SLOT = "prototypes"
ROUNDING = 1e-3  # allowed excess of a norm, for rounding in the model's precision


# ---- the equations
# Suffixes of names give shapes: K clients, B or n samples, C classes, d features. In every set of
# prototypes, row c belongs to class c.


def prototypes(z_nd: Tensor, y_n: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return a client's prototypes, and which classes it has.

    Args:
        z_nd: features.
        y_n: labels.
        classes: C.

    Returns:
        (C, d) float64, the mean of z over each class, or 0 for a class without samples; and (C,)
        bool, whether the class has samples.
    """
    counts = y_n.bincount(minlength=classes)
    sums = z_nd.new_zeros(classes, z_nd.shape[1], dtype=torch.float64)
    sums.index_add_(0, y_n, z_nd.double())
    return sums / counts.clamp(min=1)[:, None], counts > 0


def pooled(means_KCd: Tensor, counts_KC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the global prototypes, which are means over the clients.

    Args:
        means_KCd: the clients' prototypes.
        counts_KC: their weights: whole numbers, or bool for whether a client has the class.

    Returns:
        (C, d) float64, the means, or 0 for a class that no client has; and (C,) bool, whether any
        client has the class.
    """
    sums = torch.where(counts_KC[..., None] > 0, means_KCd.double() * counts_KC[..., None], 0).sum(
        0
    )
    return sums / counts_KC.sum(0).clamp(min=1)[:, None], (counts_KC > 0).any(0)


def contrast(scores_BC: Tensor, y_B: Tensor, known_C: Tensor, denominator: str) -> Tensor:
    """Return the contrastive losses -s_y + log sum_c exp s_c, shape (..., B).

    A loss is 0 if the class y is unknown or is the only known class, because there is then nothing
    to contrast.

    Args:
        scores_BC: (..., B, C) the scores s.
        y_B: labels.
        known_C: which classes have a prototype; the sum runs over these classes only.
        denominator: "all" to sum over all known classes, or "others" to leave out y.
    """
    label = y_B.expand(scores_BC.shape[:-1])[..., None]
    left_out = ~known_C
    if denominator == "others":
        left_out = left_out.expand(scores_BC.shape).scatter(-1, label, True)
    own_score = scores_BC.gather(-1, label).squeeze(-1)
    losses = scores_BC.masked_fill(left_out, -torch.inf).logsumexp(-1) - own_score
    return losses.where(known_C[y_B] & (known_C.sum() > 1), 0)


def losses(
    z_Bd: Tensor,
    y_B: Tensor,
    mean_Cd: Tensor,
    clients_KCd: Tensor,
    known_C: Tensor,
    tau: float,
    denominator: str,
) -> Tensor:
    """Return the loss of each sample, shape (B,).

    It is the contrast with the global prototypes, plus the contrast with a client's prototypes,
    averaged over the clients.

    Args:
        z_Bd: features of length 1.
        y_B: labels.
        mean_Cd: the global prototypes.
        clients_KCd: the clients' prototypes.
        known_C: which classes have a prototype.
        tau: the temperature.
        denominator: see `contrast`.
    """
    global_B = contrast(z_Bd @ mean_Cd.T / tau, y_B, known_C, denominator)
    scores_KBC = torch.einsum("bd,kcd->kbc", z_Bd, clients_KCd) / tau
    return global_B + contrast(scores_KBC, y_B, known_C, denominator).mean(0)


def cosines(z_Bd: Tensor, mean_Cd: Tensor, known_C: Tensor) -> Tensor:
    """Return the cosine of each sample with each prototype, (B, C), -inf for unknown classes."""
    return (normalize(z_Bd) @ normalize(mean_Cd).T).masked_fill(~known_C, -torch.inf)


# ---- prototypes of a run, also for FedProto
class PrototypeClassifier(nn.Module):
    """Scores each class by the closeness of the features to its prototype.

    Args:
        model: a model with features(x).
        prototypes: "mean" (C, d), and "has" (C,), which classes have a prototype.
        closeness: (z (B, d), mean, has) -> (B, C); lowest for classes without a prototype.
    """

    def __init__(
        self, model: nn.Module, prototypes: AnyTree, closeness: Closeness = cosines
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
    def around(cls, model: nn.Module, closeness: Closeness = cosines) -> PrototypeClassifier:
        """Return a classifier without prototypes; `fedhet.load` puts them into it."""
        mean = torch.zeros_like(model.head.weight)  # type: ignore[union-attr, arg-type]
        return cls(model, {"mean": mean, "has": torch.zeros(len(mean)) > 0}, closeness)


def class_means(
    ctx: ClientContext, params: AnyTree, unit: Callable[[Tensor], Tensor] = lambda z: z
) -> tuple[Tensor, Tensor]:
    """Return the mean features of each class of the client's real training samples, in eval mode.

    Args:
        ctx: the client's context.
        params: the tensors of a model with features(x).
        unit: a function that changes the features (B, d) before the means are taken.

    Returns:
        As `prototypes`.
    """
    data = ctx.own
    z = torch.cat([unit(z) for z in ctx.outputs(params, data.x, "features")])
    return prototypes(z, data.y, ctx.workspace.task.classes)


def no_prototypes(workspace: Workspace) -> Tree:
    """Return the initial slot: "mean" (C, d) and "has" (C,), without a prototype of any class."""
    weight = workspace.initial["head.weight"]
    mean = weight.new_zeros(workspace.task.classes, weight.shape[1])
    return {"mean": mean, "has": mean.new_zeros(len(mean), dtype=torch.bool)}


def renewed(before: AnyTree, mean_Cd: Tensor, present_C: Tensor) -> Tree:
    """Return the slot with new means for the classes that are present; the rest is unchanged."""
    mean = torch.where(present_C[:, None], mean_Cd, before["mean"]).to(before["mean"].dtype)
    return {"mean": mean, "has": before["has"] | present_C}


# ---- the method
def check_norms(sent: Tree, update: messages.Upload) -> None:
    """Refuse prototypes that cannot be means of unit vectors.

    Raises:
        ValueError: a prototype is longer than 1, up to rounding.
    """
    longest = float(sent["mean"].norm(dim=1).max())
    if longest > 1 + ROUNDING:
        raise ValueError(
            f"extra 'fedpcl.prototypes' has a prototype of norm {longest:.4g}; a mean of unit"
            " vectors has a norm of at most 1"
        )


def renormalised(sent: Tree, update: messages.Upload) -> Tree:
    """Return the prototypes, scaled to length 1."""
    return {**sent, "mean": normalize(sent["mean"])}


class FedPCLClient(Client):
    """Keeps its model, and sends prototypes; under privacy.noise a prototype of every class."""

    @serves
    def collect(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        """Send the prototypes of the initial model (the phase `collect`)."""
        own = self._prototypes(msg.weights, ctx)
        return Result({}, self._sent(own, ctx)), {"own": own}

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        contrasts = Term("loss", self._contrasts, msg["prototypes"])
        params = ctx.fit(msg.weights, loss=contrasts).params
        own = self._prototypes(params, ctx)
        return Result(params, self._sent(own, ctx)), {"own": own}

    def _contrasts(self, params: AnyTree, batch: Batch, own: AnyTree) -> Tensor:
        z, o = normalize(batch.z), self.options
        return losses(z, batch.y, own["mean"], own["clients"], own["has"], o.tau, o.denominator)

    def _prototypes(self, params: AnyTree, ctx: ClientContext) -> Tree:
        """Return the mean z of each class, and which classes the client has."""
        mean, has = class_means(ctx, params, normalize)
        if self.options.renormalise:
            mean = normalize(mean)
        return {"mean": mean.to(ctx.workspace.initial["head.weight"].dtype), "has": has}

    def _sent(self, own: Tree, ctx: ClientContext) -> Extras:
        """Return the prototypes that the client may send, of classes with enough samples."""
        workspace = ctx.workspace
        counts = ctx.own.y.bincount(minlength=workspace.task.classes)
        sent = own["has"] & (counts >= workspace.min_count)
        mean = own["mean"].where(sent[:, None], 0)
        return {"prototypes": {"mean": mean, "has": sent | bool(workspace.noise)}}

    def views(
        self, msg: Message, state: State, ctx: ClientContext
    ) -> dict[str, Callable[[], nn.Module]]:
        return {"personal": lambda: self._classifier(msg, state, ctx)}

    def _classifier(self, msg: Message, state: State, ctx: ClientContext) -> nn.Module:
        """Return the personal model, which has this client's features and prototypes.

        If the message has prototypes, they serve for the classes that the client lacks.
        """
        own = state.get("own") or self._prototypes(msg.weights, ctx)  # if `collect` failed
        if "prototypes" in msg:
            own = renewed(msg["prototypes"], own["mean"], own["has"])
        return PrototypeClassifier(ctx.model(msg.weights), own)

    @classmethod
    def personal_module(cls, model: nn.Module) -> nn.Module:
        return PrototypeClassifier.around(model)


@dataclass(frozen=True, kw_only=True)
class FedPCL(Method):
    """Averages prototypes instead of weights.

    The server's state is "clients" (K', C, d): the clients' prototypes of the last step, with
    missing classes filled from C.
    """

    name = "fedpcl"
    client = FedPCLClient
    breaks = {
        "used weights": "it takes the plain mean of the prototypes",
        "means": "prototypes",
        "weights alone": "prototypes",
    }

    tau: float = setting(0.07, open_low=0)
    clip: float | None = setting(10.0, open_low=0)
    denominator: str = setting("all", allowed=("all", "others"))
    renormalise: bool = False
    unseen: str = setting("exclude", allowed=("exclude", "global"))

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        return Scope(
            trained=lambda name: not name.startswith("head."),
            shared=lambda name: False,
            why="method=fedpcl trains only the layers before the head",
        )

    def evaluates(self, workspace: Workspace) -> dict[str, None]:
        return {"personal": None}

    def local(self, local: LocalSettings) -> LocalSettings:
        return replace(local, clip=self.clip) if local.clip is None else local

    def setup(self, setup: RunSetup) -> State:
        require_feature_head(
            setup.workspace,
            "method=fedpcl",
            "compares the features that a model's last layer reads, by class",
        )
        return {}

    def slots(self, setup: RunSetup) -> dict[str, Tree]:
        return {SLOT: no_prototypes(setup.workspace)}

    def phases(self, setup: RunSetup) -> list[Phase]:
        collect = Phase("collect", 1, self.merge, cohort=1.0, uploads=False)
        return [collect, *super().phases(setup)]

    def broadcast(self, step: Step, state: State) -> Extras:
        if not step.trains:
            return {}
        return {"prototypes": {**step.slots[SLOT], "clients": state["clients"]}}

    def evaluation_extras(self, slots: Mapping[str, Tree], state: State) -> Extras:
        return {"prototypes": slots[SLOT]} if self.unseen == "global" else {}

    def expects(self, step: Step) -> dict[str, Expected]:
        return {
            "prototypes": Expected(
                like=no_prototypes(step.workspace),
                check=None if step.workspace.noise else check_norms,
                public=("has",),
                repair=renormalised if self.renormalise else None,
            )
        }

    def weight(self, step: Step, update: Update) -> float:
        return 1.0

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        """Renew the prototypes, in both phases; the model slot keeps its value."""
        sets = [update["prototypes"] for update in updates]
        means, has = (torch.stack([own[name] for own in sets]) for name in ("mean", "has"))
        mean, present = pooled(means, has)
        if self.renormalise:
            mean = normalize(mean)
        new = renewed(step.slots[SLOT], mean, present)
        unknown = (~new["has"]).nonzero().flatten().tolist()
        if unknown and step.phase == "collect":
            log.warning(
                "fedpcl: no client has sent a prototype of the classes %s (privacy.min_count=%d);"
                " clients do not train on samples of these classes until a client sends one",
                unknown,
                step.workspace.min_count,
            )
        filled = torch.where(has[..., None], means, new["mean"])
        return Merged({}, {"clients": filled}, slots={SLOT: new})
