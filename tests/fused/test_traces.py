"""Steps that are traced have the bytes of steps that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contracts.short import SHORT, slow
from fused.fusing import LINES, Launch, digits
from fused.test_close import Convolutions

from fedhet.engines.fused import traces
from fedhet.engines.fused.traces import Traces, trace


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is traced yet, and nothing will be."""
    traces.traces_of.cache_clear()
    monkeypatch.setattr(traces, "PAID", 10**9)
    return monkeypatch


@pytest.mark.parametrize(
    "lines",
    [
        ["method=fednorm", "plugin=[fedprox]", "client.clip=0.3", "client.weight_decay=0.01"],
        *slow(
            ["method=fedgen", *SHORT["fedgen"], "client=adam", "client.lr=0.01"],
            ["method=moon", "client.momentum=0.5"],
            ["method=feddisk", *SHORT["feddisk"]],
            ["method=fedala", "method.max_epochs=3", "method.threshold=0"],
            ["method=scaffold", "method.control=gradient"],
            ["method=fedrod"],
            ["method=fedpcl"],
        ),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("network", ["mlp", *slow("convolutions")])
def test_bytes(launch: Launch, eager: pytest.MonkeyPatch, lines: list[str], network: str) -> None:
    def task() -> Any:
        return digits() if network == "mlp" else digits(Convolutions)

    lines = [*LINES, *lines, "engine.fused=3"]
    untraced = launch(*lines, task=task())
    eager.setattr(traces, "PAID", 2)
    made: list[bool] = []

    def counting(*given: Any) -> Any:
        found = trace(*given)
        made.append(found[0] is not None)
        return found

    eager.setattr(traces, "trace", counting)
    traced = launch(*lines, task=task())
    assert True in made
    assert traced.summary["weights_sha256"] == untraced.summary["weights_sha256"]
    assert traced.summary["loss"] == untraced.summary["loss"]


def test_a_trace_that_reads_another_tensor_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PAID", 1)
    factor = torch.ones(3)

    def captures(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    assert trace(captures, (torch.ones(3),))[0] is None
    steps = Traces()
    for n in range(5):
        factor = torch.full((3,), float(n))
        assert torch.equal(steps.results(captures, (torch.ones(3),), "shape"), factor)
    assert trace(lambda x: x * 2, (torch.ones(3),))[0] is not None
    assert trace(lambda x: x * float(x.sum()), (torch.ones(3),))[0] is None
