"""Aggregation weights: how plug-ins change them, and when they are normalised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedhet.core import trees
from fedhet.core.errors import RunFailed
from fedhet.core.kernel import Merged, Plugin, State, Step, Update
from fedhet.core.messages import Broadcast, Failure, Recorded, Upload
from fedhet.core.trees import Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedgen import FedGen

Federation = Callable[..., Any]
SIZES = {3: 24, 2: 20, 1: 16, 0: 12}  # the toy clients' training samples, in the cohort's order


@dataclass(frozen=True, kw_only=True)
class Weighing(FedAvg):
    """Remembers the weights that its merge gets."""

    breaks = {}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        everyone = list(updates)
        merged = super().merge(step, state, old, iter(everyone))
        return merged._replace(state={"seen": {update.pid: update.weight for update in everyone}})


@dataclass(frozen=True, kw_only=True)
class WeighingAll(Weighing):
    needs_all = True


@dataclass(frozen=True, kw_only=True)
class Scaled(Plugin):
    """Multiplies every weight by 8, one update after the other."""

    name = "scaled"
    needs = frozenset({"used weights"})

    def weight(self, step: Step, state: State, update: Update) -> float:
        return update.weight * 8


@dataclass(frozen=True, kw_only=True)
class Kept(Plugin):
    """Keeps the updates, and changes none."""

    name = "kept"
    needs_all = True


@dataclass(frozen=True, kw_only=True)
class Watching(Plugin):
    """Doubles every weight, and remembers the weights of the merge."""

    name = "watching"
    needs = frozenset({"used weights"})
    needs_all = True

    def weight(self, step: Step, state: State, update: Update) -> float:
        return update.weight * 2

    def after(
        self, step: Step, state: State, old: Tree, new: Tree, updates: Sequence[Update]
    ) -> Merged:
        return Merged(new, {"seen": {update.pid: update.weight for update in updates}})


@dataclass(frozen=True, kw_only=True)
class Zeroing(Plugin):
    """Gives weight to client 0 only."""

    name = "zeroing"
    needs = frozenset({"used weights"})

    def weight(self, step: Step, state: State, update: Update) -> float:
        return float(update.pid == 0)


@dataclass(frozen=True, kw_only=True)
class ZeroingAll(Plugin):
    """Does it with all updates at once."""

    name = "zeroing_all"
    needs = frozenset({"used weights"})

    def weights(
        self, step: Step, state: State, updates: Sequence[Update]
    ) -> tuple[list[float], Recorded]:
        return [float(update.pid == 0) for update in updates], {}


@pytest.mark.parametrize("plugin", [Zeroing, ZeroingAll])
def test_aggregation_reads_the_weight_and_never_the_number_of_samples(
    federation: Federation, plugin: type[Plugin]
) -> None:
    """Neither for parameters nor for buffers."""
    run = federation(toy_task(norm=True), FedAvg, plugins=lambda: [plugin()])
    heard: dict[int, Upload] = {}

    def listen(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        heard.update({reply.pid: reply for reply in replies})
        return replies

    run.step(listen)
    for name, tensor in run.model.items():
        if tensor.is_floating_point():
            expected = heard[0].weights[name]
        else:  # batch counters
            expected = max(update.weights[name] for update in heard.values())
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("plugins", [[], [Scaled], [Kept]], ids=["none", "scaled", "kept"])
def test_needs_all_gives_weights_that_sum_to_one(
    federation: Federation, plugins: list[type[Plugin]]
) -> None:
    """Whatever a plug-in does with them."""
    run = federation(toy_task(), WeighingAll, plugins=lambda: [plugin() for plugin in plugins])
    run.step()
    expected = {pid: pytest.approx(n / 72, rel=1e-15) for pid, n in SIZES.items()}
    assert run.strategy.run.states["method"]["seen"] == expected


def test_needs_all_leaves_failed_clients_out_of_the_sum(federation: Federation) -> None:
    run = federation(toy_task(), WeighingAll, on_failure="skip")

    def without_2(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        return [r if r.pid != 2 else Failure(2, "train", 1, "gone") for r in replies]

    run.step(without_2)
    expected = {pid: pytest.approx(n / 52, rel=1e-15) for pid, n in SIZES.items() if pid != 2}
    assert run.strategy.run.states["method"]["seen"] == expected


@pytest.mark.parametrize(("plugin", "factor"), [(Scaled, 8), (Kept, 1)])
def test_without_needs_all_weights_stay_relative(
    federation: Federation, plugin: type[Plugin], factor: int
) -> None:
    """To keep all updates is no request for normalised weights."""
    run = federation(toy_task(), Weighing, plugins=lambda: [plugin()]).run()
    assert run.strategy.run.states["method"]["seen"] == {
        pid: factor * n for pid, n in SIZES.items()
    }
    assert run.sha256 == federation(toy_task(), Weighing).run().sha256


def test_a_plugin_that_needs_all_has_the_weights_normalised(federation: Federation) -> None:
    """After every plug-in, also after those that come later and scale them."""
    run = federation(toy_task(), Weighing, plugins=lambda: [Scaled(), ZeroingAll()])
    run.step()
    assert run.strategy.run.states["method"]["seen"] == {3: 0.0, 2: 0.0, 1: 0.0, 0: 1.0}


@pytest.mark.parametrize(("method", "total"), [(Weighing, 1), (WeighingAll, 16 * 72)])
def test_after_sees_the_weights_of_the_merge(
    federation: Federation, method: type[Weighing], total: int
) -> None:
    """Also those of plug-ins that act later, and when it changes weights itself."""
    run = federation(toy_task(), method, plugins=lambda: [Scaled(), Watching()])
    run.step()
    states = run.strategy.run.states
    assert states["plugin.watching"]["seen"] == states["method"]["seen"]
    expected = {pid: pytest.approx(16 * n / total) for pid, n in SIZES.items()}
    assert states["method"]["seen"] == expected


@pytest.mark.parametrize("all_at_once", [True, False])
@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_without_a_positive_finite_sum(
    federation: Federation, weight: float, all_at_once: bool
) -> None:
    """They end the run, and the model is as it was."""

    @dataclass(frozen=True, kw_only=True)
    class Spoiling(Plugin):
        name = "spoiling"
        needs = frozenset({"used weights"})

        def weight(self, step: Step, state: State, update: Update) -> float:
            return weight

    @dataclass(frozen=True, kw_only=True)
    class SpoilingAll(Plugin):
        name = "spoiling"
        needs = frozenset({"used weights"})

        def weights(
            self, step: Step, state: State, updates: Sequence[Update]
        ) -> tuple[list[float], Recorded]:
            return [weight] * len(updates), {}

    spoiling = SpoilingAll() if all_at_once else Spoiling()
    run = federation(toy_task(), FedAvg, plugins=lambda: [spoiling])
    before = run.sha256
    with pytest.raises((RunFailed, ValueError), match="weight"):
        run.step()
    assert run.sha256 == before


def test_fedgen_mixes_the_clients_heads_by_normalised_weights(federation: Federation) -> None:
    """With ensemble=samples, where weights eight times as large would be another ensemble."""
    options = {"ensemble": "samples", "server_steps": 2, "hidden": 8, "noise_dim": 4}
    plain = federation(toy_task(), FedGen, options=options, rounds=2).run()
    scaled = federation(
        toy_task(), FedGen, plugins=lambda: [Scaled()], options=options, rounds=2
    ).run()
    assert scaled.sha256 == plain.sha256


@dataclass(frozen=True, kw_only=True)
class Halving(Plugin):
    """Goes half of the way that the merge proposes."""

    name = "halving"

    def after(
        self, step: Step, state: State, old: Tree, new: Tree, updates: Sequence[Update]
    ) -> Merged:
        return Merged(trees.map(lambda t: t / 2, trees.add(new, old)), state)


def test_after_comes_after_the_merge(federation: Federation) -> None:
    half = federation(toy_task(), FedAvg, plugins=lambda: [Halving()])
    full = federation(toy_task(), FedAvg)
    start = trees.map(torch.clone, full.model)
    half.step()
    full.step()
    for name in start:
        expected = (full.model[name] + start[name]) / 2
        torch.testing.assert_close(half.model[name], expected, rtol=1e-6, atol=1e-7)
