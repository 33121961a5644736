"""FedLEx: who explores, what travels, and what is recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from maths.cases import named_case

from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedlex import FedLExPlugin

Make = Callable[..., Any]

D = "fedlex.D"
G = "fedlex.G"


def test_how_many_explore(federation: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A share is rounded up; a count above the number of clients is capped, with a warning."""
    cases = [
        (1, 4, 1),
        (3, 4, 3),
        (20, 4, 4),
        (1.0, 4, 4),
        (0.3, 4, 2),
        (0.1, 30, 3),
        (1e-9, 4, 1),
        (1e-11, 4, 1),
    ]
    for c_exp, clients, expected in cases:
        with named_case(c_exp, clients, expected):
            run = federation(
                toy_task(clients),
                FedAvg,
                plugins=lambda c_exp=c_exp: [FedLExPlugin(c_exp=c_exp)],
                rounds=1,
                fraction=0.5,
            )
            caplog.clear()
            with caplog.at_level(logging.WARNING, "fedhet"):
                assert len(run.strategy.plan(1).messages) == expected
            lines = [record.getMessage() for record in caplog.records]
            assert len(lines) == (c_exp == 20)
            assert all("plugin.fedlex.c_exp=20" in line and "4 clients" in line for line in lines)


@pytest.mark.parametrize(
    ("optimizer", "apply_to", "warnings"),
    [("sgd", "gradient", 0), ("adam", "update", 0), ("adam", "gradient", 1)],
)
def test_an_adaptive_optimiser_is_warned_of(
    federation: Make,
    caplog: pytest.LogCaptureFixture,
    optimizer: str,
    apply_to: str,
    warnings: int,
) -> None:
    def plugins() -> list[FedLExPlugin]:
        return [FedLExPlugin(c_exp=2, e_exp=1, apply_to=apply_to)]

    federation(toy_task(), FedAvg, plugins=plugins, rounds=2, local={"optimizer": optimizer}).run()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == warnings
    assert all("client.optimizer=adam" in line and "nearly inactive" in line for line in lines)


def test_messages_and_report(federation: Make) -> None:
    def plugins() -> list[FedLExPlugin]:
        return [FedLExPlugin(c_exp=2, e_exp=2)]

    run = federation(toy_task(norm=True), FedAvg, plugins=plugins, rounds=4, fraction=0.5)
    model = sum(t.nbytes for t in run.model.values())
    names = [name for name, _ in run.workspace.model.named_parameters()]
    mask = sum(run.model[name].nbytes for name in names)
    explorers = {msg.pid for msg in run.step()}
    assert run.current.bytes == {"down": {"model": 2 * model}, "up": {D: 2 * mask}}
    assert run.current.metrics["steps"] > 0
    assert run.current.recorded == {}
    assert run.strategy.run.versions == {}
    used = explorers
    for step in range(1, 5):
        plan = run.step()
        guidance = plan[0].extras[G]
        cohort = {msg.pid for msg in plan}
        recorded = run.current.recorded["fedlex"]
        assert run.current.bytes == {
            "down": {"model": 2 * model, G: 2 * mask},
            "up": {"model": 2 * model},
        }
        assert list(guidance) == names
        assert all(t.dtype == torch.float32 for t in guidance.values())
        if step > 1:
            used = cohort & explorers or used
        assert set(recorded["pids"].tolist()) == used
        assert recorded["explorers"] == len(cohort & explorers) / 2
        entries = torch.cat([t.flatten() for t in guidance.values()])
        means = torch.tensor([float(t.mean()) for t in guidance.values()])
        assert recorded["median"] == float(entries.median())
        assert recorded["medians"].tolist() == [float(t.median()) for t in guidance.values()]
        torch.testing.assert_close(recorded["means"], means)


def test_patience_ends_the_exploration(federation: Make) -> None:
    """With a rate of 0 the loss never falls, but for the rounding of its sum."""

    def steps(patience: int | None) -> float:
        def plugins() -> list[FedLExPlugin]:
            return [FedLExPlugin(c_exp=1, e_exp=100, patience=patience)]

        run = federation(toy_task(1), FedAvg, plugins=plugins, lr=0.0)
        run.step()
        return float(run.current.metrics["steps"])

    assert steps(None) == 100 * 3
    assert steps(3) < 60
