"""FedLEx: local training masked by an exploration of the loss (Internò et al. 2024).

Internò, Olhofer, Jin and Hammer, "Federated loss exploration for improved convergence on non-IID
data". Before the training some clients, the explorers, train a copy of the model and report how far
each parameter moved. The server turns the reports into a mask G, which multiplies the gradients of
all clients. FedLEx is a plug-in for any base method, and does not change how the method aggregates.

    D_i = (W_0 - W_i)^2                                       (eq. 3)
    G   = mean_i (D_i - min D_i) / (max D_i - min D_i)        (eq. 4)
    W  <- W - lr (G grad)                                     (eq. 6)

W_i are the weights of explorer i after e_exp epochs from the common W_0. Minimum and maximum are
taken over the entries of each tensor of D_i. The mask applies to every local step of the training.

    explore  down: W_0                       up: `fedlex.D` (float32)
    train    down: x, `fedlex.G`             up: what the base method sends

    client keeps: nothing
    server keeps: every D_i, and G

In the first round the server computes G from all explorers, and later from the explorers in the
round's cohort. If the cohort has no explorer, G stays unchanged (algorithm 2). The mask multiplies
the gradient of the whole local loss, proximal terms included. Clipping, weight decay and momentum
follow; the mask does not apply to the weight decay.

Deviations and choices:
- Equation 4 does not say over which entries it takes minimum and maximum. Here they are taken over
  each tensor (`scope`).
- Nor does it say over which explorers: the paper writes min(G_local) for every i, without an
  index. Here they are taken over explorer i's own D_i, so that all explorers have equal influence,
  however far they moved. `minmax=all` takes them over the D of all explorers that determine G.
- Equation 4 normalises, then averages. The authors' program averages, then normalises (`order`).
- If D is constant, equation 4 is 0/0. Then G = 1, which leaves the base method's step unchanged.
- The paper's text says that G is computed "with equation 5", but means equation 4.
- The exploration is plain local training with the run's client settings and a fresh optimiser,
  without plug-ins and without the terms of the base method. By default it has the learning rate of
  the training, because the paper names only one rate (`lr_exp`). The explorer discards its copy of
  the model, buffers included.

Equation 6 is taken literally. The median of G is 1e-3 to 1e-1, so G divides the steps of the base
method by ten to a thousand. Clients then hardly train at the base method's learning rate.
`rescale=mean1` preserves the mean step of each tensor. `rescale=sum` takes the sum over the
explorers instead of the mean of equation 4.

Defaults: c_exp 20 and e_exp 150 are the paper's. There is no early stopping of the exploration; the
authors' program has a patience of 40.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhet.core import check
from fedhet.core.authors import (
    AnyTree,
    ClientContext,
    Expected,
    Extras,
    Merged,
    Message,
    Phase,
    Plugin,
    Recorded,
    Result,
    RunSetup,
    State,
    Step,
    Term,
    Tree,
    Update,
    as_given,
    log,
    serves,
    setting,
    trees,
)
from fedhet.methods.fedavg import FedAvg


def deviation(initial: AnyTree, final: AnyTree, dtype: torch.dtype = torch.float64) -> Tree:
    """Return D = (W_initial - W_final)^2 (eq. 3), computed in float64 and returned in `dtype`.

    Raises:
        ValueError: an entry is not finite, possibly only after the conversion to `dtype`: the
            exploration has diverged.
    """
    d = {
        name: (initial[name].double() - final[name].double()).square().to(dtype) for name in initial
    }
    if bad := trees.first_nonfinite(d):
        raise ValueError(
            f"the deviation of tensor {bad!r} holds NaN or infinite values:"
            " the exploration has diverged"
        )
    return d


def ranges(deviations: Sequence[AnyTree], scope: str = "tensor") -> dict[str, tuple[float, float]]:
    """Return name -> (min, max) over all deviations, of each tensor or of the whole model."""
    bounds = {
        name: (
            min(float(d[name].min()) for d in deviations),
            max(float(d[name].max()) for d in deviations),
        )
        for name in deviations[0]
    }
    if scope == "tensor":
        return bounds
    lows, highs = zip(*bounds.values(), strict=True)
    return dict.fromkeys(bounds, (min(lows), max(highs)))


def normalised(d: AnyTree, bounds: Mapping[str, tuple[float, float]]) -> Tree:
    """Return (D - min)/(max - min), with each tensor's (min, max) from `ranges`.

    If D is constant (max - min <= 1e-12 max), the result is 1 instead of 0/0.
    """
    scaled: Tree = {}
    for name, (low, high) in bounds.items():
        values = d[name].double()
        constant = high - low <= 1e-12 * high
        scaled[name] = torch.ones_like(values) if constant else (values - low) / (high - low)
    return scaled


def global_guidance(
    deviations: Sequence[AnyTree],
    *,
    scope: str = "tensor",
    order: str = "normalise_then_mean",
    minmax: str = "explorer",
) -> Tree:
    """Return the guidance G, with entries in [0, 1], from the explorers' deviations (eq. 4).

    Args:
        deviations: one D per explorer, >= 0, all with the same names.
        scope: "tensor" or "model": min and max are taken over each tensor or the whole model.
        order: "normalise_then_mean" for the mean of the normalised D, as in eq. 4, or
            "mean_then_normalise" for the normalised mean of the D.
        minmax: "explorer" for min and max over each explorer's own D, or "all" for min and max
            over the D of all explorers together. It has no effect on "mean_then_normalise", which
            normalises a single D.
    """
    if order == "mean_then_normalise":
        deviations = [trees.mean((d, 1.0) for d in deviations)]
    common = ranges(deviations, scope) if minmax == "all" else None
    return trees.mean((normalised(d, common or ranges([d], scope)), 1.0) for d in deviations)


def adjusted(
    guidance: AnyTree, rescale: str = "none", g_min: float = 0.0, *, explorers: int = 1
) -> Tree:
    """Return g_min + (1 - g_min) G, after an optional rescaling of G.

    Args:
        guidance: G.
        rescale: "none", "mean1" or "sum". "mean1" divides each tensor of G by its mean; a tensor
            with G = 0 throughout, which occurs with scope="model", becomes 1 instead of 0/0.
            "sum" takes the sum over the explorers instead of the mean, which is eq. 4 without its
            factor 1 / C_exp.
        g_min: the share of the base method's step (G = 1) that every entry keeps, in [0, 1).
        explorers: the number of explorers that determine G.
    """

    def adjust(g: Tensor) -> Tensor:
        if rescale == "mean1":
            mean = g.mean()
            g = torch.ones_like(g) if mean == 0 else g / mean
        elif rescale == "sum":
            g = g * explorers
        return g_min + (1 - g_min) * g

    return trees.map(adjust, guidance)


def contributors(
    explorers: Sequence[int],
    participants: Collection[int],
    last: Sequence[int],
    *,
    refresh: str = "participants",
    empty: str = "previous",
) -> list[int]:
    """Return the explorers that determine this round's G (algorithm 2).

    In the first round these are all explorers, and afterwards the explorers that participate.

    Args:
        explorers: the clients that have explored.
        participants: the clients that take part in this round.
        last: the explorers that determined the last round's G; empty in the first round.
        refresh: "participants", or "all" to use all explorers in every round.
        empty: the rule if no explorer participates: "previous" keeps G, "all" uses all explorers.
    """
    if not last or refresh == "all":
        return list(explorers)
    present = [pid for pid in explorers if pid in participants]
    return present or list(explorers if empty == "all" else last)


@dataclass(frozen=True, kw_only=True)
class FedLExPlugin(Plugin):
    """Adds the phase `explore`, then masks the trained parameters that clients share by G.

    The server's state has "deviations", explorer -> D, with the largest client first; "guidance",
    the last G; and "used", the explorers that determined it.
    """

    name = "fedlex"
    breaks = {"plain steps": "every step is scaled by a mask, which all clients share"}

    c_exp: int | float = 20
    e_exp: int = setting(150, low=1)
    lr_exp: float | None = setting(None, open_low=0)
    patience: int | None = setting(None, low=1)
    scope: str = setting("tensor", allowed=("tensor", "model"))
    order: str = setting(
        "normalise_then_mean", allowed=("normalise_then_mean", "mean_then_normalise")
    )
    minmax: str = setting("explorer", allowed=("explorer", "all"))
    empty: str = setting("previous", allowed=("previous", "all"))
    refresh: str = setting("participants", allowed=("participants", "all"))
    apply_to: str = setting("gradient", allowed=("gradient", "update"))
    rescale: str = setting("none", allowed=("none", "mean1", "sum"))
    g_min: float = setting(0.0, low=0, open_high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.c_exp, int):
            check.integer("plugin.fedlex.c_exp", self.c_exp, low=1)
        else:
            check.number("plugin.fedlex.c_exp", self.c_exp, open_low=0, high=1)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", *(["local steps"] if self.apply_to == "update" else [])})

    # ---- server
    def setup(self, setup: RunSetup) -> State:
        return {"deviations": {}, "used": [], "guidance": {}}

    def phases(self, setup: RunSetup) -> list[Phase]:
        explorers = self._explorers(setup.workspace.task.sizes)
        return [Phase("explore", 1, self._keep, cohort=explorers, uploads=False)]

    def _explorers(self, sizes: Sequence[int]) -> int:
        """Return the number of explorers; a share of the clients is rounded up."""
        if isinstance(self.c_exp, int):
            return self.c_exp
        # As floats, 0.1 of 30 clients is slightly above 3; without `round` it would become 4.
        return max(1, math.ceil(round(self.c_exp * sum(n > 0 for n in sizes), 9)))

    def expects(self, step: Step) -> dict[str, Expected]:
        if step.trains:
            return {}
        initial = trees.pick(step.workspace.initial, step.workspace.mergeable)
        like = trees.map(
            lambda t: torch.empty(t.shape, dtype=torch.float32, device="meta"), initial
        )
        return {"D": Expected(like=like, low=0)}

    def _keep(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        """Merge the phase `explore`: keep the deviations, and leave the model unchanged."""
        deviations = {u.pid: trees.pick(u["D"], step.workspace.mergeable) for u in updates}
        return Merged({}, {**state, "deviations": deviations})

    def broadcast(self, step: Step, state: State) -> Extras:
        if not step.trains:
            self._warn(step)
            return {}
        used = self._used(step, state)
        if used == state["used"]:
            return {"G": state["guidance"]}
        guidance = global_guidance(
            [state["deviations"][pid] for pid in used],
            scope=self.scope,
            order=self.order,
            minmax=self.minmax,
        )
        guidance = adjusted(guidance, self.rescale, self.g_min, explorers=len(used))
        return {"G": trees.map(Tensor.float, guidance)}

    def _warn(self, step: Step) -> None:
        explorers = len(step.cohort)
        if explorers < self._explorers(step.workspace.task.sizes):
            log.warning(
                "plugin.fedlex.c_exp=%s explorers, but only %s with data: all of them explore",
                self.c_exp,
                check.counted(explorers, "client"),
            )
        if step.local.optimizer != "sgd" and self.apply_to == "gradient":
            log.warning(
                "client.optimizer=%s cancels a constant factor on a parameter's gradients, so"
                " FedLEx's mask is nearly inactive; use client=sgd, or"
                " plugin.fedlex.apply_to=update",
                step.local.optimizer,
            )

    def _used(self, step: Step, state: State) -> list[int]:
        return contributors(
            list(state["deviations"]),
            step.cohort,
            state["used"],
            refresh=self.refresh,
            empty=self.empty,
        )

    def after(
        self, step: Step, state: State, old: Tree, new: Tree, updates: Sequence[Update]
    ) -> Merged:
        assert step.sent is not None
        used, guidance = self._used(step, state), step.sent["G"]
        recorded = statistics(guidance, used)
        present = sum(pid in state["deviations"] for pid in step.cohort)
        recorded["explorers"] = present / len(step.cohort)
        return Merged(new, {**state, "used": used, "guidance": guidance}, recorded)

    # ---- client
    @serves
    def explore(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        """Train a copy of the model, send how far each parameter moved, and discard the copy."""
        start = trees.pick(msg.weights, ctx.workspace.mergeable)
        end = ctx.fit(
            msg.weights, epochs=self.e_exp, patience=self.patience, lr=self.lr_exp, alone=True
        )
        return Result(extras={"D": deviation(start, end.params, torch.float32)}), state

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        kind = "scale" if self.apply_to == "gradient" else "step"
        # G multiplies the gradient (eq. 6) or, with apply_to=update, the optimiser's step.
        return [Term(kind, as_given, trees.cast(msg["G"], ctx.workspace.initial))]


def statistics(guidance: AnyTree, used: Sequence[int]) -> Recorded:
    """Return the medians and means of G to record, and the explorers that determined G."""
    tensors = list(guidance.values())
    return {
        "median": float(torch.cat([g.flatten() for g in tensors]).median()),
        "medians": torch.stack([g.median() for g in tensors]),
        "means": torch.stack([g.mean() for g in tensors]),
        "pids": torch.tensor(used),
    }


@dataclass(frozen=True, kw_only=True)
class FedLEx(FedAvg):
    """FedAvg with the plug-in `fedlex`."""

    name = "fedlex"
    requires = FedLExPlugin
