"""FedLEx (Internò et al. 2024, "Federated loss exploration"), equations 3, 4 and 6. Trees as in
fedhet/trees.py; results in float64."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fedhet import trees
from fedhet.trees import AnyTree, Tree

SCOPES, ORDERS = ("tensor", "model"), ("normalise_then_mean", "mean_then_normalise")
EMPTY, REFRESH = ("previous", "all"), ("participants", "all")


def deviation(initial: AnyTree, final: AnyTree, dtype: torch.dtype = torch.float64) -> Tree:
    """D = (W_initial - W_final)^2 (eq. 3), formed in float64 and returned in `dtype`.

    Raises:
        ValueError: an entry is not finite, also in `dtype`: the exploration has diverged.
    """
    found = {
        name: (initial[name].double() - final[name].double()).square().to(dtype) for name in initial
    }
    if bad := trees.finite(found):
        raise ValueError(
            f"the deviation of tensor {bad!r} holds NaN or infinite values: the exploration has"
            " diverged"
        )
    return found


def normalised(d: AnyTree, scope: str = "tensor") -> Tree:
    """(D - min)/(max - min), over each tensor or over the whole model; 1 where D is constant (max -
    min <= 1e-12 max), as 0/0 otherwise."""
    found: Tree = {}
    for names in [[name] for name in d] if scope == "tensor" else [list(d)]:
        low, high = (
            min(float(d[name].min()) for name in names),
            max(float(d[name].max()) for name in names),
        )
        for name in names:
            double = d[name].double()
            found[name] = (
                torch.ones_like(double)
                if high - low <= 1e-12 * high
                else (double - low) / (high - low)
            )
    return found


def global_guidance(
    deviations: Sequence[AnyTree], *, scope: str = "tensor", order: str = "normalise_then_mean"
) -> Tree:
    """G in [0, 1] from the explorers' D (eq. 4): each normalised, then the mean; or the mean of all
    D, normalised.

    Raises: ValueError: no explorer, names that differ, a D that is negative or not finite, an
        unknown scope or order.
    """
    if scope not in SCOPES or order not in ORDERS:
        raise ValueError(
            f"scope={scope!r}, order={order!r}; known are {', '.join(SCOPES)} and"
            f" {', '.join(ORDERS)}"
        )
    if not deviations or not deviations[0]:
        raise ValueError(
            f"{len(deviations)} explorers, {len(deviations[0]) if deviations else 0} tensors; at"
            " least one of each is needed"
        )
    for explorer, d in enumerate(deviations):
        if d.keys() != deviations[0].keys():
            raise ValueError(
                f"explorer {explorer} has the tensors {list(d)[:3]} ...; the first has"
                f" {list(deviations[0])[:3]} ..."
            )
        if bad := trees.finite(d) or negative(d):
            raise ValueError(
                f"explorer {explorer}, tensor {bad!r}: deviations must be finite and >= 0"
            )
    if order == "mean_then_normalise":
        return normalised(trees.mean((d, 1.0) for d in deviations), scope)
    return trees.mean((normalised(d, scope), 1.0) for d in deviations)


def negative(d: AnyTree) -> str | None:
    """The first name that holds a negative value, or None."""
    return next((name for name in d if bool((d[name] < 0).any())), None)


def adjusted(guidance: AnyTree, rescale: str = "none", g_min: float = 0.0) -> Tree:
    """rescale="mean1": G / mean(G) per tensor, 1 where G is 0 throughout, as 0/0 otherwise: with
    scope="model" a tensor that holds nothing but the model's smallest D. Then G <- g_min + (1 -
    g_min) G: a share g_min of the host's own step, which is G = 1."""

    def adjust(g: Tensor) -> Tensor:
        if rescale == "mean1":
            mean = g.mean()
            g = torch.ones_like(g) if mean == 0 else g / mean
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
    """Whose D make up this round's G: all in the first round, then the explorers among the
    participants (algorithm 2).

    Where there is none: everyone's (`empty="all"`), or None = G stays. `refresh="all"`: everyone's,
    always."""
    if first or refresh == "all":
        return list(explorers)
    present = [pid for pid in explorers if pid in participants]
    return present or (list(explorers) if empty == "all" else None)


def mask_gradient(grads: list[Tensor], guidance: Sequence[Tensor]) -> None:
    """g <- g G (eq. 6), in place."""
    torch._foreach_mul_(grads, list(guidance))


def mask_step(
    params: Sequence[Tensor], before: Sequence[Tensor], guidance: Sequence[Tensor]
) -> None:
    """W <- W_before + G (W - W_before), in place; exact where G is 0 or 1."""
    torch._foreach_copy_(
        list(params), torch._foreach_lerp(list(before), list(params), list(guidance))
    )
