"""What a client sends of its samples under privacy.noise, and how it becomes counts and mixtures.

The content has the same form at every client: a share for every class and the full number of
components, all as differences from neutral ones: classes that are equally frequent, and mixtures
of uniform pixels. A class without samples is neutral.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedhet.core.trees import Tree
from fedhet.maths import fedgmm as maths
from fedhet.maths.fedgmm import Mixture
from fedhet.methods.fedgmm.mixtures import pack

MEAN, VARIANCE, LARGEST = 0.5, 1 / 12, 0.25  # of uniform pixels; no pixels in [0, 1] vary more


def content(
    counts: Tensor, mixtures: dict[int, Mixture], components: int, d: int
) -> tuple[Tensor, Tree]:
    """Return the counts and the mixtures as differences from the neutral ones, in float32.

    Args:
        counts: (C,) the samples of each class.
        mixtures: those of the classes that have enough, of at most `components` components.
        components: how many each class has; those that are missing have the weight 0.
        d: the number of pixels.
    """
    classes = len(counts)
    shares = counts / counts.sum().clamp(min=1) - 1 / classes
    tree = {
        "pi": torch.zeros(classes, components),
        "mu": torch.zeros(classes, components, d),
        "var": torch.zeros(classes, components, d),
    }
    for c, (pi, mu, var) in mixtures.items():
        k = len(pi)
        tree["pi"][c] = -1 / components
        tree["pi"][c, :k] += pi
        tree["mu"][c, :k] = mu - MEAN
        tree["var"][c, :k] = var - VARIANCE
    return shares.float(), tree


def accepted(
    shares: Tensor, tree: Tree, n: int, least: int, smallest: float
) -> tuple[Tensor, Tree]:
    """Return the counts (C,) and packed mixtures that noised content stands for.

    Args:
        shares: (C,) and
        tree: the content after its noise.
        n: the client's number of samples, which the counts sum up to.
        least: classes with fewer samples, by these counts, have no mixture.
        smallest: the smallest variance.
    """
    classes, components, d = tree["mu"].shape
    counts = whole(_weights(shares.double() + 1 / classes), n)
    pis = _weights(tree["pi"].double() + 1 / components)
    mixtures: dict[int, Mixture] = {}
    for c, count in enumerate(counts.tolist()):
        if count < least:
            continue
        kept = pis[c].topk(maths.components(count, components)).indices.sort().values
        mu = (tree["mu"][c, kept] + MEAN).clamp(0, 1)
        var = (tree["var"][c, kept] + VARIANCE).clamp(smallest, LARGEST)
        mixtures[c] = Mixture(_weights(pis[c, kept]), mu, var)
    return counts, pack(mixtures, d)


def _weights(noised: Tensor) -> Tensor:
    """The last dimension as weights >= 0 of sum 1; equal ones where none is positive."""
    positive = noised.clamp(min=0)
    total = positive.sum(-1, keepdim=True)
    return torch.where(total > 0, positive / total, 1 / noised.shape[-1])


def whole(shares: Tensor, n: int) -> Tensor:
    """The shares (C,) of n as whole numbers of sum n, by the largest remainders."""
    exact = shares * n
    counts = exact.floor().long()
    missing = n - int(counts.sum())
    counts[(exact - counts).argsort(descending=True, stable=True)[:missing]] += 1
    return counts
