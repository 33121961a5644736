"""FedDisk, equations 2 and 11 to 17: densities by MADE, and the sample weights they give.

The functions here do not depend on rounds or messages. MADE follows Germain et al. 2015, "MADE:
Masked autoencoder for distribution estimation", with one hidden layer and the natural order of the
inputs.

Shapes: D inputs in [0, 1], H hidden units, n samples. A MADE is the tree W1 (H, D), b1 (H,),
W2 (D, H), b2 (D,).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedhet.core import streams
from fedhet.core.authors import AnyTree, LocalSettings, Prepared, Tree, trees
from fedhet.core.client import optimizers
from fedhet.core.client.descent import Batcher, Descent, EarlyStopping, Values, descend


class Masks(NamedTuple):
    """The 0/1 masks M1 (H, D) and M2 (D, H), which always multiply the weights W1 and W2."""

    m1: Tensor
    m2: Tensor


def masks(dim: int, hidden: int, kind: str = "even", seed: int = 0) -> Masks:
    """Return the masks that make output d depend on x_1, ..., x_{d-1} only (for eq. 2).

        M1[k, d] = 1 iff m(k) >= d
        M2[d, k] = 1 iff d > m(k)        for d = 1..D and k = 0..H-1

    The first output is therefore a constant.

    Args:
        dim: D, >= 1.
        hidden: H, >= 1.
        kind: "even" spreads the degrees over 1..D-1, m(k) = 1 + floor(k (D - 1) / H); "random"
            draws them uniformly from 1..D-1.
        seed: the run's seed, for these draws.
    """
    degrees = 1 + torch.arange(hidden) * (dim - 1) // hidden
    if kind == "random":
        draws = streams.generator(seed, "feddisk.masks")
        degrees = torch.from_numpy(draws.integers(1, max(dim, 2), hidden))
    inputs = torch.arange(1, dim + 1)
    return Masks((degrees[:, None] >= inputs).float(), (inputs[:, None] > degrees).float())


def initial(dim: int, hidden: int, draw: torch.Generator) -> Tree:
    """Return a MADE with entries uniform in +-1/sqrt(fan-in), torch's rule for linear layers."""
    shapes = {"W1": (hidden, dim), "b1": (hidden,), "W2": (dim, hidden), "b2": (dim,)}
    fan_in = {"W1": dim, "b1": dim, "W2": hidden, "b2": hidden}
    return {
        name: (2 * torch.rand(shape, generator=draw) - 1) / fan_in[name] ** 0.5
        for name, shape in shapes.items()
    }


def logits(made: AnyTree, mask: Masks, x: Tensor) -> Tensor:
    """Return the logits of P(x_d = 1 | x_<d) (eq. 2) for x (n, D), shape (n, D)."""
    hidden = nn.functional.linear(x, made["W1"] * mask.m1, made["b1"]).relu()
    return nn.functional.linear(hidden, made["W2"] * mask.m2, made["b2"])


def nll(made: AnyTree, mask: Masks, x: Tensor) -> Tensor:
    """Return sum_d BCE(x_d, out_d) for each sample of x (n, D), shape (n,) (eq. 2).

    For binary x this is the negative log likelihood; greyscale x act as soft targets. All values
    must be in [0, 1].
    """
    out = logits(made, mask, x)
    return nn.functional.binary_cross_entropy_with_logits(out, x, reduction="none").sum(1)


@torch.no_grad()
def sample(made: AnyTree, mask: Masks, uniforms: Tensor) -> Tensor:
    """Return ancestral samples (eq. 2), x_d = 1 iff U_d < P(x_d = 1 | x_<d), shape (n, D).

    The cost is O(nHD): each drawn input is added to the hidden units, which are not recomputed.

    Args:
        made: the MADE to sample from.
        mask: its masks.
        uniforms: (n, D) the U, uniform draws in [0, 1).
    """
    columns = (made["W1"] * mask.m1).T.contiguous()
    rows = made["W2"] * mask.m2
    hidden = made["b1"].expand(len(uniforms), -1).clone()
    x = torch.empty_like(uniforms)
    for d in range(uniforms.shape[1]):
        x[:, d] = uniforms[:, d] < torch.sigmoid(hidden.relu() @ rows[d] + made["b2"][d])
        hidden.addr_(x[:, d], columns[d])
    return x


# ---- training
def fit_made(
    made: Tree,
    mask: Masks,
    x: Tensor,
    held_out: Tensor,
    settings: LocalSettings,
    patience: int,
    draws: torch.Generator,
    batcher: Batcher | None = None,
) -> Tree:
    """Fit a MADE to x (n, D), and return its weights after the best epoch.

    Args:
        made: the initial weights, which are changed in place.
        mask: the masks.
        x: (n, D) the training samples.
        held_out: (m, D) the validation samples; the best epoch has the lowest loss on them.
        settings: the settings of the training.
        patience: the training stops after so many epochs without a lower validation loss.
        draws: for the order of the samples.
        batcher: as in `fedhet.core.client.descent.descend`.
    """
    stop = EarlyStopping(patience)
    best = made
    for _ in made_epochs("local MADE", made, mask, x, settings, draws, batcher):
        stopped = stop(mean_nll(made, mask, held_out))
        if not stop.stale:
            best = trees.map(lambda t: t.detach().clone(), made)
        if stopped:
            break
    return best


