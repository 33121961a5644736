"""FedNorm (Kundalwal et al., Client Contribution Normalization), equations 3 to 8. Shapes: R
participants, d features."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Contribution(NamedTuple):
    """similarity S (R, R), factors Lambda (R,), weights w (R,) with sum 1."""

    similarity: Tensor
    factors: Tensor
    weights: Tensor


def similarity(z: Tensor) -> Tensor:
    """S_rp = cos(z_r, z_p), S_rr = 1 (eq. 3, 4); a zero vector has cosine 0 with all others. z (R,
    d) -> (R, R), float64."""
    z = z.double()
    # no overflow in the norm
    scaled = z / z.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    norm = scaled.norm(dim=1, keepdim=True)
    unit = torch.where(norm > 0, scaled / norm.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    s = unit @ unit.T
    s = ((s + s.T) / 2).clamp(-1.0, 1.0)  # a matrix product is symmetric but for rounding
    return s.fill_diagonal_(1.0)


def contribution(z: Tensor, nu: Tensor, temperature: float) -> Contribution:
    """Lambda_r = sum_{q != r} e^{a_q} / sum_q e^{a_q}, a_r = sum_p S_rp / T (eq. 5, 8); w_r ~
    Lambda_r nu_r (eq. 6, 7).

    Args:
        z: (R, d) mean latents, finite. nu: (R,) the host's weights, >= 0, not all zero.
    Raises:
        ValueError: for any other input, with the value and the participants' positions.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature={temperature}; it must be positive and finite")
    if z.ndim != 2 or nu.shape != z.shape[:1] or len(nu) == 0:
        raise ValueError(
            f"latents of shape {tuple(z.shape)} and weights of shape {tuple(nu.shape)}; expected"
            " (R, d) and (R,)"
        )
    if bad := (~torch.isfinite(z).all(1)).nonzero().flatten().tolist():
        raise ValueError(f"the mean latents of participants {bad} hold NaN or infinite values")
    nu = nu.double()
    if not torch.isfinite(nu).all() or (nu < 0).any() or not nu.sum() > 0:
        raise ValueError(f"host weights {nu.tolist()}; they must be finite, >= 0 and not all zero")
    s = similarity(z)
    if len(nu) == 1:  # 0/0 in eq. 6: the one participant carries everything
        return Contribution(s, torch.zeros_like(nu), torch.ones_like(nu))
    rows = s.sum(1)
    gap = rows.max() - rows  # shifting cancels in eq. 5
    # Row sums carry a rounding of about R 1e-15. Divided by a tiny T it would tell apart clients
    # that are equally central.
    gap = torch.where(gap > len(nu) * 1e-14, gap, 0.0)
    a = (-gap / temperature).clamp_min(-1e300)  # a tiny T must not overflow
    # Leave-one-out log-sum-exp: 1 - softmax(a) would cancel where one client dominates.
    others = a.expand(len(a), len(a)).masked_fill(
        torch.eye(len(a), dtype=torch.bool, device=a.device), -torch.inf
    )
    log_factors = others.logsumexp(1) - a.logsumexp(0)
    return Contribution(s, log_factors.exp(), (log_factors + nu.log()).softmax(0))
