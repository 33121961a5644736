"""FedNorm (Kundalwal et al., "Client Contribution Normalization"), equations 3 to 8.

Shapes: R participants, d features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float64).tiny


class Contribution(NamedTuple):
    """The similarity S (R, R), the factors Lambda (R,), and the weights w (R,), whose sum is 1."""

    similarity: Tensor
    factors: Tensor
    weights: Tensor


def similarity(z: Tensor) -> Tensor:
    """Return S_rp = cos(z_r, z_p) with S_rr = 1 (eq. 3, 4), shape (R, R), float64.

    A zero vector has cosine 0 with all other vectors.

    Args:
        z: (R, d) the participants' mean latents.
    """
    z = z.double()
    scaled = z / z.abs().amax(1, keepdim=True).clamp_min(_TINY)  # so that the norm cannot overflow
    norm = scaled.norm(dim=1, keepdim=True)
    unit = torch.where(norm > 0, scaled / norm.clamp_min(_TINY), 0.0)
    s = unit @ unit.T
    s = ((s + s.T) / 2).clamp(-1.0, 1.0)  # rounding can make a matrix product asymmetric
    return s.fill_diagonal_(1.0)


def contribution(z: Tensor, nu: Tensor, temperature: float) -> Contribution:
    """Return the contribution factors and the weights that replace the host's.

        a_r      = sum_p S_rp / T
        Lambda_r = sum_{q != r} e^{a_q} / sum_q e^{a_q}           (eq. 5, 8)
        w_r      = Lambda_r nu_r / sum_q Lambda_q nu_q            (eq. 6, 7)

    Args:
        z: (R, d) the participants' mean latents, finite.
        nu: (R,) the host's weights, >= 0 and not all zero.
        temperature: T, positive and finite.

    Raises:
        ValueError: an argument is out of range; the message gives its value and the positions of
            the participants concerned.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature={temperature}; it must be positive and finite")
    if z.ndim != 2 or nu.shape != z.shape[:1] or len(nu) == 0:
        raise ValueError(
            f"latents of shape {tuple(z.shape)} and weights of shape {tuple(nu.shape)};"
            " expected (R, d) and (R,) with R >= 1"
        )
    if bad := (~torch.isfinite(z).all(1)).nonzero().flatten().tolist():
        raise ValueError(f"the mean latents of participants {bad} hold NaN or infinite values")
    nu = nu.double()
    if not torch.isfinite(nu).all() or (nu < 0).any() or not nu.sum() > 0:
        raise ValueError(f"host weights {nu.tolist()}; they must be finite, >= 0 and not all zero")
    s = similarity(z)
    if len(nu) == 1:  # eq. 6 would be 0/0; the only participant gets the whole weight
        return Contribution(s, torch.zeros_like(nu), torch.ones_like(nu))
    row_sums = s.sum(1)
    gap = row_sums.max() - row_sums  # a common shift of all a_r cancels in eq. 5
    # The rounding error of a row sum is about R 1e-15. Divided by a tiny T, it would separate
    # clients that are equally central.
    gap = torch.where(gap > len(nu) * 1e-14, gap, 0.0)
    a = (-gap / temperature).clamp_min(-1e300)  # so that a tiny T cannot overflow
    # Leave-one-out log-sum-exp: 1 - softmax(a) would suffer from cancellation where one client
    # dominates.
    diagonal = torch.eye(len(a), dtype=torch.bool, device=a.device)
    others = a.expand(len(a), len(a)).masked_fill(diagonal, -torch.inf)
    log_factors = others.logsumexp(1) - a.logsumexp(0)
    return Contribution(s, log_factors.exp(), (log_factors + nu.log()).softmax(0))
