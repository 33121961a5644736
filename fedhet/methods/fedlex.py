"""FedLEx (Internò et al. 2024, "Federated loss exploration for improved convergence on non-IID
data"): masked local training.

    D_i = (W_0 - W_i)^2, W_i after e_exp epochs of explorer i from the common W_0 (eq. 3)
    G = mean_i (D_i - min D_i)/(max D_i - min D_i), min and max over the entries of a tensor (eq. 4)
    W <- W - lr (grad G) in every local step (eq. 6); the host aggregates

    explore  down: W_0            up: `fedlex.D` (float32)   client keeps: nothing   server keeps:
    every D_i train    down: x, `fedlex.G`  up: what the host sends    client keeps: nothing
    server keeps: G

In the first round G is that of all explorers, then of the explorers in the round's cohort; without
one it stays (algorithm 2). Where the text says "with equation 5" it means equation 4. The mask is
the last thing that multiplies the gradient of the whole local loss, a proximal term included;
clipping, weight decay (not masked) and momentum follow.

Rulings: eq. 4 does not say over what it takes min and max (`scope`); a constant D, where it is 0/0,
gives G = 1, the host's step; eq. 4's order is normalise, then mean (the authors' program does it
the other way round, `order`). Exploration is the host's own local training with a fresh optimiser
and no other plug-in; its copy and buffers are discarded. G has a median of 1e-3 to 1e-1, so it
divides the host's step by ten to a thousand: the paper's equation, literally, hardly trains at the
host's learning rate. `rescale=mean1` keeps each tensor's mean step. Defaults: c_exp and e_exp are
the paper's; patience (the authors' program: 40) is off."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from numbers import Integral

import torch
from torch import Tensor

from fedhet import check, trees
from fedhet.client import FedClient
from fedhet.errors import ConfigError
from fedhet.maths import fedlex as maths
from fedhet.messages import Broadcast, Update
from fedhet.optimizers import Optimizer
from fedhet.phases import Phase
from fedhet.plugin import Plugin, Report
from fedhet.site import Site
from fedhet.strategy import FedStrategy
from fedhet.trees import Tree

log = logging.getLogger("fedhet")
D, G = "fedlex.D", "fedlex.G"


def guided(site: Site) -> list[str]:
    """The names that have a D and a G: trained and shared."""
    return [name for name in site.trained if name in site.shared]


class MaskedStep:
    """apply_to=update: the mask multiplies what the optimiser does with the gradient, weight decay
    included."""

    def __init__(self, inner: Optimizer, params: list[Tensor], masks: list[Tensor]) -> None:
        self._inner, self._params, self._masks = inner, params, masks

    def step(self, grads: list[Tensor]) -> None:
        before = [p.detach().clone() for p in self._params]
        self._inner.step(grads)
        maths.mask_step(self._params, before, self._masks)


class FedLExPlugin(Plugin):
    """The exploration, G, and the mask, over trained parameters that the server knows."""

    name = "fedlex"

    def __init__(
        self,
        *,
        c_exp: float = 20,
        e_exp: int = 150,
        patience: int | None = None,
        scope: str = "tensor",
        order: str = "normalise_then_mean",
        empty: str = "previous",
        refresh: str = "participants",
        apply_to: str = "gradient",
        rescale: str = "none",
        g_min: float = 0.0,
    ) -> None:
        self.c_exp = _count_or_share("plugin.fedlex.c_exp", c_exp)
        self.e_exp = check.integer("plugin.fedlex.e_exp", e_exp, low=1)
        self.patience = check.optional(check.integer, "plugin.fedlex.patience", patience, low=1)
        self.scope = check.one_of("plugin.fedlex.scope", scope, maths.SCOPES)
        self.order = check.one_of("plugin.fedlex.order", order, maths.ORDERS)
        self.empty = check.one_of("plugin.fedlex.empty", empty, maths.EMPTY)
        self.refresh = check.one_of("plugin.fedlex.refresh", refresh, maths.REFRESH)
        self.apply_to = check.one_of("plugin.fedlex.apply_to", apply_to, ("gradient", "update"))
        self.rescale = check.one_of("plugin.fedlex.rescale", rescale, ("none", "mean1"))
        self.g_min = check.number("plugin.fedlex.g_min", g_min, low=0, open_high=1)
        super().__init__(
            c_exp=self.c_exp,
            e_exp=self.e_exp,
            patience=self.patience,
            scope=self.scope,
            order=self.order,
            empty=self.empty,
            refresh=self.refresh,
            apply_to=self.apply_to,
            rescale=self.rescale,
            g_min=self.g_min,
        )
        self._deviations: dict[int, Tree] = {}  # by explorer, largest client first
        self._used: list[int] = []  # whose D make up G
        self._guidance: Tree = {}
        self._statistics: Report = {}  # of G

    @property
    def refuses(self) -> dict[str, str]:
        if self.apply_to == "gradient":
            return {}
        return {
            "fedsgd": (
                "it takes no local step that plugin.fedlex.apply_to=update could mask; use"
                " apply_to=gradient"
            )
        }

    # ---- client
    def explore(self, msg: Broadcast) -> Update:
        """The phase `explore`: train a copy, send how far each parameter has moved, discard the
        copy."""
        client = self.client
        model = client.site.load(client.start(msg))
        steps = client.train_model(
            model, client.data, epochs=self.e_exp, patience=self.patience, hooks=False
        )
        names = guided(client.site)
        start = trees.pick(msg.weights, names)
        found = maths.deviation(start, client.site.read(names), torch.float32)
        return Update(
            client.pid,
            client.num_examples,
            extras={D: found},
            metrics={"fedlex.steps": float(steps)},
        )

    def prepare(self, msg: Broadcast) -> None:
        if not msg.trains:
            return
        guidance = msg.tree(G)
        site = self.client.site
        self._positions = [site.trained.index(name) for name in guidance]
        self._masks = [
            g.to(site.device, site.parameters[i].dtype)
            for i, g in zip(self._positions, guidance.values(), strict=True)
        ]

    def scale(self, grads: list[Tensor]) -> None:
        if self.apply_to == "gradient":
            maths.mask_gradient([grads[i] for i in self._positions], self._masks)

    def optimizer(self, inner: Optimizer, params: list[Tensor]) -> Optimizer:
        return (
            inner
            if self.apply_to == "gradient"
            else MaskedStep(inner, [params[i] for i in self._positions], self._masks)
        )

    # ---- server
    def setup(self) -> None:
        site = self.server.site
        self._like = {
            name: torch.empty(site.initial[name].shape, dtype=torch.float32, device="meta")
            for name in guided(site)
        }
        available = sum(n > 0 for n in self.server.sizes)
        # Rounded up, as the phase's own rule is to round; 0.1 of 30 is 3, not 4, and the least
        # share is 1.
        self._wanted = (
            self.c_exp
            if isinstance(self.c_exp, int)
            else max(1, math.ceil(round(self.c_exp * available, 9)))
        )

    def phases(self) -> list[Phase]:
        return [
            Phase(
                "explore",
                1,
                self._keep,
                check=self._check_explore,
                cohort=self._wanted,
                uploads=False,
            )
        ]

    def _keep(self, updates: Iterator[Update], old: Tree) -> Tree:
        """The merge of `explore`: the model stays as it is."""
        self._deviations = {
            update.pid: trees.pick(update.tree(D, self._like), self._like) for update in updates
        }
        return {}

    def _check_explore(self, update: Update) -> None:
        if bad := maths.first_negative(update.tree(D, self._like)):
            raise ValueError(
                f"extra {D!r}, tensor {bad!r}: holds negative values; deviations are >= 0"
            )

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
            self._used, self._guidance = used, self._aggregated(used)
        msg.extras[G] = self._guidance
        explorers = sum(pid in self._deviations for pid in cohort) / len(cohort)
        self.report = {**self._statistics, "explorers": explorers}

    def _aggregated(self, used: list[int]) -> Tree:
        found = maths.global_guidance(
            [self._deviations[pid] for pid in used], scope=self.scope, order=self.order
        )
        guidance = trees.map(Tensor.float, maths.adjusted(found, self.rescale, self.g_min))
        self._statistics = {
            "median": float(torch.cat([g.flatten() for g in guidance.values()]).median()),
            "medians": torch.stack([g.median() for g in guidance.values()]),
            "means": torch.stack([g.mean() for g in guidance.values()]),
            "pids": torch.tensor(used),
        }
        return guidance

    def _warn(self, optimizer: str, explorers: int) -> None:
        if explorers < self._wanted:
            log.warning(
                "plugin.fedlex.c_exp=%s, but only %d clients have data: all of them explore",
                self.c_exp,
                explorers,
            )
        if optimizer != "sgd" and self.apply_to == "gradient":
            log.warning(
                "client.optimizer=%s cancels a constant factor per parameter, so FedLEx's mask is"
                " nearly inactive; use client=sgd, or plugin.fedlex.apply_to=update",
                optimizer,
            )


def _count_or_share(name: str, value: float) -> float:
    """A count as int, a share as float."""
    try:
        return (
            check.integer(name, value, low=1)
            if isinstance(value, Integral)
            else check.number(name, value, open_low=0, high=1)
        )
    except ConfigError as error:
        raise ConfigError(
            f"{error}: a whole number counts explorers, a fraction in (0, 1] is their share of the"
            " clients"
        ) from error


class FedLExClient(FedClient):
    """Plain FedAvg training; the plug-in explores and masks."""


class FedLEx(FedStrategy):
    """FedAvg with the plug-in above (conf/method/fedlex.yaml lists it)."""

    name = "fedlex"
    client_cls = FedLExClient
    requires = "fedlex"
