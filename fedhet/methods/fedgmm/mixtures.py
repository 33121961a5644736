"""How FedGMM's mixtures travel: one tree for the mixtures of all classes.

Under privacy.noise a client sends a share for every class, and the full number of components. It
sends them as differences from neutral values, which are equal shares and mixtures of uniform
pixels. A class without samples has the neutral mixture. Every client's content therefore has the
same form. After noise was added, the server turns the content into valid counts and mixtures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedhet.core.check import counted
from fedhet.core.errors import RunFailed
from fedhet.core.trees import Tree, kind
from fedhet.methods.fedgmm import gaussians
from fedhet.methods.fedgmm.gaussians import Mixture

MIXTURES = "fedgmm.mixtures"  # as the extra is named in messages
# The mean and variance of uniform pixels, and the largest variance that pixels in [0, 1] can have.
MEAN, VARIANCE, LARGEST = 0.5, 1 / 12, 0.25
ROUNDING = 1e-5


def pack(mixtures: dict[int, Mixture], d: int) -> Tree:
    """Return mixtures as one tree in float32: label (K,), pi (K,), mu (K, d), var (K, d).

    K is the number of components of all classes, and `label` has the class of each component.

    Args:
        mixtures: class -> mixture.
        d: the number of pixels.
    """
    label = [c for c, mixture in mixtures.items() for _ in mixture.pi]
    # An empty mixture comes first: without any other, it gives the tensors their shapes.
    parts = [Mixture(torch.zeros(0), torch.zeros(0, d), torch.zeros(0, d)), *mixtures.values()]
    columns = [torch.cat(column).float() for column in zip(*parts, strict=True)]
    return {"label": torch.tensor(label, dtype=torch.int64), **Mixture(*columns)._asdict()}


def unpack(tree: Tree, d: int, classes: int, reg_covar: float) -> dict[int, Mixture]:
    """Return class -> mixture from the tree that `pack` makes, and check every mixture.

    The result is on the CPU, because scikit-learn fits mixtures there, and NumPy draws from them.

    Args:
        tree: the received extra.
        d: the number of pixels.
        classes: the number of classes.
        reg_covar: the number that EM adds to each variance.

    Raises:
        ValueError: the tree does not have the form that `pack` makes, or a mixture is not valid;
            the message names the class.
    """
    well_formed = (
        {name: t.ndim for name, t in tree.items()} == {"label": 1, "pi": 1, "mu": 2, "var": 2}
        and len({len(t) for t in tree.values()}) == 1
        and not tree["label"].is_floating_point()
    )
    if not well_formed:
        received = {name: kind(t) for name, t in tree.items()}
        raise ValueError(
            f"extra {MIXTURES!r} is {received}; integer label (K,), pi (K,), mu (K, d) and"
            " var (K, d) are expected"
        )
    tensors = {name: t.cpu() for name, t in tree.items()}
    label = tensors["label"]
    mixtures: dict[int, Mixture] = {}
    for c in label.unique().tolist():
        if not 0 <= c < classes:
            raise ValueError(f"extra {MIXTURES!r}: class {c}; classes go from 0 to {classes - 1}")
        mixtures[c] = Mixture(*(tensors[name][label == c] for name in Mixture._fields))
        try:
            gaussians.check_mixture(mixtures[c], d)
            _check_pixels(mixtures[c], reg_covar)
        except ValueError as error:
            raise ValueError(f"extra {MIXTURES!r}, class {c}: {error}") from error
    return mixtures


def _check_pixels(mixture: Mixture, reg_covar: float) -> None:
    """Refuse a mixture that cannot come from inputs in [0, 1].

    Raises:
        ValueError: a mean is outside [0, 1], or a variance is above 1/4 + reg_covar.
    """
    low, high = (float(bound) for bound in mixture.mu.aminmax())
    if low < -ROUNDING or high > 1 + ROUNDING:
        raise ValueError(f"means from {low:.4g} to {high:.4g}; they must be in [0, 1]")
    most, largest = LARGEST + reg_covar, float(mixture.var.max())
    if largest > most * (1 + ROUNDING):
        raise ValueError(f"a variance of {largest:.4g}; inputs in [0, 1] allow at most {most:.4g}")


def checked_size(owner: str, k: int, d: int, max_mb: float) -> float:
    """Return the size of k packed components of d pixels, in MB.

    Raises:
        RunFailed: the size is above `max_mb`; the message names the `owner` of the mixtures.
    """
    megabytes = k * (8 + 4 * (2 * d + 1)) / 10**6
    if megabytes > max_mb:
        raise RunFailed(
            f"fedgmm: the mixtures of {owner} have {counted(k, 'component')} of"
            f" {counted(d, 'pixel')}, or {megabytes:.1f} MB, which is above"
            f" plugin.fedgmm.max_payload_mb={max_mb:g}; use fewer components, max_components, or"
            " smaller images"
        )
    return megabytes


# ---- under privacy.noise
def content(
    counts: Tensor, mixtures: dict[int, Mixture], components: int, d: int
) -> tuple[Tensor, Tree]:
    """Return counts and mixtures as differences from the neutral values, in float32.

    Args:
        counts: (C,) the number of samples of each class.
        mixtures: class -> mixture, for classes with enough samples; at most `components` components
            each.
        components: the number of components to send for every class. Missing components have the
            weight 0.
        d: the number of pixels.

    Returns:
        (C,) the shares of the classes, and the tree of pi, mu and var, both as differences.
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


def counts_in(shares: Tensor, n: int) -> Tensor:
    """Return the counts (C,) for noised shares: whole numbers that sum to n."""
    return whole(_weights(shares.double() + 1 / len(shares)), n)


def mixtures_in(tree: Tree, counts: Tensor, least: int, smallest: float) -> Tree:
    """Return the packed mixtures for noised content.

    Args:
        tree: the content with noise.
        counts: (C,) the client's counts from `counts_in`.
        least: classes with fewer samples get no mixture.
        smallest: the smallest variance that a mixture may have.
    """
    _, components, d = tree["mu"].shape
    pis = _weights(tree["pi"].double() + 1 / components)
    mixtures: dict[int, Mixture] = {}
    for c, count in enumerate(counts.tolist()):
        if count < least:
            continue
        kept = pis[c].topk(gaussians.components(count, components)).indices.sort().values
        mu = (tree["mu"][c, kept] + MEAN).clamp(0, 1)
        var = (tree["var"][c, kept] + VARIANCE).clamp(smallest, LARGEST)
        mixtures[c] = Mixture(_weights(pis[c, kept]), mu, var)
    return pack(mixtures, d)


def _weights(noised: Tensor) -> Tensor:
    """Return weights >= 0 with sum 1 over the last dimension; equal if no value is positive."""
    positive = noised.clamp(min=0)
    total = positive.sum(-1, keepdim=True)
    return torch.where(total > 0, positive / total, 1 / noised.shape[-1])


def whole(shares: Tensor, n: int) -> Tensor:
    """Divide n by the shares (C,) into whole numbers with sum n, by the largest remainders."""
    exact = shares * n
    counts = exact.floor().long()
    missing = n - int(counts.sum())
    counts[(exact - counts).argsort(descending=True, stable=True)[:missing]] += 1
    return counts
