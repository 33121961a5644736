"""engine.amp and engine.channels_last, and whether a run's record promises its bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines.fast import COMMON, images, largest_difference
from torch import Tensor

from fedhet.core import trees
from fedhet.data.toy import toy_task
from fedhet.models import CNN

Launch = Callable[..., Any]


@pytest.mark.parametrize("option", ["amp", "channels_last"])
def test_amp_and_channels_last(launch: Launch, option: str) -> None:
    lines = [*COMMON, "method=fednorm"]
    plain = launch(*lines, f"engine.{option}=false", task=images())
    fast = launch(*lines, f"engine.{option}=true", task=images())
    apart = largest_difference(plain.weights, fast.weights)
    assert (1e-6 < apart < 0.05) if option == "amp" else apart < 1e-5
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in fast.weights.values())
    assert trees.first_nonfinite(fast.weights) is None


def test_channels_last_reaches_the_convolutions(launch: Launch) -> None:
    inputs: list[bool] = []
    kernels: list[bool] = []

    class Watched(CNN):
        def features(self, x: Tensor) -> Tensor:
            inputs.append(x.is_contiguous(memory_format=torch.channels_last))
            kernel = self.body[3].weight
            kernels.append(kernel.is_contiguous(memory_format=torch.channels_last))
            return super().features(x)

    task = images()
    task.model = lambda: Watched(shape=(1, 8, 8), classes=3)
    launch(*COMMON, "method=fedavg", "engine.channels_last=true", task=task)
    assert kernels and all(kernels)
    assert any(inputs)


@pytest.mark.parametrize(
    ("option", "exact"),
    [
        ("engine.compile=false", True),
        ("engine.amp=true", False),
        ("engine.fused=2", False),
        ("engine.channels_last=true", False),
    ],
)
def test_the_record_says_whether_bits_are_promised(
    launch: Launch, option: str, exact: bool
) -> None:
    run = launch(*COMMON, "method=fedavg", option, task=toy_task())
    assert json.loads((run.dir / "environment.json").read_text())["bit_exact"] is exact
