"""Plug-ins: what the hooks of local training mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedhet.core import trees
from fedhet.core.messages import Update
from fedhet.core.plugin import Plugin
from fedhet.core.task import ClientData, Samples, Task
from fedhet.core.training import Batch
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold

Federation = Callable[..., Any]


class WeightsOfTwo(Plugin):
    """Every sample's loss counts twice."""

    name = "weights_of_two"

    def sample_weights(self, data: Samples) -> Tensor:
        return torch.full((len(data),), 2.0)


class Doubled(Plugin):
    """Every gradient is doubled."""

    name = "doubled"

    def scale(self, grads: Tree, own: Prepared) -> None:
        torch._foreach_mul_(list(grads.values()), 2.0)


@pytest.mark.parametrize("plugin", [WeightsOfTwo, Doubled])
def test_twice_the_loss_is_twice_the_rate(federation: Federation, plugin: type[Plugin]) -> None:
    """Bit for bit, as 2 is a power of two."""
    doubled = federation(toy_task(), FedAvg, plugins=lambda: [plugin()], lr=0.1, rounds=2).run()
    faster = federation(toy_task(), FedAvg, lr=0.2, rounds=2).run()
    assert doubled.sha256 == faster.sha256


class WeightsOfZero(Plugin):
    """No sample's loss counts."""

    name = "weights_of_zero"

    def sample_weights(self, data: Samples) -> Tensor:
        return torch.zeros(len(data))


class Downhill(Plugin):
    """The sum of all weights as a penalty: its gradient is one everywhere."""

    name = "downhill"

    def penalty(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        return sum((p.sum() for p in params.values()), torch.zeros(()))


def test_sample_weights_multiply_losses_and_not_penalties(federation: Federation) -> None:
    run = federation(
        toy_task(1),
        FedAvg,
        plugins=lambda: [WeightsOfZero(), Downhill()],
        lr=0.25,
        batch_size=4,
        epochs=2,
    )
    before = trees.map(torch.clone, run.model)
    run.step()
    for name in before:  # two epochs of 12 samples in batches of 4
        expected = before[name] - 6 * 0.25
        torch.testing.assert_close(run.model[name], expected, rtol=1e-6, atol=1e-6)


class ByWeight(Plugin):
    """Only the samples of class 1 count; also checks what a batch holds."""

    name = "by_weight"

    def sample_weights(self, data: Samples) -> Tensor:
        return data.y.float()

    def losses(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        data = self.client.data
        assert torch.equal(data.x[batch.index], batch.x)
        assert torch.equal(data.y[batch.index], batch.y)
        assert torch.equal(self.client.workspace.model.head(batch.z), batch.logits)
        return torch.zeros(len(batch.y))


class ByLoss(Plugin):
    """Only the samples of class 1 count, because the losses of class 0 are subtracted again."""

    name = "by_loss"

    def losses(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        return (batch.y - 1) * self.client.workspace.task.criterion(batch.logits, batch.y)


def test_sample_weights_meet_their_samples_in_every_batch(federation: Federation) -> None:
    by_weight = federation(toy_task(), FedAvg, plugins=lambda: [ByWeight()], epochs=3).run()
    by_loss = federation(toy_task(), FedAvg, plugins=lambda: [ByLoss()], epochs=3).run()
    plain = federation(toy_task(), FedAvg, epochs=3).run()
    for name, expected in by_loss.model.items():
        torch.testing.assert_close(by_weight.model[name], expected, rtol=1e-5, atol=1e-6)
    apart = (plain.model["head.bias"] - by_loss.model["head.bias"]).abs().max()
    assert float(apart) > 0.01


class Doubling(Plugin):
    """Trains on every sample twice."""

    name = "doubling"

    def data(self, raw: Samples) -> Samples:
        # images, before normalisation
        assert float(raw.x.min()) >= 0 and 0.5 < float(raw.x.max()) <= 1
        return Samples(torch.cat([raw.x, raw.x]), torch.cat([raw.y, raw.y]))


def test_data_of_a_plugin_are_trained_on_but_not_counted(federation: Federation) -> None:
    """A plug-in gets raw data in [0, 1] and the client trains on normalised data.

    n_k and FedNorm's latents are those of the real samples.
    """
    toy = toy_task()
    images = [
        ClientData(Samples((client.train.x * 255).to(torch.uint8)[:, None, None], client.train.y))
        for client in toy.clients
    ]

    def ready(x: torch.Tensor) -> torch.Tensor:
        return 10 * x.flatten(1) - 5

    task = Task(toy.model, toy.criterion, images, None, 2, transform=ready)

    def fednorm() -> FedNormPlugin:
        return FedNormPlugin(z_when="before_training")

    doubled = federation(task, Scaffold, plugins=lambda: [Doubling(), fednorm()])
    plain = federation(task, Scaffold, plugins=lambda: [fednorm()])
    client = doubled.client()
    update = client.handle(doubled.strategy.plan(1)[0])
    expected = plain.client().handle(plain.strategy.plan(1)[0])
    assert isinstance(update, Update) and isinstance(expected, Update), (update, expected)
    assert update.num_examples == expected.num_examples == 24
    assert update.extras["scaffold.steps"] == 12
    assert expected.extras["scaffold.steps"] == 6
    assert torch.equal(update.tensor("fednorm.z"), expected.tensor("fednorm.z"))
    assert len(client.data) == 48 and float(client.data.x.min()) < -1
