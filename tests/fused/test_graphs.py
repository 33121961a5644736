"""fedhet/engines/fused/graphs.py without a GPU: CUDA's graphs are pretended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contracts.short import slow
from fused.test_accelerators import pixels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedhet.engines.fused import graphs, traces
from fedhet.engines.fused.graphs import captured

Launch = Callable[..., Any]


class Recorder(TorchDispatchMode):
    """What a CUDA graph does: the same operations again, on the memory that they had."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **kwargs or {})
        self.operations.append((op, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for op, args, kwargs, result in self.operations:
            again = op(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorder]]:
    """Let torch.cuda capture on the CPU; the graphs that were made."""
    made: list[Recorder] = []

    @contextmanager
    def graph(recorder: Recorder, pool: Any) -> Iterator[None]:
        with recorder:
            yield
        made.append(recorder)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda some: nullcontext(),
        "graph_pool_handle": lambda: None,
        "CUDAGraph": Recorder,
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield made
    graphs._pool.cache_clear()
    graphs._say.cache_clear()


def test_inputs_are_copied_in_and_outputs_are_overwritten(recorders: list[Recorder]) -> None:
    calls = []

    def f(x: Tensor, index: Tensor) -> tuple[Tensor, list[Tensor]]:
        calls.append(x)
        return x.sum(), [x.index_select(0, index) * 2]

    x, index = torch.arange(3.0), torch.tensor([0])
    step = captured(f, (x, index))
    assert len(calls) == graphs.WARM_UP + 1 and all(given is not x for given in calls)
    total, (rows,) = step(torch.full((3,), 5.0), torch.tensor([1]))
    assert (total.item(), rows.tolist()) == (15, [10])
    rows.zero_()  # a hook may change a gradient in place
    again, (same,) = step(x, torch.tensor([2]))
    assert (total.item(), rows.tolist()) == (3, [4]) and same is rows and again is total
    assert x.tolist() == [0, 1, 2] and len(calls) == graphs.WARM_UP + 1


def test_where_a_capture_fails_the_function_stays_and_it_is_said_once(
    recorders: list[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    def f(x: Tensor) -> Tensor:
        if len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return x + 1

    for _ in range(2):
        assert captured(f, (torch.ones(1),)) is f
    assert caplog.messages == [
        "steps are no CUDA graphs, because one could not be captured: operation not permitted when"
        " stream is capturing"
    ]


@pytest.mark.parametrize(
    "lines",
    [
        ["method=fedprox", "client.momentum=.9", "client.clip=.1"],
        *slow(
            ["method=fedgen", "method.server_steps=2"],
            ["method=moon", "client=adam"],
            ["method=scaffold"],
        ),
    ],
    ids=lambda lines: lines[0],
)
def test_a_run_by_graphs_has_the_bits_of_one_without(
    launch: Launch, recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    """Several shapes, in turns, and records of steps whose outputs have been overwritten."""
    lines = [*lines, "rounds=3", "client.epochs=2", "client.batch_size=5", "engine.fused=3"]
    expected = launch(*lines, task=pixels())
    monkeypatch.setattr(traces, "GPU", "cpu")
    monkeypatch.setattr(traces, "GPU_PAID", 1)
    traces.traces_of.cache_clear()
    run = launch(*lines, task=pixels())
    assert run.summary["weights_sha256"] == expected.summary["weights_sha256"]
    assert len(recorders) > 1
