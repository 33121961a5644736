"""Cohorts and batches are functions of the seed, the phase and the step, whatever the method."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from maths.cases import named_case
from methods.plugs import spy

from fedhet.core.client.context import ClientContext
from fedhet.core.kernel import (
    Client,
    Merged,
    Message,
    Phase,
    Plugin,
    Result,
    State,
    Step,
    Update,
    serves,
)
from fedhet.core.server import phases
from fedhet.core.server.run_setup import RunSetup
from fedhet.core.trees import Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.scaffold import Scaffold

Batches = dict[tuple[int, int], list[list[int]]]  # (step, client) -> the positions in each batch


class WarmClient(Client):
    @serves
    def warm(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        return self.train(msg, state, ctx)


@dataclass(frozen=True, kw_only=True)
class WarmFedAvg(FedAvg):
    """FedAvg after two steps in which every client trains and the result is dropped."""

    client = WarmClient

    def phases(self, setup: RunSetup) -> list[Phase]:
        return [Phase("warm", 2, dropped, cohort=1.0), *super().phases(setup)]


def dropped(step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
    return Merged({}, state)


def batches(
    federation: Callable[..., Any],
    cls: type,
    plugins: tuple[Callable[[], Plugin], ...] = (),
    **how: Any,
) -> Batches:
    """The batches of three rounds with half of the clients."""
    seen: Batches = defaultdict(list)
    federation(
        toy_task(),
        cls,
        plugins=lambda: [*(make() for make in plugins), spy(seen)],
        rounds=3,
        epochs=2,
        fraction=0.5,
        **how,
    ).run()
    return dict(seen)


def test_every_sample_once_per_epoch_in_a_new_order(federation: Callable[..., Any]) -> None:
    seen = batches(federation, FedAvg)
    for (_, pid), own in seen.items():
        order = [i for batch in own for i in batch]
        n = 12 + 4 * pid
        first, second = order[:n], order[n:]
        assert sorted(first) == sorted(second) == list(range(n))
        assert first != second
    of_step_1 = [own for (step, _), own in seen.items() if step == 1]
    assert len(of_step_1) == 2
    assert of_step_1[0] != of_step_1[1]


def test_batches_differ_by_client_step_and_seed(federation: Callable[..., Any]) -> None:
    drawn = {}
    for seed in (0, 1):
        seen: Batches = defaultdict(list)
        federation(
            toy_task(equal=True),
            FedAvg,
            plugins=lambda seen=seen: [spy(seen)],
            rounds=3,
            seed=seed,
        ).run()
        drawn |= {(seed, *key): str(own) for key, own in seen.items()}
    assert len(drawn) == 2 * 3 * 4 == len(set(drawn.values()))


def test_cohorts_and_batches_are_the_same_for_every_method(federation: Callable[..., Any]) -> None:
    cases = [
        (Scaffold, ()),
        (FedAvg, (FedNormPlugin,)),
        (FedAvg, (FedProxPlugin,)),
        (WarmFedAvg, ()),
    ]
    for cls, plugins in cases:
        with named_case(cls, plugins):
            assert batches(federation, cls, plugins) == batches(federation, FedAvg)


def test_cohorts_follow_the_seed_and_the_step() -> None:
    sizes = [3, 9, 0, 5, 9, 7, 1, 2, 8, 4]

    def draw() -> dict[tuple[int, int], tuple[int, ...]]:
        return {
            (seed, step): tuple(phases.sample_cohort(sizes, None, 0.5, seed, "train", step))
            for seed in range(3)
            for step in range(1, 6)
        }

    cohorts = draw()
    assert cohorts == draw()
    assert len(set(cohorts.values())) > 12
    for cohort in cohorts.values():
        assert len(set(cohort)) == len(cohort) == round(0.5 * 9)
        assert 2 not in cohort  # it has no data
        # Largest first, ties by pid.
        assert list(cohort) == sorted(cohort, key=lambda pid: (-sizes[pid], pid))


def test_every_client_is_drawn_equally_often() -> None:
    """4 of 10 in 2000 steps: each 800 times, with a standard deviation of 22."""
    counts = [0] * 10
    for step in range(2000):
        for pid in phases.sample_cohort(range(1, 11), 4, 1.0, 0, "train", step):
            counts[pid] += 1
    assert sum(counts) == 8000
    assert all(abs(n - 800) < 110 for n in counts)


def test_cohort_sizes() -> None:
    cases = [
        (None, 0.5, 4),
        (None, 0.01, 1),
        (1.0, 0.1, 8),
        (0.25, 1.0, 2),
        (3, 1.0, 3),
        (20, 0.5, 8),
    ]
    for size, fraction, expected in cases:
        with named_case(size, fraction, expected):
            assert len(phases.sample_cohort([5] * 8, size, fraction, 0, "train", 1)) == expected


def test_initial_weights_follow_the_seed_alone(federation: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    first = federation(toy_task(), FedAvg).sha256
    torch.manual_seed(2)
    same_seed = federation(toy_task(), Scaffold).sha256
    other_seed = federation(toy_task(), FedAvg, seed=1).sha256
    assert same_seed == first != other_seed
