"""engine.compile: the compiled gradient is that of the plain loop, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines.fast import COMMON, DENSITY, LOCAL, images, largest_difference

from fedhet.core.task import Task
from fedhet.data.toy import toy_task

Launch = Callable[..., Any]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile returns the function that it is given, which saves a minute."""
    monkeypatch.setattr(torch, "compile", lambda f, **how: f)


def plain_and_compiled(launch: Launch, *lines: str, task: Callable[[], Task]) -> tuple[Any, Any]:
    plain = launch(*COMMON, *lines, "engine.compile=false", task=task())
    compiled = launch(*COMMON, *lines, "engine.compile=true", task=task())
    return plain, compiled


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["method=fedavg"], marks=pytest.mark.slow),
        ["method=fednorm", *LOCAL],
        pytest.param(["method=feddisk", *DENSITY], marks=pytest.mark.slow),
    ],
    ids=["fedavg", "fednorm", "feddisk"],
)
def test_the_functional_gradient_is_that_of_the_loop(launch: Launch, lines: list[str]) -> None:
    """With batch norm and smaller last batches."""
    plain, compiled = plain_and_compiled(launch, *lines, task=lambda: toy_task(5, norm=True))
    assert largest_difference(plain.weights, compiled.weights) < 1e-5


@pytest.mark.matrix
def test_compiled_steps(launch: Launch) -> None:
    plain, compiled = plain_and_compiled(launch, "method=fedavg", task=images)
    assert largest_difference(plain.weights, compiled.weights) < 1e-5


@pytest.mark.usefixtures("uncompiled")
def test_a_gradient_hook_changes_the_compiled_gradient(launch: Launch) -> None:
    """The step is FedProx's."""
    lines = ["method=fedprox", "plugin.fedprox.mu=1"]
    plain, compiled = plain_and_compiled(launch, *lines, task=toy_task)
    assert largest_difference(plain.weights, compiled.weights) < 1e-5


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "finetune",
    ["head", *(pytest.param(which, marks=pytest.mark.slow) for which in ("full", "body"))],
)
def test_fine_tuning_other_parameters_is_not_compiled(launch: Launch, finetune: str) -> None:
    lines = [
        "eval.clients=true",
        "method=fedbabu",
        f"method.finetune={finetune}",
        "method.finetune_epochs=1",
    ]
    plain, compiled = plain_and_compiled(launch, *lines, task=lambda: toy_task(4))
    assert largest_difference(plain.weights, compiled.weights) < 1e-5
    assert compiled.summary["failures"] == []
