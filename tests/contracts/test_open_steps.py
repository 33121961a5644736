"""Several steps may be open at a time: a late reply changes the weights that the server has now."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composing import composed

from fedhet.core import trees
from fedhet.core.kernel import Method
from fedhet.core.messages import Upload
from fedhet.core.server.phases import OpenStep, locate
from fedhet.core.trees import Tree
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.scaffold import Scaffold
from fedhet.runs.job import Job
from fedhet.runs.stores import MemoryStore
from fedhet.testing import Federation

CLIENTS = 6


def with_disjoint_cohorts(cls: type[Method]) -> tuple[Federation, OpenStep, OpenStep]:
    """A federation with two open steps, in which all clients take part once."""
    for seed in range(200):
        task = toy_task(CLIENTS, equal=True)
        run = Federation(task, cls, rounds=2, fraction=0.5, batch_size=100, seed=seed)
        first, second = run.strategy.plan(1), run.strategy.plan(2)
        if not {*first.cohort} & {*second.cohort}:
            return run, first, second
    raise AssertionError("no seed draws such cohorts")


def served(run: Federation, step: OpenStep) -> list[Any]:
    return [run.client().handle(msg) for msg in step.messages]


def mean_change(replies: list[Upload], start: Tree) -> Tree:
    return trees.mean([(trees.Difference(one.weights, start), 1.0) for one in replies])


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
def test_a_late_step_adds_its_change_to_the_present_weights(cls: type[Method]) -> None:
    run, first, second = with_disjoint_cohorts(cls)
    start = dict(run.model)
    early, late = served(run, first), served(run, second)
    expected = trees.add(trees.add(mean_change(early, start), start), mean_change(late, start))
    run.strategy.finish_step(second, late)
    run.strategy.finish_step(first, early)
    for name, value in expected.items():
        torch.testing.assert_close(run.model[name].double(), value, rtol=1e-6, atol=1e-7)
        assert not torch.equal(run.model[name], start[name])


def test_the_control_variate_of_two_open_steps_is_the_mean_over_their_clients() -> None:
    """Both were sent c = 0, so that c is the mean of all c_i+, as after one step of all clients."""
    run, first, second = with_disjoint_cohorts(Scaffold)
    replies = served(run, first), served(run, second)
    run.strategy.finish_step(first, replies[0])
    run.strategy.finish_step(second, replies[1])
    seed = run.workspace.seed
    task = toy_task(CLIENTS, equal=True)
    whole = Federation(task, Scaffold, rounds=1, batch_size=100, seed=seed).run()
    total, expected = (one.strategy.run.states["method"]["total"] for one in (run, whole))
    for name, value in expected.items():
        torch.testing.assert_close(total[name], value, rtol=1e-4, atol=1e-6)
        assert bool(value.any())


def test_planning_changes_nothing() -> None:
    run = Federation(toy_task(), FedAvg, rounds=2)
    before = run.strategy.run
    run.strategy.plan(1)
    assert run.strategy.run is before


@pytest.mark.slow
def test_every_method_may_have_two_open_steps(methods: dict[str, Any]) -> None:
    for method in methods:
        job = Job(composed(f"method={method}", "rounds=3", "fraction=.5"), toy_task(norm=True))
        strategy, store = job.strategy, MemoryStore()

        def replies(step: OpenStep, job: Job = job, store: MemoryStore = store) -> list[Any]:
            return [job.client(store).handle(msg) for msg in step.messages]

        while not (step := strategy.plan(strategy.run.round + 1)).entry.phase.trains:
            strategy.finish_step(step, replies(step))
        second = strategy.plan(step.round + 1)
        strategy.finish_step(step, replies(step))
        strategy.finish_step(second, replies(second))
        assert locate(strategy.timetable, strategy.run.round + 2) is None
        for slot in strategy.weights.values():
            assert trees.first_nonfinite(slot) is None, method
