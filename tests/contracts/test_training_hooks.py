"""Plug-ins: what the hooks of local training mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedhet.core import trees
from fedhet.core.client.context import ClientContext
from fedhet.core.client.training import Batch
from fedhet.core.errors import RunFailed
from fedhet.core.kernel import Message, Plugin, State, Term
from fedhet.core.messages import Upload
from fedhet.core.task import ClientData, Samples, Task
from fedhet.core.trees import AnyTree, Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold

Federation = Callable[..., Any]


def adding(kind: str, f: Callable[..., Any], **facts: Any) -> Plugin:
    """A plug-in with one term, whose `own` are the client's samples."""

    @dataclass(frozen=True, kw_only=True)
    class Adding(Plugin):
        name = f.__name__
        breaks = facts

        def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
            return [Term(kind, f, {"x": ctx.data.x, "y": ctx.data.y})]

    return Adding()


def weights_of_two(params: AnyTree, batch: None, own: Tree) -> Tensor:
    """Every sample's loss counts twice."""
    return torch.full((len(own["y"]),), 2.0)


def doubled(params: AnyTree, batch: None, own: Tree) -> Tree:
    """Every gradient is doubled."""
    return dict.fromkeys(toy_task().model().state_dict(), torch.tensor(2.0))


def step_of_two(params: AnyTree, batch: None, own: Tree) -> Tree:
    """Every step is twice as long."""
    return {name: torch.full_like(p, 2.0) for name, p in params.items()}


def weights_of_zero(params: AnyTree, batch: None, own: Tree) -> Tensor:
    """No sample's loss counts."""
    return torch.zeros(len(own["y"]))


def downhill(params: AnyTree, batch: Batch, own: Tree) -> Tensor:
    """The sum of all weights as a penalty: its gradient is one everywhere."""
    return sum((p.sum() for p in params.values()), torch.zeros(()))


def upwards(params: AnyTree, batch: None, own: Tree) -> Tree:
    """The gradient of `downhill`."""
    return trees.map(torch.ones_like, params)


def of_class_one(params: AnyTree, batch: None, own: Tree) -> Tensor:
    """Only the samples of class 1 count."""
    return own["y"].float()


def looks(params: AnyTree, batch: Batch, own: Tree) -> Tensor:
    """Checks what a batch holds."""
    assert torch.equal(own["x"][batch.index], batch.x)
    assert torch.equal(own["y"][batch.index], batch.y)
    assert torch.equal(batch.workspace.model.head(batch.z), batch.logits)  # type: ignore[operator]
    return torch.zeros(len(batch.y))


def without_class_zero(params: AnyTree, batch: Batch, own: Tree) -> Tensor:
    """Only the samples of class 1 count: the losses of class 0 are subtracted again."""
    return (batch.y - 1) * batch.workspace.task.criterion(batch.logits, batch.y)


def of_batch(params: AnyTree, batch: Batch, own: Tree) -> Tensor:
    return batch.y.float()


def scalar(params: AnyTree, batch: Batch, own: Tree) -> Tensor:
    return batch.logits.mean()


def scalar_and_record(params: AnyTree, batch: Batch, own: Tree) -> tuple[Tensor, Tree]:
    return batch.logits.mean(), {"mean": batch.logits.mean()}


def no_tensor(params: AnyTree, batch: Batch, own: Tree) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("kind", "f", "said"),
    [
        ("penalty", of_batch, r"torch.float32 .*\(4,\).* a scalar\b"),
        ("loss", scalar, r"torch.float32 .*\(\).*\(4,\) .*\(B,\)"),
        ("loss", scalar_and_record, r"torch.float32 .*\(\)"),
        ("loss", no_tensor, "a float"),
        ("penalty", no_tensor, "a float"),
    ],
)
def test_a_loss_or_penalty_of_another_shape_is_refused(
    federation: Federation, kind: str, f: Callable[..., Any], said: str
) -> None:
    run = federation(toy_task(), FedAvg, plugins=[adding(kind, f)])
    with pytest.raises(RunFailed, match=f"TypeError: .*{kind} {f.__name__} .*{said}"):
        run.step()


TWICE = {
    "weight": adding("weight", weights_of_two),
    "scale": adding("scale", doubled, **{"plain steps": "it doubles the gradient"}),
    "step": adding("step", step_of_two, **{"sgd steps": "it doubles the step"}),
}


@pytest.mark.parametrize("kind", TWICE)
def test_twice_the_loss_is_twice_the_rate(federation: Federation, kind: str) -> None:
    """Bit for bit, as 2 is a power of two, but for a step, which is a difference of weights."""
    twice = federation(toy_task(), FedAvg, plugins=lambda: [TWICE[kind]], lr=0.1, rounds=2).run()
    faster = federation(toy_task(), FedAvg, lr=0.2, rounds=2).run()
    assert kind == "step" or twice.sha256 == faster.sha256
    for name, expected in faster.model.items():
        torch.testing.assert_close(twice.model[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "term", [("penalty", downhill), ("gradient", upwards)], ids=["penalty", "gradient"]
)
def test_sample_weights_multiply_losses_and_not_penalties(
    federation: Federation, term: tuple[str, Callable[..., Any]]
) -> None:
    run = federation(
        toy_task(1),
        FedAvg,
        plugins=lambda: [adding("weight", weights_of_zero), adding(*term)],
        lr=0.25,
        batch_size=4,
        epochs=2,
    )
    before = trees.map(torch.clone, run.model)
    run.step()
    for name in before:  # two epochs of 12 samples in batches of 4
        expected = before[name] - 6 * 0.25
        torch.testing.assert_close(run.model[name], expected, rtol=1e-6, atol=1e-6)


def test_sample_weights_meet_their_samples_in_every_batch(federation: Federation) -> None:
    def run(*plugins: Plugin) -> Any:
        return federation(toy_task(), FedAvg, plugins=lambda: plugins, epochs=3).run()

    by_weight = run(adding("weight", of_class_one), adding("loss", looks))
    by_loss = run(adding("loss", without_class_zero))
    for name, expected in by_loss.model.items():
        torch.testing.assert_close(by_weight.model[name], expected, rtol=1e-5, atol=1e-6)
    apart = (run().model["head.bias"] - by_loss.model["head.bias"]).abs().max()
    assert float(apart) > 0.01


@dataclass(frozen=True, kw_only=True)
class Doubling(Plugin):
    """Trains on every sample twice."""

    name = "doubling"

    def data(self, samples: Samples, state: State) -> Samples:
        x, y = samples.x, samples.y
        assert float(x.min()) >= 0 and 0.5 < float(x.max()) <= 1  # images, before normalisation
        return Samples(torch.cat([x, x]), torch.cat([y, y]))


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
    update = client.handle(doubled.strategy.plan(1).messages[0])
    expected = plain.client().handle(plain.strategy.plan(1).messages[0])
    assert isinstance(update, Upload) and isinstance(expected, Upload), (update, expected)
    assert update.num_examples == expected.num_examples == 24
    assert update.extras["scaffold.steps"] == 12
    assert expected.extras["scaffold.steps"] == 6
    assert torch.equal(update.tensor("fednorm.z"), expected.tensor("fednorm.z"))
    assert len(client.ctx.data) == 48 and float(client.ctx.data.x.min()) < -1
