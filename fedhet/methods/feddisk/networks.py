"""The small networks of FedDisk, which know nothing of rounds: MADE and a binary classifier."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhet.core import optimizers, streams, trees
from fedhet.core.descent import Descent, Performer, Values, descend
from fedhet.core.messages import LocalSettings
from fedhet.core.phases import EarlyStopping
from fedhet.core.trees import Prepared, Tree
from fedhet.core.workspace import Workspace
from fedhet.maths import feddisk
from fedhet.maths.feddisk import Masks, nll


def initial_made(workspace: Workspace, dim: int, hidden: int) -> Tree:
    """The weights from which the global MADE and every local one start, on the workspace's device.

    They are a function of the run's seed.
    """
    draws = streams.torch_generator(workspace.seed, "feddisk.init")
    return trees.map(lambda t: t.to(workspace.device), feddisk.initial(dim, hidden, draws))


def fit_made(
    made: Tree,
    mask: Masks,
    x: Tensor,
    held_out: Tensor,
    settings: LocalSettings,
    patience: int,
    draws: torch.Generator,
    performer: Performer | None = None,
) -> Tree:
    """Fit a MADE to x (n, D), and return it as it was after its best epoch.

    Args:
        made: the initial weights, which are changed in place.
        mask: the masks.
        x: (n, D) the training samples.
        held_out: (m, D) the validation samples; the best epoch has the lowest loss on them.
        settings: how it is trained.
        patience: stop after so many epochs without a lower validation loss.
        draws: for the order of the samples.
        performer: as in `fedhet.core.descent.descend`.
    """
    stop = EarlyStopping(patience)
    best = made
    for _ in made_epochs("local MADE", made, mask, x, settings, draws, performer):
        stopped = stop(mean_nll(made, mask, held_out))
        if not stop.stale:
            best = trees.map(lambda t: t.detach().clone(), made)
        if stopped:
            break
    return best


def made_epochs(
    what: str,
    made: Tree,
    mask: Masks,
    x: Tensor,
    settings: LocalSettings,
    draws: torch.Generator,
    performer: Performer | None = None,
) -> Iterator[float]:
    """Train a MADE in place by maximum likelihood on x (n, D), as `epochs_of` does."""

    def terms(
        module: nn.Module | None, params: Tree, own: list[Prepared], columns: tuple[Tensor, ...]
    ) -> Values:
        return nll(params, Masks(**own[0]), *columns), None, {}

    optimizer = optimizers.make(settings, list(made.values()))
    own = [mask._asdict()]  # each run's masks are its own
    descent = Descent(made, (x,), terms, optimizer, settings.batch_size, own=own, common=what)
    return epochs_of(what, descent, settings.epochs, draws, performer)


@torch.no_grad()
def mean_nll(made: Tree, mask: Masks, x: Tensor) -> float:
    """The mean negative log likelihood of x (n, D)."""
    return float(nll(made, mask, x).double().mean())


def classify(
    zeros: Tensor,
    ones: Tensor,
    at: Tensor,
    hidden: int,
    settings: LocalSettings,
    stop: EarlyStopping,
    draws: torch.Generator,
    performer: Performer | None = None,
) -> Tensor:
    """Train a classifier to tell `zeros` from `ones`, and return P(1 | z) (n,) of the rows of `at`.

    It has one hidden layer with ReLU, and is initialised from torch's global random stream.

    Args:
        zeros: (n0, D) the samples of class 0.
        ones: (n1, D) the samples of class 1.
        at: (n, D) the samples to classify.
        hidden: the number of hidden units.
        settings: how it is trained.
        stop: ends the training, called with each epoch's mean loss.
        draws: for the order of the samples.
        performer: as in `fedhet.core.descent.descend`.
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
        return functional.cross_entropy(module(z), label, reduction="none"), None, {}

    params = dict(net.named_parameters())
    optimizer = optimizers.make(settings, list(params.values()))
    descent = Descent(
        params, (x, y), terms, optimizer, settings.batch_size, module=net, common="classifier"
    )
    for loss in epochs_of("classifier", descent, settings.epochs, draws, performer):
        if stop(loss):
            break
    with torch.no_grad():
        probabilities: Tensor = net(at).softmax(1)
    return probabilities[:, 1]


def epochs_of(
    what: str,
    descent: Descent,
    epochs: int,
    draws: torch.Generator,
    performer: Performer | None = None,
) -> Iterator[float]:
    """Train so many epochs, and yield the mean loss of each.

    Args:
        what: what is trained, for the error message.
        descent: how.
        epochs: the number of epochs.
        draws: for the order of the samples, which are shuffled anew in every epoch.
        performer: as in `fedhet.core.descent.descend`.

    Raises:
        ValueError: the loss is NaN or infinite.
    """
    x = descent.columns[0]
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=draws).to(x.device)
        mean = float(descend(descent, [order], performer)) / len(x)
        if not isfinite(mean):
            raise ValueError(f"the loss of the {what} is {mean}; a smaller learning rate may help")
        yield mean
