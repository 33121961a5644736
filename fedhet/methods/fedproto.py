"""FedProto: global class prototypes pull the features of each client's model (Tan et al. 2022).

The paper is "FedProto: federated prototype learning across heterogeneous clients". Clients exchange
prototypes, and no weights. The prototype of a class is the mean of the features f(x), which are the
input of the last layer.

    client:     mean_i CE(model(x_i), y_i) + lam sum_c |C_B^c - C^c|                  (eq. 7, 8)
                C_B^c = mean of f(x) over the samples of class c in the batch
                C_k^c = mean of f(x) over all training samples of class c, after training   (eq. 3)
    server:     C^c = sum_k n_k^c C_k^c / sum_k n_k^c                                  (eq. 6)
    prediction: argmin_c |f(x) - C^c|                                                  (eq. 4)

    down:          `fedproto.prototypes` (C)
    up:            `fedproto.prototypes` (C_k), `fedproto.counts` (n_k^c)
    client keeps:  its whole model
    server keeps:  C (slot `prototypes`)

No weights travel and no model is shared. The model slot keeps its initial value, from which every
client starts. Only personal models are evaluated; they predict by the server's prototypes. The sum
over c in the loss covers the classes that have a prototype. In the first round no class has one, so
every client trains alone. If no participant has class c, C^c stays unchanged.

Privacy: each client sends its label counts to the server. A client leaves out classes with fewer
than `privacy.min_count` samples, as in FedGen. The paper has no such limit (`privacy.min_count=0`).

Deviations and choices:

- Eq. 6 also divides the weighted mean by the number of clients that have the class. Prototypes on
  which all clients agree would then shrink. This method omits that factor, because the paper's text
  calls the result an average. The authors' code takes the plain mean over the clients.
- The distance is the L2 distance of the paper. The authors' code takes the mean of the squared
  differences, sample by sample.
- The paper does not say which prototypes predict. Here the global prototypes predict, so a client
  can also predict classes that it has no samples of. The last layer is trained, and predicts
  nothing.

Default: `lam = 0.1`. The paper has 1, but its code has another distance (above). With the L2
distance and lam = 1 all features and prototypes become 0 on the digits (docs/methods/fedproto.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedhet.core.authors import (
    AnyTree,
    Batch,
    Client,
    ClientContext,
    Expected,
    Extras,
    Merged,
    Message,
    Method,
    Result,
    RunSetup,
    Scope,
    State,
    Step,
    Term,
    Tree,
    Update,
    Workspace,
    serves,
    setting,
)
from fedhet.core.counts import suppressed
from fedhet.methods.fedpcl import (
    SLOT,
    PrototypeClassifier,
    class_means,
    no_prototypes,
    pooled,
    renewed,
)
from fedhet.models.base import require_feature_head


# Suffixes of names give shapes: B samples, C classes, d features.
def distances(z_Bd: Tensor, y_B: Tensor, mean_Cd: Tensor, known_C: Tensor) -> Tensor:
    """Return the sum over classes of |mean of z over the class - prototype|, a scalar.

    Args:
        z_Bd: features.
        y_B: labels.
        mean_Cd: the global prototypes.
        known_C: which classes have a prototype; the sum runs over these classes, if y has them.
    """
    of_BC = (y_B[:, None] == torch.arange(len(known_C), device=y_B.device)).to(z_Bd.dtype)
    counts = of_BC.sum(0)
    means = of_BC.T @ z_Bd / counts.clamp(min=1)[:, None]
    counted = known_C & (counts > 0)
    return (means - mean_Cd).where(counted[:, None], 0).norm(dim=1).sum()


def nearness(z_Bd: Tensor, mean_Cd: Tensor, known_C: Tensor) -> Tensor:
    """Return 2 z.C_c - |C_c|^2, shape (B, C).

    This is -|z - C_c|^2 plus |z|^2, which is the same for all classes, so the nearest class has the
    largest score. The score of an unknown class is lower than the score of any known class, by at
    least 1. It is not -inf: a sample of such a class would then have an infinite loss, and fedhet
    would take the model for diverged.
    """
    scores = 2 * z_Bd @ mean_Cd.T - mean_Cd.square().sum(1)
    least = scores.masked_fill(~known_C, torch.inf).amin(1, keepdim=True).clamp(max=0)
    return torch.where(known_C, scores, least - 1)


class FedProtoClient(Client):
    """Keeps its model, and sends prototypes and counts."""

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        return [Term("penalty", self._pull, msg["prototypes"])]

    def _pull(self, params: AnyTree, batch: Batch, own: AnyTree) -> Tensor:
        return self.options.lam * distances(batch.z, batch.y, own["mean"], own["has"])  # type: ignore[no-any-return]

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        params = ctx.fit(msg.weights, self.terms(msg, state, ctx)).params
        workspace = ctx.workspace
        counts = ctx.own.y.bincount(minlength=workspace.task.classes)
        counts = suppressed(counts, workspace.min_count)
        mean = class_means(ctx, params)[0].to(workspace.initial["head.weight"].dtype)
        sent = {"mean": mean.where(counts[:, None] > 0, 0)}
        return Result(params, {"prototypes": sent, "counts": counts}), state

    def views(
        self, msg: Message, state: State, ctx: ClientContext
    ) -> dict[str, Callable[[], nn.Module]]:
        return {
            "personal": lambda: PrototypeClassifier(
                ctx.model(msg.weights), msg["prototypes"], nearness
            )
        }

    @classmethod
    def personal_module(cls, model: nn.Module) -> nn.Module:
        return PrototypeClassifier.around(model, nearness)


@dataclass(frozen=True, kw_only=True)
class FedProto(Method):
    """Averages prototypes instead of weights."""

    name = "fedproto"
    client = FedProtoClient
    breaks = {
        "used weights": "it weights the prototypes by the counts",
        "means": "prototypes",
        "weights alone": "prototypes",
        "noise": "its clients send exact label counts",
    }

    lam: float = setting(0.1, low=0)

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        return Scope(shared=lambda name: False)

    def evaluates(self, workspace: Workspace) -> dict[str, None]:
        return {"personal": None}

    def setup(self, setup: RunSetup) -> State:
        require_feature_head(
            setup.workspace,
            "method=fedproto",
            "compares the features that a model's last layer reads, by class",
        )
        return {}

    def slots(self, setup: RunSetup) -> dict[str, Tree]:
        return {SLOT: no_prototypes(setup.workspace)}

    def broadcast(self, step: Step, state: State) -> Extras:
        return {"prototypes": step.slots[SLOT]}

    def evaluation_extras(self, slots: Mapping[str, Tree], state: State) -> Extras:
        return {"prototypes": slots[SLOT]}

    def expects(self, step: Step) -> dict[str, Expected]:
        classes, least = step.workspace.task.classes, step.workspace.min_count
        return {
            "prototypes": Expected(like={"mean": no_prototypes(step.workspace)["mean"]}),
            "counts": Expected(
                shape=(classes,),
                whole=True,
                check=lambda _, u: u.counts("fedproto.counts", u.num_examples, classes, least),
            ),
        }

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        """Renew the prototypes; the model slot keeps its value."""
        sent = [(update["prototypes"]["mean"], update["counts"]) for update in updates]
        means, counts = map(torch.stack, zip(*sent, strict=True))
        return Merged({}, state, slots={SLOT: renewed(step.slots[SLOT], *pooled(means, counts))})
