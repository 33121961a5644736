"""engine.fused=auto: a fixed function of the network and the batch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fused.fusing import LINES, Launch, digits, groups
from torch import nn

from fedhet.engines.fused.choice import AT_ONCE, suited
from fedhet.models import MLP


def mlp(inputs: int, *hidden: int, norm: str = "none") -> nn.Module:
    return MLP(shape=(inputs,), classes=10, hidden=list(hidden), norm=norm)


@pytest.mark.parametrize(
    ("model", "batch", "clients"),
    [
        (mlp(64, 64), 32, AT_ONCE),
        (mlp(64, 64), 128, AT_ONCE),
        (mlp(64, 64), 129, 0),
        (mlp(784, 64), 32, AT_ONCE),
        (mlp(784, 64), 33, 0),
        (mlp(784, 200, 200), 10, 0),
        (mlp(64, 64, norm="batch"), 32, 0),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10)), 32, 0),
    ],
)
def test_how_many_clients_train_as_one(model: nn.Module, batch: int, clients: int) -> None:
    assert suited(model, batch, 10) == clients
    assert suited(model, batch, 2.5) == 0


@pytest.mark.parametrize(
    ("lines", "fused"),
    [
        (["method=fedavg"], True),
        (["method=fedproto"], False),  # its penalty does not allow batches to be padded
        (["method=fedavg", "client.epochs=1", "client.batch_size=64"], False),  # one step
    ],
)
def test_auto_fuses_no_training_that_hardly_gains(
    launch: Launch, lines: list[str], fused: bool
) -> None:
    with groups() as counted:
        launch(*LINES, *lines, "engine.fused=auto", task=digits())
    assert {name for name, _ in counted} == ({"steps", "passes"} if fused else {"passes"})


@pytest.mark.slow
def test_what_runs_need_is_imported_once() -> None:
    """multiprocessing says nothing of a module that cannot be preloaded."""
    code = (
        "import gc, sys, fedhet.study.preload\n"
        "assert gc.isenabled() and gc.get_freeze_count()\n"
        "names = {'fedhet.methods.fedavg', 'fedhet.engines.fused.traces'}\n"
        "assert names <= {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
