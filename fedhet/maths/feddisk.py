"""FedDisk (Nguyen, Wu and Chang, "Federated learning for distribution skewed data using sample
weights"), equations 2 and 11 to 17. Equations 18 and 19 are in fedhet.metrics.

MADE: Germain et al. 2015, "MADE: Masked autoencoder for distribution estimation", one hidden layer,
natural order. D inputs in [0, 1], H hidden units, n samples; a MADE is the tree W1 (H, D), b1 (H,),
W2 (D, H), b2 (D,)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedhet.trees import AnyTree, Tree


class Masks(NamedTuple):
    """Hidden degrees m (H,), and the 0/1 masks M1 (H, D), M2 (D, H) that always multiply the
    weights."""

    degrees: Tensor
    m1: Tensor
    m2: Tensor


def masks(dim: int, hidden: int, draw: np.random.Generator | None = None) -> Masks:
    """M1[k, d] = 1 iff m(k) >= d, M2[d, k] = 1 iff d > m(k), with d = 1..D: output d sees x_<d
    only, output 1 nothing.

    m(k) = 1 + floor(k (D - 1) / H), evenly spread over 1..D-1, or uniform draws from there with
    `draw`."""
    if dim < 1 or hidden < 1:
        raise ValueError(f"a MADE with {dim} inputs and {hidden} hidden units; both must be >= 1")
    even = 1 + torch.arange(hidden) * (dim - 1) // hidden
    degrees = even if draw is None else torch.from_numpy(draw.integers(1, max(dim, 2), hidden))
    inputs = torch.arange(1, dim + 1)
    return Masks(degrees, (degrees[:, None] >= inputs).float(), (inputs[:, None] > degrees).float())


def initial(dim: int, hidden: int, draw: torch.Generator) -> Tree:
    """Weights and biases uniform in +-1/sqrt(fan-in), torch's own for linear layers."""
    shapes = {"W1": (hidden, dim), "b1": (hidden,), "W2": (dim, hidden), "b2": (dim,)}
    fan_in = {"W1": dim, "b1": dim, "W2": hidden, "b2": hidden}
    return {
        name: (2 * torch.rand(shape, generator=draw) - 1) / fan_in[name] ** 0.5
        for name, shape in shapes.items()
    }


def logits(made: AnyTree, mask: Masks, x: Tensor) -> Tensor:
    """(n, D): their sigmoid is P(x_d = 1 | x_<d) (eq. 2)."""
    hidden = functional.linear(x, made["W1"] * mask.m1, made["b1"]).relu()
    return functional.linear(hidden, made["W2"] * mask.m2, made["b2"])


def nll(made: AnyTree, mask: Masks, x: Tensor) -> Tensor:
    """(n,): sum_d BCE(x_d, out_d), the negative log likelihood of binary x; grey x are soft
    targets. See `check_pixels`."""
    return functional.binary_cross_entropy_with_logits(
        logits(made, mask, x), x, reduction="none"
    ).sum(1)


def check_pixels(x: Tensor) -> None:
    """ValueError where a value lies outside [0, 1]: the cross entropy of a probability is undefined
    there."""
    if not ((x >= 0) & (x <= 1)).all():
        raise ValueError(
            f"inputs between {float(x.min())} and {float(x.max())}; FedDisk needs finite values in"
            " [0, 1]"
        )


@torch.no_grad()
def sample(made: AnyTree, mask: Masks, uniforms: Tensor) -> Tensor:
    """Ancestral draws: x_d = 1 iff U_d < P(x_d = 1 | x_<d). uniforms (n, D) in [0, 1) -> x (n, D);
    O(nHD)."""
    columns, rows = (made["W1"] * mask.m1).T.contiguous(), made["W2"] * mask.m2
    hidden = made["b1"].expand(len(uniforms), -1).clone()
    x = torch.empty_like(uniforms)
    for d in range(uniforms.shape[1]):
        x[:, d] = uniforms[:, d] < torch.sigmoid(hidden.relu() @ rows[d] + made["b2"][d])
        hidden.addr_(x[:, d], columns[d])  # only what the new input adds
    return x


def density_ratio(p: Tensor, n_local: int, n_global: int, eps: float) -> Tensor:
    """r = p / (1 - p) n_local / n_global (eq. 16), float64. p (n,) = P(global | z), clipped to
    [eps, 1 - eps]."""
    if n_local < 1 or n_global < 1:
        raise ValueError(
            f"a classifier trained on {n_local} local and {n_global} global samples; both must be"
            " >= 1"
        )
    if p.ndim != 1 or not len(p):
        raise ValueError(f"probabilities of shape {tuple(p.shape)}; expected (n,) with n >= 1")
    if bad := (~((p >= 0) & (p <= 1))).nonzero().flatten().tolist():
        raise ValueError(
            f"{p[bad[0]]} at position {bad[0]} is not a probability; all must lie in [0, 1]"
        )
    p = p.double().clamp(eps, 1 - eps)
    return p / (1 - p) * (n_local / n_global)


def sample_weights(r: Tensor, lo: float, hi: float, normalise: str) -> Tensor:
    """w_k(x_i) (eq. 11): r clipped to [lo, hi], then mean 1, or scaled to [0, 2] ("minmax2"), or
    left as it is ("none")."""
    r = r.clamp(lo, hi)
    if normalise == "none":
        return r
    if (r == r[0]).all():
        return torch.ones_like(r)
    return r / r.mean() if normalise == "mean1" else 2 * (r - r.min()) / (r.max() - r.min())


def effective_size(w: Tensor) -> float:
    """(sum w)^2 / sum w^2, in [1, n]: so many equally weighted samples have the same variance."""
    return float(w.sum() ** 2 / w.square().sum())
