"""Who is asked and which batches are drawn: functions of the seed, the phase and the step, whatever
the method."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedhet import phases
from fedhet.client import FedClient
from fedhet.data.toy import toy_task
from fedhet.messages import Broadcast, Update
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.scaffold import Scaffold
from fedhet.phases import Phase
from fedhet.plugin import Plugin
from fedhet.training import Batch


class Spy(Plugin):
    """Notes every batch's positions, under (step, client)."""

    name = "spy"

    def __init__(self, notes: dict[tuple[int, int], list[list[int]]]) -> None:
        super().__init__()
        self.notes = notes

    def losses(self, batch: Batch) -> Tensor:
        self.notes[self.client.msg.step, self.client.pid].append(batch.index.tolist())
        return torch.zeros(len(batch.y))


class WarmClient(FedClient):
    def warm(self, msg: Broadcast) -> Update:
        return self.train(msg)


class WarmFedAvg(FedAvg):
    """FedAvg after two steps in which everyone trains for nothing."""

    client_cls = WarmClient

    def phases(self) -> list[Phase]:
        return [Phase("warm", 2, lambda updates, old: None, cohort=1.0), *super().phases()]


def batches(
    federation: Callable[..., Any],
    cls: type,
    plugins: tuple[Callable[[], Plugin], ...] = (),
    **how: Any,
) -> Any:
    notes: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    federation(
        toy_task(),
        cls,
        plugins=lambda: [*(make() for make in plugins), Spy(notes)],
        rounds=3,
        epochs=2,
        fraction=0.5,
        **how,
    ).run()
    return dict(notes)


def test_every_sample_once_per_epoch_in_a_new_order(federation: Callable[..., Any]) -> None:
    seen = batches(federation, FedAvg)
    for (_, pid), found in seen.items():
        flat = [i for batch in found for i in batch]
        n = 12 + 4 * pid
        assert sorted(flat[:n]) == sorted(flat[n:]) == list(range(n)) and flat[:n] != flat[n:]
    by_client = [found for (step, _), found in seen.items() if step == 1]
    assert len(by_client) == 2 and by_client[0] != by_client[1]


def test_batches_differ_by_client_step_and_seed(federation: Callable[..., Any]) -> None:
    equal = {}
    for seed in (0, 1):
        notes: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
        federation(
            toy_task(equal=True),
            FedAvg,
            plugins=lambda notes=notes: [Spy(notes)],
            rounds=3,
            seed=seed,
        ).run()
        equal |= {(seed, *key): str(found) for key, found in notes.items()}
    assert len(equal) == 2 * 3 * 4 == len(set(equal.values()))


@pytest.mark.parametrize(
    ("cls", "plugins"),
    [
        (Scaffold, ()),
        (FedAvg, (FedNormPlugin,)),
        (FedAvg, (FedProxPlugin,)),
        (WarmFedAvg, ()),
    ],
    ids=["scaffold", "fednorm", "fedprox", "warm-up"],
)
def test_cohorts_and_batches_are_the_same_for_every_method(
    federation: Callable[..., Any], cls: type, plugins: Any
) -> None:
    assert batches(federation, cls, plugins) == batches(federation, FedAvg)


def test_cohorts_follow_the_seed_and_the_step() -> None:
    sizes = [3, 9, 0, 5, 9, 7, 1, 2, 8, 4]
    drawn = {
        (seed, step): tuple(phases.sample_cohort(sizes, None, 0.5, seed, "train", step))
        for seed in range(3)
        for step in range(1, 6)
    }
    again = {
        (seed, step): tuple(phases.sample_cohort(sizes, None, 0.5, seed, "train", step))
        for seed in range(3)
        for step in range(1, 6)
    }
    assert drawn == again and len(set(drawn.values())) > 12
    for found in drawn.values():
        # nobody without data
        assert len(set(found)) == len(found) == round(0.5 * 9) and 2 not in found
        # largest first, ties by pid
        assert list(found) == sorted(found, key=lambda pid: (-sizes[pid], pid))


def test_every_client_is_drawn_equally_often() -> None:
    """4 of 10 in 2000 steps: each 800 times, with a standard deviation of 22."""
    counts = [0] * 10
    for step in range(2000):
        for pid in phases.sample_cohort(range(1, 11), 4, 1.0, 0, "train", step):
            counts[pid] += 1
    assert sum(counts) == 8000 and all(abs(n - 800) < 110 for n in counts)


@pytest.mark.parametrize(
    ("size", "fraction", "expected"),
    [
        (None, 0.5, 4),
        (None, 0.01, 1),
        (1.0, 0.1, 8),
        (0.25, 1.0, 2),
        (3, 1.0, 3),
        (20, 0.5, 8),
    ],
)
def test_cohort_sizes(size: int | float | None, fraction: float, expected: int) -> None:
    assert len(phases.sample_cohort([5] * 8, size, fraction, 0, "train", 1)) == expected


def test_initial_weights_follow_the_seed_alone(federation: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    first = federation(toy_task(), FedAvg).sha256
    torch.manual_seed(2)
    assert (
        federation(toy_task(), Scaffold).sha256
        == first
        != federation(toy_task(), FedAvg, seed=1).sha256
    )
