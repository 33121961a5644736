"""FedLEx (Internò et al. 2024, "Federated loss exploration"), equations 3, 4 and 6.

Symbols: W are the trained parameters, D an explorer's squared deviation, G the guidance, which
masks the clients' gradients. Trees are dicts of tensors by name, as in fedhet/core/trees.py.
Results are in float64 unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fedhet.core import trees
from fedhet.core.trees import AnyTree, Tree

SCOPES = ("tensor", "model")
MINMAX = ("explorer", "all")
ORDERS = ("normalise_then_mean", "mean_then_normalise")
EMPTY = ("previous", "all")
REFRESH = ("participants", "all")


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
    """Return (min, max) by name, over each tensor or the whole model of all these deviations."""
    bounds = {}
    for name in deviations[0]:
        low = min(float(d[name].min()) for d in deviations)
        high = max(float(d[name].max()) for d in deviations)
        bounds[name] = (low, high)
    if scope == "tensor":
        return bounds
    lows, highs = zip(*bounds.values(), strict=True)
    return dict.fromkeys(bounds, (min(lows), max(highs)))


def normalised(d: AnyTree, bounds: Mapping[str, tuple[float, float]]) -> Tree:
    """Return (D - min)/(max - min), with each tensor's (min, max) from `ranges`.

    Where D is constant (max - min <= 1e-12 max), the result is 1 instead of 0/0.
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
        minmax: "explorer" for min and max over each explorer's own D, or "all" for those over the
            D of all explorers together. The two are the same for a mean of the D, which is one D.
    """
    if order == "mean_then_normalise":
        mean = trees.mean((d, 1.0) for d in deviations)
        return normalised(mean, ranges([mean], scope))
    if minmax == "all":
        bounds = ranges(deviations, scope)
        return trees.mean((normalised(d, bounds), 1.0) for d in deviations)
    return trees.mean((normalised(d, ranges([d], scope)), 1.0) for d in deviations)


def adjusted(
    guidance: AnyTree, rescale: str = "none", g_min: float = 0.0, *, explorers: int = 1
) -> Tree:
    """Return G after the optional rescaling and with the floor g_min + (1 - g_min) G.

    Args:
        guidance: G.
        rescale: "none", or "mean1" for G / mean(G) per tensor. A tensor with G = 0 throughout,
            which occurs with scope="model", becomes 1 instead of 0/0. "sum" for the sum over the
            explorers in place of their mean, which is eq. 4 without its factor 1 / C_exp.
        g_min: the share of the host's own step (G = 1) that every entry keeps, in [0, 1).
        explorers: how many have determined G.
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
    *,
    first: bool,
    refresh: str = "participants",
    empty: str = "previous",
) -> list[int] | None:
    """Return the clients whose D make up this round's G, or None if G stays (algorithm 2).

    They are all explorers in the first round, and afterwards the explorers that participate.

    Args:
        explorers: the clients that have explored.
        participants: the clients that take part in this round.
        first: whether this is the first round.
        refresh: "participants", or "all" to use all explorers in every round.
        empty: what applies where no explorer participates: "previous" keeps G, "all" uses all
            explorers.
    """
    if first or refresh == "all":
        return list(explorers)
    present = [pid for pid in explorers if pid in participants]
    return present or (list(explorers) if empty == "all" else None)


def mask_gradient(grads: list[Tensor], guidance: Sequence[Tensor]) -> None:
    """Mask the gradient in place: g <- g G (eq. 6)."""
    torch._foreach_mul_(grads, list(guidance))


def mask_step(
    params: Sequence[Tensor], before: Sequence[Tensor], guidance: Sequence[Tensor]
) -> None:
    """Mask the last step in place: W <- W_before + G (W - W_before), exact where G is 0 or 1."""
    masked = torch._foreach_lerp(list(before), list(params), list(guidance))
    torch._foreach_copy_(list(params), masked)
