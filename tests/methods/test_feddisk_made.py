"""FedDisk: when the training of the global MADE stops, and which MADE is kept."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from methods.feddisk_task import Make, ctx, phases, plugins

from fedhet.core.errors import RunFailed
from fedhet.core.trees import Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.feddisk import FedDisk, FedDiskPlugin, densities


def held_out_loss(run: Any, made: Tree) -> float:
    """The n-weighted mean loss of a MADE over held-out tenths of the training data."""
    mask = densities.masks(4, 8)
    sizes = run.workspace.task.sizes
    total = 0.0
    for pid, n in enumerate(sizes):
        x = run.workspace.task.clients[pid].train.x
        train, held_out = FedDiskPlugin()._split(ctx(run, pid), pid, x)
        assert len(held_out) == round(0.1 * n)
        assert len(train) + len(held_out) == n
        total += n * float(densities.nll(made, mask, held_out).double().mean())
    return total / sum(sizes)


def test_the_best_made_is_restored(federation: Make) -> None:
    """A step size that overshoots.

    The validation loss of round t is that of the MADE which clients received in round t.
    """
    overshooting = plugins(
        made_optimizer="sgd",
        made_lr=1.2,
        made_batch_size=4,
        made_local_epochs=8,
        made_max_rounds=30,
        made_patience=2,
    )
    run = federation(toy_task(5), FedAvg, plugins=overshooting)
    received = []
    losses = []
    while True:
        received.append(dict(run.strategy.weights["density"]))
        run.step()
        if run.current.entry.name != "feddisk.density":
            break
        losses.append(run.current.recorded["feddisk"]["val_loss"])
    done = len(losses)
    best = int(np.argmin(losses))
    assert 0 < best == done - 1 - 2
    assert done < 30
    assert phases(run)["feddisk.density"] == done == run.current.recorded["feddisk"]["E1"]
    restored = run.strategy.weights["density"]
    assert all(torch.equal(t, received[best][name]) for name, t in restored.items())
    assert losses[best] == pytest.approx(held_out_loss(run, received[best]), rel=1e-12)


def test_a_loss_that_falls_to_the_end_keeps_the_newest_made(federation: Make) -> None:
    run = federation(toy_task(), FedAvg, plugins=plugins(made_lr=1e-3))
    for _ in range(3):
        run.step()
    newest = dict(run.strategy.weights["density"])
    run.step()
    assert run.current.entry.name == "feddisk.weigh"
    assert all(torch.equal(t, newest[name]) for name, t in run.strategy.weights["density"].items())


def test_without_a_validating_client_all_rounds_are_executed(
    federation: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fedhet"):
        run = federation(toy_task(), FedDisk, plugins=plugins(min_samples=99)).run()
    assert "no client has enough samples" in caplog.text
    assert phases(run) == {"feddisk.density": 3, "feddisk.weigh": 1, "train": 1}


@pytest.mark.parametrize("value", [float("nan"), -0.5])
def test_a_loss_that_none_can_be_is_refused_from_small_clients_too(
    federation: Make, value: float
) -> None:
    """A negative log-likelihood of bits is a number >= 0."""

    def invent(plan: list[Any], replies: list[Any]) -> list[Any]:
        replies[-1].extras["feddisk.val"] = value
        return replies

    failure = rf"client 0 .*feddisk\.density.*'feddisk\.val' (is|has .*value) {value}"
    with pytest.raises(RunFailed, match=failure):
        federation(toy_task(), FedAvg, plugins=plugins(min_samples=13)).step(alter=invent)


def test_a_client_that_should_validate_must_send_the_loss(federation: Make) -> None:
    def silent(plan: list[Any], replies: list[Any]) -> list[Any]:
        del replies[1].extras["feddisk.val"]
        return replies

    failure = r"client 2 .*feddisk\.density.*'feddisk\.val' .*missing"
    with pytest.raises(RunFailed, match=failure):
        federation(toy_task(), FedAvg, plugins=plugins()).step(alter=silent)


def test_a_made_that_diverges_names_client_and_phase(federation: Make) -> None:
    diverging = plugins(made_optimizer="sgd", made_lr=1e38)
    failure = r"client 3 .*feddisk\.density.*(loss .*global MADE|NaN .*infinite)"
    with pytest.raises(RunFailed, match=failure):
        federation(toy_task(), FedDisk, plugins=diverging).step()
