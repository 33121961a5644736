"""Training of FedDisk's small networks: early stopping, the local MADE, and the classifier."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedhet.core.client.descent import Descent, EarlyStopping
from fedhet.core.client.optimizers import SGD
from fedhet.core.messages import LocalSettings
from fedhet.core.trees import Tree
from fedhet.methods.feddisk import densities


def test_early_stopping_counts_the_losses_that_do_not_beat_the_best() -> None:
    stop = EarlyStopping(patience=2, tolerance=0.1)
    stopped = [stop(loss) for loss in (1.0, 0.95, 0.8, 0.75, 0.71)]
    assert stopped == [False, False, False, False, True]
    assert (stop.best, stop.stale) == (0.8, 2)


def test_a_loss_that_is_not_finite_is_reported() -> None:
    w = torch.ones(1, requires_grad=True)
    descent = Descent(
        {"w": w},
        (torch.full((3,), math.nan),),
        lambda module, params, own, columns: (params["w"] * columns[0], None, {}),
        SGD([w], LocalSettings(lr=0.1)),
        size=3,
    )
    epochs = densities.epochs_of("thing", descent, 1, torch.Generator())
    with pytest.raises(ValueError, match=r"the thing .*nan"):
        next(epochs)


@pytest.mark.parametrize("patience", [3, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_local_made_is_that_of_the_epoch_with_the_lowest_held_out_loss(patience: int) -> None:
    """The same epochs are run again, all of them.

    The result must be the best epoch up to the first that was not beaten by the following
    `patience` epochs.
    """
    g = torch.Generator().manual_seed(0)
    left = torch.rand(40, 4, generator=g).round()
    flips = (torch.rand(40, 4, generator=g) < 0.2).float()
    data = torch.cat([left, (left - flips).abs()], 1)  # the right half is a noisy copy of the left
    x, held, mask = data[:20], data[20:], densities.masks(8, 20)
    settings = LocalSettings(lr=0.02, epochs=120, batch_size=4, optimizer="adam")

    def fresh() -> Tree:
        made = densities.initial(8, 20, torch.Generator().manual_seed(1))
        return {name: t.requires_grad_() for name, t in made.items()}

    def draws() -> torch.Generator:
        return torch.Generator().manual_seed(2)

    fitted = densities.fit_made(fresh(), mask, x, held, settings, patience, draws())
    again, losses, states = fresh(), [], []
    for _ in densities.made_epochs("x", again, mask, x, settings, draws()):
        losses.append(densities.mean_nll(again, mask, held))
        states.append({name: t.detach().clone() for name, t in again.items()})
    best = next(
        i
        for i in range(120)
        if losses[i] < min([*losses[:i], math.inf])
        and losses[i] <= min(losses[i : i + 1 + patience])
    )
    assert 0 < best < 116 and losses[-1] > losses[best]  # the case is one of over-fitting
    assert all(torch.equal(fitted[name], states[best][name]) for name in fitted)


def test_the_classifier_estimates_a_density_ratio() -> None:
    """Two overlapping groups on a line: p / (1 - p) is near the true ratios of 1/4 and 4."""
    zeros = torch.tensor([[0.0]] * 80 + [[1.0]] * 20)
    ones = torch.tensor([[0.0]] * 20 + [[1.0]] * 80)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        p = densities.classify(
            zeros,
            ones,
            torch.tensor([[0.0], [1.0]]),
            50,
            LocalSettings(lr=0.05, epochs=100, batch_size=32),
            EarlyStopping(10, 1e-4),
            torch.Generator().manual_seed(0),
        )
    np.testing.assert_allclose(p, [0.2, 0.8], atol=0.05)
