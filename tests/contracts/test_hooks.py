"""Plug-ins: which hooks run, in which order, and what each of them means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedhet import trees
from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError
from fedhet.messages import Broadcast, Failure, Update
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.scaffold import Scaffold
from fedhet.plugin import Plugin
from fedhet.task import ClientData, Samples, Task
from fedhet.training import Batch
from fedhet.trees import Tree

Federation = Callable[..., Any]


class Noting(Plugin):
    """Notes every hook; changes nothing."""

    def __init__(self, name: str, notes: list[str]) -> None:
        super().__init__()
        self.name, self.notes = name, notes  # type: ignore[misc]

    def note(self, hook: str) -> None:
        self.notes.append(f"{hook} {self.name}")

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        self.note("outgoing")

    def incoming(self, updates: Iterator[Update], old: Tree) -> Iterator[Update]:
        self.note("incoming")
        return updates

    def merged(self, new: Tree, old: Tree) -> Tree:
        self.note("merged")
        assert all(t.dtype == torch.float64 for t in new.values())
        return new

    def prepare(self, msg: Broadcast) -> None:
        self.note("prepare")

    def losses(self, batch: Batch) -> Tensor:
        self.note("losses")
        return torch.zeros(len(batch.y))

    def penalty(self, batch: Batch) -> Tensor:
        self.note("penalty")
        return torch.zeros(())

    def gradient(self, grads: list[Tensor]) -> None:
        self.note("gradient")

    def scale(self, grads: list[Tensor]) -> None:
        self.note("scale")

    def finish(self, update: Update) -> None:
        self.note("finish")


def test_the_order_of_hooks(federation: Federation) -> None:
    """Forward on the way out, reversed on the way back; shared work once per step, not per
    client."""
    notes: list[str] = []
    run = federation(
        toy_task(1), FedAvg, plugins=lambda: [Noting("a", notes), Noting("b", notes)], batch_size=12
    )
    run.step()
    both = ["outgoing", "prepare", "losses", "penalty", "gradient", "scale"]
    back = ["finish", "incoming", "merged"]
    assert notes == [f"{hook} {name}" for hook in both for name in "ab"] + [
        f"{hook} {name}" for hook in back for name in "ba"
    ]
    notes.clear()
    run = federation(toy_task(3), FedAvg, plugins=lambda: [Noting("a", notes)])
    run.step()
    assert [
        notes.count(f"{hook} a") for hook in ("outgoing", "prepare", "finish", "incoming", "merged")
    ] == [1, 3, 3, 1, 1]


def test_noting_changes_nothing(federation: Federation) -> None:
    assert (
        federation(toy_task(), FedAvg, plugins=lambda: [Noting("a", [])]).run().sha256
        == federation(toy_task(), FedAvg).run().sha256
    )


class Schedule(Plugin):
    name = "schedule"

    def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
        msg.local = replace(msg.local, lr=msg.local.lr * 0.5 ** (msg.step - 1))


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
def test_a_plugin_can_schedule_the_local_settings(federation: Federation, cls: type) -> None:
    """As lr_decay does, on both sides; that servers compute with the decayed rate is shown by
    test_scaffold and test_fednova."""
    found = federation(toy_task(), cls, plugins=lambda: [Schedule()], rounds=3).run()
    assert found.sha256 == federation(toy_task(), cls, rounds=3, lr_decay=0.5).run().sha256


def test_the_cosine_schedule(federation: Federation) -> None:
    """1, .75, .25 of the rate in three rounds, decay on top."""
    seen: list[float] = []

    class Seeing(Plugin):
        name = "seeing"

        def outgoing(self, msg: Broadcast, cohort: list[int]) -> None:
            seen.append(msg.local.lr)

    federation(
        toy_task(),
        FedAvg,
        plugins=lambda: [Seeing()],
        rounds=3,
        lr=0.4,
        lr_decay=0.5,
        schedule="cosine",
    ).run()
    assert seen == pytest.approx([0.4, 0.75 * 0.2, 0.25 * 0.1])


class Twice(Plugin):
    name = "twice"

    def sample_weights(self, data: Samples) -> Tensor:
        return torch.full((len(data),), 2.0)


class Scaled(Plugin):
    name = "scaled"

    def scale(self, grads: list[Tensor]) -> None:
        torch._foreach_mul_(grads, 2.0)


@pytest.mark.parametrize("plugin", [Twice, Scaled])
def test_twice_the_loss_is_twice_the_rate(federation: Federation, plugin: type[Plugin]) -> None:
    """Bit for bit, as 2 is a power of two."""
    found = federation(toy_task(), FedAvg, plugins=lambda: [plugin()], lr=0.1, rounds=2).run()
    assert found.sha256 == federation(toy_task(), FedAvg, lr=0.2, rounds=2).run().sha256


class Nothing(Plugin):
    name = "nothing"

    def sample_weights(self, data: Samples) -> Tensor:
        return torch.zeros(len(data))


class Downhill(Plugin):
    """The sum of all weights as a penalty: its gradient is one everywhere."""

    name = "downhill"

    def penalty(self, batch: Batch) -> Tensor:
        return sum((p.sum() for p in self.client.site.parameters), torch.zeros(()))


def test_sample_weights_multiply_losses_and_not_penalties(federation: Federation) -> None:
    run = federation(
        toy_task(1),
        FedAvg,
        plugins=lambda: [Nothing(), Downhill()],
        lr=0.25,
        batch_size=4,
        epochs=2,
    )
    before = trees.map(torch.clone, run.model)
    run.step()
    for name in before:  # two epochs of 12 samples in batches of 4
        torch.testing.assert_close(run.model[name], before[name] - 6 * 0.25, rtol=1e-6, atol=1e-6)


class ByIndex(Plugin):
    """Only the samples of class 1 count."""

    name = "by_index"

    def sample_weights(self, data: Samples) -> Tensor:
        return data.y.float()

    def losses(self, batch: Batch) -> Tensor:
        assert torch.equal(self.client.data.x[batch.index], batch.x) and torch.equal(
            self.client.data.y[batch.index], batch.y
        )
        assert batch.z is not None and torch.equal(
            self.client.site.model.head(batch.z), batch.logits
        )
        return torch.zeros(len(batch.y))


class ByLoss(Plugin):
    """The same, by taking the losses of class 0 away again."""

    name = "by_loss"

    def losses(self, batch: Batch) -> Tensor:
        return (batch.y - 1) * self.client.site.task.criterion(batch.logits, batch.y)


def test_sample_weights_find_their_samples_in_every_batch(federation: Federation) -> None:
    by_index, by_loss, plain = (
        federation(toy_task(), FedAvg, plugins=plugins, epochs=3).run()
        for plugins in (lambda: [ByIndex()], lambda: [ByLoss()], list)
    )
    for name, tensor in by_loss.model.items():
        torch.testing.assert_close(by_index.model[name], tensor, rtol=1e-5, atol=1e-6)
    assert float((plain.model["head.bias"] - by_loss.model["head.bias"]).abs().max()) > 0.01


class Doubling(Plugin):
    """Every sample twice, at training."""

    name = "doubling"

    def data(self, raw: Samples) -> Samples:
        # images, before normalisation
        assert float(raw.x.min()) >= 0 and 0.5 < float(raw.x.max()) <= 1
        return Samples(torch.cat([raw.x, raw.x]), torch.cat([raw.y, raw.y]))


def test_data_of_a_plugin_are_trained_on_but_not_counted(federation: Federation) -> None:
    """Raw data in [0, 1] go in, normalised ones are trained on; n_k and FedNorm's latents are of
    the real samples."""
    task = toy_task()
    images = [
        ClientData(Samples((c.train.x * 255).to(torch.uint8), c.train.y)) for c in task.clients
    ]
    task = Task(task.model, task.criterion, images, None, 2, transform=lambda x: 10 * x - 5)
    run = federation(
        task, Scaffold, plugins=lambda: [Doubling(), FedNormPlugin(z_when="before_training")]
    )
    plain = federation(task, Scaffold, plugins=lambda: [FedNormPlugin(z_when="before_training")])
    msg, other = run.strategy.plan(1)[0], plain.strategy.plan(1)[0]
    client = run.client()
    update, expected = client.handle(msg), plain.client().handle(other)
    assert isinstance(update, Update) and isinstance(expected, Update), (update, expected)
    assert update.num_examples == expected.num_examples == 24
    assert (update.extras["scaffold.steps"], expected.extras["scaffold.steps"]) == (12, 6)
    assert torch.equal(update.tensor("fednorm.z"), expected.tensor("fednorm.z"))
    assert float(client.data.x.min()) < -1 and len(client.data) == 48


class Lonely(Plugin):
    name = "lonely"

    @property
    def refuses(self) -> dict[str, str]:
        return {"fedprox": "it pulls", "scaffold": "it corrects"}


class Choosy(FedAvg):
    name = "choosy"

    @property
    def refuses(self) -> dict[str, str]:
        return {"lonely": "no company"}


@pytest.mark.parametrize(
    ("cls", "plugins", "said"),
    [
        (FedAvg, lambda: [Lonely(), FedProxPlugin()], "'lonely' refuses 'fedprox': it pulls"),
        (FedAvg, lambda: [FedProxPlugin(), Lonely()], "'lonely' refuses 'fedprox': it pulls"),
        (Scaffold, lambda: [Lonely()], "'lonely' refuses 'scaffold': it corrects"),
        (Choosy, lambda: [Lonely()], "choosy refuses plugin 'lonely': no company"),
    ],
)
def test_refusals(
    federation: Federation, cls: type, plugins: Callable[[], list[Plugin]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        federation(toy_task(), cls, plugins=plugins)


class Halving(Plugin):
    """Takes half of what the merge proposes."""

    name = "halving"

    def merged(self, new: Tree, old: Tree) -> Tree:
        return trees.map(lambda t: t / 2, trees.add(new, old))


def test_merged_comes_after_the_merge(federation: Federation) -> None:
    half, full = (
        federation(toy_task(), FedAvg, plugins=plugins) for plugins in (lambda: [Halving()], list)
    )
    start = trees.map(torch.clone, full.model)
    half.step()
    full.step()
    for name in start:
        torch.testing.assert_close(
            half.model[name], (full.model[name] + start[name]) / 2, rtol=1e-6, atol=1e-7
        )


class Zeroing(Plugin):
    """Gives only the smallest client weight; a generator, read once."""

    name = "zeroing"

    def incoming(self, updates: Iterator[Update], old: Tree) -> Iterator[Update]:
        for update in updates:
            update.weight = float(update.pid == 0)
            yield update


@pytest.mark.parametrize("needs_all", [False, True])
def test_aggregation_reads_the_weight_and_never_the_number_of_samples(
    federation: Federation, needs_all: bool
) -> None:
    """Also of buffers."""
    Zeroing.needs_all = needs_all
    run = federation(toy_task(norm=True), FedAvg, plugins=lambda: [Zeroing()])
    heard: dict[int, Update] = {}

    def listen(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        heard.update({reply.pid: reply for reply in replies})
        return replies

    run.step(listen)
    for name, tensor in run.model.items():
        expected = (
            heard[0].weights[name]
            if tensor.is_floating_point()
            else max(u.weights[name] for u in heard.values())
        )  # type: ignore[index]
        assert torch.equal(tensor, expected)


class Weighing(FedAvg):
    """Looks at the weights that its merge gets."""

    needs_all = True

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        held = list(updates)
        self.weights_seen = {update.pid: update.weight for update in held}
        return super().merge(iter(held), old)


def test_weights_sum_to_one_over_those_who_replied(federation: Federation) -> None:
    """12, 16 and 24 samples; the client with 20 is left out."""
    run = federation(toy_task(), Weighing, on_failure="skip")
    run.step(
        lambda plan, replies: [
            Failure(2, "train", 1, "gone") if reply.pid == 2 else reply for reply in replies
        ]
    )
    assert run.strategy.weights_seen == {
        pid: pytest.approx(n / 52, rel=1e-15) for pid, n in ((3, 24), (1, 16), (0, 12))
    }