def made_epochs(
    name: str,
    made: Tree,
    mask: Masks,
    x: Tensor,
    settings: LocalSettings,
    draws: torch.Generator,
    batcher: Batcher | None = None,
) -> Iterator[float]:
    """Train a MADE in place by maximum likelihood on x (n, D), as `epochs_of` does."""

    def terms(
        module: nn.Module | None, params: Tree, own: list[Prepared], columns: tuple[Tensor, ...]
    ) -> Values:
        return nll(params, Masks(**own[0]), *columns), None, {}

    optimizer = optimizers.make(settings, list(made.values()))
    own = [mask._asdict()]  # runs that share a batch (`engine.fused`) may have different masks
    descent = Descent(made, (x,), terms, optimizer, settings.batch_size, own=own, common=name)
    return epochs_of(name, descent, settings.epochs, draws, batcher)


@torch.no_grad()
def mean_nll(made: Tree, mask: Masks, x: Tensor) -> float:
    """Return the mean negative log likelihood of x (n, D)."""
    return float(nll(made, mask, x).double().mean())


def classify(
    zeros: Tensor,
    ones: Tensor,
    at: Tensor,
    hidden: int,
    settings: LocalSettings,
    stop: EarlyStopping,
    draws: torch.Generator,
    batcher: Batcher | None = None,
) -> Tensor:
    """Train a binary classifier on `zeros` (label 0) and `ones` (label 1), and evaluate it at `at`.

    The classifier has one hidden layer with ReLU. Its initial weights are drawn from torch's global
    random stream.

    Args:
        zeros: (n0, D) the samples with label 0.
        ones: (n1, D) the samples with label 1.
        at: (n, D) the samples to classify.
        hidden: the number of hidden units.
        settings: the settings of the training.
        stop: is called with each epoch's mean loss, and ends the training.
        draws: for the order of the samples.
        batcher: as in `fedhet.core.client.descent.descend`.

    Returns:
        (n,) the probability of label 1 for each row of `at`.
    """
    x = torch.cat([zeros, ones])
    y = torch.cat([x.new_zeros(len(zeros)), x.new_ones(len(ones))]).long()
    net = nn.Sequential(nn.Linear(x.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, 2))
    net = net.to(x.device)

    def terms(
        module: nn.Module | None, params: Tree, own: list[Prepared], columns: tuple[Tensor, ...]
    ) -> Values:
        assert module is not None
        z, label = columns
        return nn.functional.cross_entropy(module(z), label, reduction="none"), None, {}

    params = dict(net.named_parameters())
    optimizer = optimizers.make(settings, list(params.values()))
    descent = Descent(
        params, (x, y), terms, optimizer, settings.batch_size, module=net, common="classifier"
    )
    for loss in epochs_of("classifier", descent, settings.epochs, draws, batcher):
        if stop(loss):
            break
    with torch.no_grad():
        return net(at).softmax(1)[:, 1]


def epochs_of(
    name: str,
    descent: Descent,
    epochs: int,
    draws: torch.Generator,
    batcher: Batcher | None = None,
) -> Iterator[float]:
    """Train for `epochs` epochs, and yield the mean loss of each epoch.

    Args:
        name: the name of the trained network, for the error message.
        descent: the parameters, the samples, the loss and the optimiser.
        epochs: the number of epochs.
        draws: for the order of the samples, which are shuffled anew in every epoch.
        batcher: as in `fedhet.core.client.descent.descend`.

    Raises:
        ValueError: the loss is NaN or infinite.
    """
    x = descent.columns[0]
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=draws).to(x.device)
        mean = float(descend(descent, [order], batcher)) / len(x)
        if not isfinite(mean):
            raise ValueError(f"the loss of the {name} is {mean}; a smaller learning rate may help")
        yield mean


# ---- from densities to weights
def density_ratio(p: Tensor, n_local: int, n_global: int, eps: float) -> Tensor:
    """Return the ratio r = p / (1 - p) n_local / n_global (eq. 16), shape (n,), float64.

    Args:
        p: (n,) the classifier's P(global | z), n >= 1.
        n_local: the number of local samples on which the classifier was trained, >= 1.
        n_global: the number of global samples on which the classifier was trained, >= 1.
        eps: p is clipped to [eps, 1 - eps].

    Raises:
        ValueError: a value of p is no probability.
    """
    if bad := (~((p >= 0) & (p <= 1))).nonzero().flatten().tolist():
        raise ValueError(
            f"{p[bad[0]]} at position {bad[0]} is not a probability; all must be in [0, 1]"
        )
    p = p.double().clamp(eps, 1 - eps)
    return p / (1 - p) * (n_local / n_global)


def sample_weights(r: Tensor, lo: float, hi: float, normalise: str) -> Tensor:
    """Return the sample weights w_k(x_i) (eq. 11), shape (n,).

    Args:
        r: (n,) the density ratios.
        lo: the lower bound to which r is clipped.
        hi: the upper bound to which r is clipped.
        normalise: "mean1" to divide by the mean, "minmax2" to scale to [0, 2], or "none". With
            "mean1" and "minmax2", constant ratios give weights of 1.
    """
    r = r.clamp(lo, hi)
    if normalise == "none":
        return r
    if (r == r[0]).all():
        return torch.ones_like(r)
    if normalise == "mean1":
        return r / r.mean()
    return 2 * (r - r.min()) / (r.max() - r.min())


def effective_size(w: Tensor) -> float:
    """Return the effective sample size (sum w)^2 / sum w^2 of weights w (n,), in [1, n].

    A mean over so many equally weighted samples has the same variance.
    """
    return float(w.sum() ** 2 / w.square().sum())
