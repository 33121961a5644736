"""FedLEx: local training masked by an exploration of the loss (Internò et al. 2024).

Internò, Olhofer, Jin and Hammer, "Federated loss exploration for improved convergence on non-IID
data". A plug-in for any host, which aggregates as it always does.

    D_i = (W_0 - W_i)^2                                       (eq. 3)
    G   = mean_i (D_i - min D_i) / (max D_i - min D_i)        (eq. 4)
    W  <- W - lr (G grad)                                     (eq. 6)

W_i are the weights of explorer i after e_exp epochs from the common W_0. Minima and maxima are
taken over the entries of each tensor of D_i. Every local step of the training is masked.

    explore  down: W_0                       up: `fedlex.D` (float32)
    train    down: x, `fedlex.G`             up: what the host sends

    client keeps: nothing
    server keeps: every D_i, and G

In the first round G is that of all explorers, later that of the explorers in the round's cohort. It
stays as it is where the cohort has none (algorithm 2). The mask is the last factor on the gradient
of the whole local loss, proximal terms included. Clipping, weight decay, which is not masked, and
momentum follow.

Deviations and choices:
- Equation 4 does not say over which entries minimum and maximum are taken: each tensor (`scope`).
- Nor does it say over which explorers: the paper writes min(G_local) for every i, without an
  index. They are taken over explorer i's own D_i, so that each explorer counts alike, however far
  it has moved; `minmax=all` takes them over the D of all explorers that determine G.
- Equation 4 normalises, then averages; the authors' program does it in reverse (`order`).
- A constant D, for which equation 4 is 0/0, counts as G = 1, which is the host's step.
- Where the text says that G is computed "with equation 5", it means equation 4.
- Exploration is the host's own local training, with a fresh optimiser and without other plug-ins,
  and with its learning rate, of which the paper names one (`lr_exp`). The explorer's copy and its
  buffers are discarded.

Equation 6 is taken literally. The median of G is 1e-3 to 1e-1, so it divides the host's steps by
ten to a thousand and hardly trains at the host's learning rate. `rescale=mean1` preserves the mean
step of each tensor, and `rescale=sum` sums over the explorers where equation 4 takes their mean.

Defaults: c_exp 20 and e_exp 150 are the paper's. There is no early stopping of the exploration; the
authors' program has a patience of 40.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor, nn

from fedhet.core import check, trees
from fedhet.core.check import setting
from fedhet.core.errors import ConfigError
from fedhet.core.messages import Broadcast, Recorded, Update
from fedhet.core.optimizers import Optimizer
from fedhet.core.phases import Phase
from fedhet.core.plugin import Plugin
from fedhet.core.trees import Prepared, Tree
from fedhet.maths import fedlex as maths
from fedhet.methods.fedavg import FedAvg

log = logging.getLogger("fedhet")

D = "fedlex.D"
G = "fedlex.G"


class MaskedStep:
    """An optimiser whose steps are masked, weight decay included (apply_to=update)."""

    def __init__(self, inner: Optimizer, params: list[Tensor], masks: list[Tensor]) -> None:
        self._inner = inner
        self._params = params
        self._masks = masks

    def step(self, grads: list[Tensor]) -> None:
        before = [p.detach().clone() for p in self._params]
        self._inner.step(grads)
        maths.mask_step(self._params, before, self._masks)


@dataclass(kw_only=True, eq=False)
class FedLExPlugin(Plugin):
    """The phase `explore`, then the mask G on the trained parameters that clients share."""

    name = "fedlex"
    needs_model = True
    changes_optimizer = False  # every step is scaled by a mask, which all clients share
    memory = ("_deviations", "_used", "_guidance", "_statistics")
    releases = {"explore": 1}

    c_exp: int | float = 20
    e_exp: int = setting(150, low=1)
    lr_exp: float | None = setting(None, open_low=0)
    patience: int | None = setting(None, low=1)
    scope: str = setting("tensor", allowed=maths.SCOPES)
    order: str = setting("normalise_then_mean", allowed=maths.ORDERS)
    minmax: str = setting("explorer", allowed=maths.MINMAX)
    empty: str = setting("previous", allowed=maths.EMPTY)
    refresh: str = setting("participants", allowed=maths.REFRESH)
    apply_to: str = setting("gradient", allowed=("gradient", "update"))
    rescale: str = setting("none", allowed=("none", "mean1", "sum"))
    g_min: float = setting(0.0, low=0, open_high=1)

    def __post_init__(self) -> None:
        self.c_exp = _count_or_share("plugin.fedlex.c_exp", self.c_exp)
        super().__post_init__()

    @property
    def needs_steps(self) -> bool:
        return self.apply_to == "update"

    # ---- phase "explore"
    def setup(self) -> None:
        workspace = self.server.workspace
        self._expected = {  # the names, shapes and dtype of a D
            name: torch.empty(workspace.initial[name].shape, dtype=torch.float32, device="meta")
            for name in workspace.mergeable
        }
        self._explorers = self._count_explorers()
        self._deviations: dict[int, Tree] = {}  # by explorer, largest client first
        self._used: list[int] = []  # the explorers whose D make up G
        self._guidance: Tree = {}
        self._statistics: Recorded = {}  # of G

    def _count_explorers(self) -> int:
        """How many clients explore; a share is rounded up, and is at least one client."""
        if isinstance(self.c_exp, int):
            return self.c_exp
        available = sum(n > 0 for n in self.server.sizes)
        # As floats, 0.1 of 30 clients is slightly above 3; without `round` it would become 4.
        return max(1, math.ceil(round(self.c_exp * available, 9)))

    def phases(self) -> list[Phase]:
        explore = Phase(
            "explore",
            1,
            self._keep_deviations,
            check=self._check_deviation,
            cohort=self._explorers,
            uploads=False,
        )
        return [explore]

    def explore(self, msg: Broadcast) -> Update:
        """Train a copy of the model, send how far each parameter has moved, discard the copy."""
        client = self.client
        workspace = client.workspace
        if self.lr_exp is not None:
            client.local = replace(client.local, lr=self.lr_exp)
        model = workspace.load(client.start(msg))
        client.train_model(
            model, client.data, epochs=self.e_exp, patience=self.patience, hooks=False
        )
        start = trees.pick(msg.weights, workspace.mergeable)
        deviation = maths.deviation(start, workspace.read(workspace.mergeable), torch.float32)
        return Update(client.pid, client.num_examples, extras={D: deviation})

    def released(self, update: Update) -> None:
        if D in update.extras:  # deviations are >= 0
            update.extras[D] = trees.map(lambda t: t.clamp(min=0), update.tree(D))

    def _check_deviation(self, update: Update) -> None:
        if bad := trees.first_negative(update.tree(D, self._expected)):
            raise ValueError(
                f"extra {D!r}, tensor {bad!r}: holds negative values; deviations are >= 0"
            )

    def _keep_deviations(self, updates: Iterator[Update], old: Tree) -> Tree:
        """The merge of `explore`: the model stays as it is."""
        self._deviations = {
            update.pid: trees.pick(update.tree(D), self._expected) for update in updates
        }
        return {}

    # ---- training, server
    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        if not msg.trains:
            self._warn(msg.local.optimizer, len(cohort))
            return
        used = maths.contributors(
            list(self._deviations),
            cohort,
            first=not self._used,
            refresh=self.refresh,
            empty=self.empty,
        )
        if used is not None and used != self._used:
            self._used = used
            self._update_guidance()
        msg.extras[G] = self._guidance
        explorers = sum(pid in self._deviations for pid in cohort) / len(cohort)
        self.recorded = {**self._statistics, "explorers": explorers}

    def _warn(self, optimizer: str, explorers: int) -> None:
        if explorers < self._explorers:
            log.warning(
                "plugin.fedlex.c_exp=%s, but only %s with data: all of them explore",
                self.c_exp,
                check.counted(explorers, "client"),
            )
        if optimizer != "sgd" and self.apply_to == "gradient":
            log.warning(
                "client.optimizer=%s cancels a constant factor on a parameter's gradients, so"
                " FedLEx's mask is nearly inactive; use client=sgd, or"
                " plugin.fedlex.apply_to=update",
                optimizer,
            )

    def _update_guidance(self) -> None:
        """Compute G from the deviations of the explorers in use, and its statistics."""
        deviations = [self._deviations[pid] for pid in self._used]
        guidance = maths.global_guidance(
            deviations, scope=self.scope, order=self.order, minmax=self.minmax
        )
        explorers = len(deviations)
        guidance = maths.adjusted(guidance, self.rescale, self.g_min, explorers=explorers)
        self._guidance = trees.map(Tensor.float, guidance)
        tensors = list(self._guidance.values())
        self._statistics = {
            "median": float(torch.cat([g.flatten() for g in tensors]).median()),
            "medians": torch.stack([g.median() for g in tensors]),
            "means": torch.stack([g.mean() for g in tensors]),
            "pids": torch.tensor(self._used),
        }

    # ---- training, client
    def prepare(self, msg: Broadcast) -> Tree | None:
        if not msg.trains:
            return None
        like = self.client.workspace.initial
        return {name: g.to(like[name].device, like[name].dtype) for name, g in msg.tree(G).items()}

    def scale(self, grads: Tree, own: Prepared) -> None:
        if self.apply_to == "gradient":
            maths.mask_gradient(*trees.columns(own, grads, own))

    def optimizer(
        self, inner: Optimizer, params: dict[str, nn.Parameter], own: Prepared
    ) -> Optimizer:
        if self.apply_to == "gradient":
            return inner
        return MaskedStep(inner, *trees.columns(own, params, own))


def _count_or_share(name: str, value: float) -> float:
    """Check a count, which becomes an int, or a share, which becomes a float."""
    try:
        if isinstance(value, Integral):
            return check.integer(name, value, low=1)
        return check.number(name, value, open_low=0, high=1)
    except ConfigError as error:
        raise ConfigError(
            f"{error}: a whole number counts explorers, a fraction in (0, 1] is their share of the"
            " clients"
        ) from error


@dataclass(frozen=True, kw_only=True)
class FedLEx(FedAvg):
    """FedAvg with the plug-in `fedlex`."""

    name = "fedlex"
    requires = FedLExPlugin
