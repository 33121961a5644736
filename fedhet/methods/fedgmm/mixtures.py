"""How FedGMM's mixtures travel: one tree for the mixtures of all classes."""

from __future__ import annotations

import torch

from fedhet.core.check import counted
from fedhet.core.errors import RunFailed
from fedhet.core.trees import Tree, kind
from fedhet.maths import fedgmm as maths
from fedhet.maths.fedgmm import Mixture

MIXTURES = "fedgmm.mixtures"

_DIMENSIONS = {"label": 1, "pi": 1, "mu": 2, "var": 2}
_MB = 10**6
ROUNDING = 1e-5


def pack(mixtures: dict[int, Mixture], d: int) -> Tree:
    """Class -> mixture as one tree in float32: label (K,), pi (K,), mu (K, d), var (K, d).

    K is the number of components of all classes, and `label` the class of each.
    """
    label = [c for c, mixture in mixtures.items() for _ in mixture.pi]
    # Without any mixture, the empty one gives the tensors their shapes.
    parts = [Mixture(torch.zeros(0), torch.zeros(0, d), torch.zeros(0, d)), *mixtures.values()]
    tree = {"label": torch.tensor(label, dtype=torch.int64)}
    for name in Mixture._fields:
        tree[name] = torch.cat([getattr(part, name).float() for part in parts])
    return tree


def unpack(tree: Tree, d: int | None, classes: int, reg_covar: float) -> dict[int, Mixture]:
    """The inverse of `pack`, with every mixture checked.

    The result is on the CPU, where scikit-learn fits mixtures and NumPy draws from them.

    Args:
        tree: the extra as it was received.
        d: the number of pixels; None where it is not known yet.
        classes: the number of classes.
        reg_covar: what EM adds to each variance.

    Raises:
        ValueError: the tree is not one that `pack` makes, or a mixture is not valid; the message
            names the class.
    """
    well_formed = (
        {name: t.ndim for name, t in tree.items()} == _DIMENSIONS
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
            maths.check_mixture(mixtures[c], d)
            _check_pixels(mixtures[c], reg_covar)
        except ValueError as error:
            raise ValueError(f"extra {MIXTURES!r}, class {c}: {error}") from error
    return mixtures


def _check_pixels(mixture: Mixture, reg_covar: float) -> None:
    """Refuse a mixture that no inputs in [0, 1] have.

    Raises:
        ValueError: a mean is outside of [0, 1], or a variance above a quarter of the range squared.
    """
    low, high = (float(bound) for bound in mixture.mu.aminmax())
    if low < -ROUNDING or high > 1 + ROUNDING:
        raise ValueError(f"means from {low:.4g} to {high:.4g}; inputs are in [0, 1]")
    most, largest = 0.25 + reg_covar, float(mixture.var.max())
    if largest > most * (1 + ROUNDING):
        raise ValueError(f"a variance of {largest:.4g}; inputs in [0, 1] have at most {most:.4g}")


def checked_size(whose: str, k: int, d: int, max_mb: float) -> float:
    """The size of k packed components of d pixels, in MB.

    Raises:
        RunFailed: it is above `max_mb`; the message begins with `whose` mixtures these are.
    """
    megabytes = k * (8 + 4 * (2 * d + 1)) / _MB
    if megabytes > max_mb:
        raise RunFailed(
            f"fedgmm: the mixtures of {whose} are {counted(k, 'component')} of"
            f" {counted(d, 'pixel')}, {megabytes:.1f} MB, above"
            f" plugin.fedgmm.max_payload_mb={max_mb:g}; use fewer components, max_components, or"
            " smaller images"
        )
    return megabytes
