"""FedAvg, and its twin in plain torch, examples/fedavg.py."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from methods.by_hand import SIZES, Case, local_sgd, mean, same
from torch.nn import functional

from fedhet.core import streams
from fedhet.core.server.phases import sample_cohort
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_by_hand(case: Callable[..., Case]) -> None:
    """McMahan et al., algorithm 1: w <- sum_k n_k/n w_k over the clients of the round."""
    for x, cohort, new in case(FedAvg).rounds():
        assert len(cohort) == 3
        same(new, mean([local_sgd(x, k) for k in cohort], [SIZES[k] for k in cohort]))


@pytest.mark.parametrize(
    "local",
    [pytest.param({}, marks=pytest.mark.slow), {"momentum": 0.9, "weight_decay": 0.01}],
    ids=["plain", "momentum"],
)
def test_one_client_is_plain_sgd(launch: Callable[..., Any], local: dict[str, float]) -> None:
    """A loop of torch.optim.SGD over the same batches gives the same bits.

    The optimiser is a new one in each round, and its rate decays from round to round.
    """
    rounds, epochs, size, lr, decay = 3, 2, 5, 0.1, 0.8
    task = toy_task(1)
    run = launch(
        "method=fedavg",
        f"rounds={rounds}",
        f"client.epochs={epochs}",
        f"client.batch_size={size}",
        f"client.lr={lr}",
        f"client.lr_decay={decay}",
        *(f"client.{key}={value}" for key, value in local.items()),
        "eval.clients=false",
        task=task,
    )
    with torch.random.fork_rng():
        torch.manual_seed(streams.integer(0, "init"))
        model = task.model()
    x = task.clients[0].train.x
    y = task.clients[0].train.y
    for step in range(1, rounds + 1):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr * decay ** (step - 1), **local)
        draws = streams.torch_generator(0, "batches", "train", step, 0)
        for _ in range(epochs):
            for batch in torch.randperm(len(y), generator=draws).split(size):
                optimizer.zero_grad()
                functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    expected = model.state_dict()
    assert list(run.weights)
    assert all(torch.equal(run.weights[name], expected[name]) for name in expected)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/fedavg.py as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("fedavg")


@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_the_example_has_the_same_bits(
    federation: Callable[..., Any], example: ModuleType, fraction: float
) -> None:
    """Given the cohorts, the order of their sums and the batches, which are fedhet's."""
    how = {"rounds": 4, "epochs": 2, "lr": 0.3}
    seed = 3
    task = toy_task(5)
    run = federation(task, FedAvg, seed=seed, fraction=fraction, batch_size=5, **how)
    model = task.model()
    model.load_state_dict(run.model)
    start = {name: t.clone() for name, t in run.model.items()}

    def sample(t: int) -> list[int]:
        return sample_cohort(task.sizes, None, fraction, seed, "train", t)

    def generator(t: int, k: int) -> torch.Generator:
        return streams.torch_generator(seed, "batches", "train", t, k)

    clients = [(client.train.x, client.train.y) for client in task.clients]
    example.fedavg(model, clients, sample, generator, size=5, **how)
    run.run()
    for name, t in model.state_dict().items():
        assert torch.equal(t, run.model[name]), name
        assert not torch.equal(t, start[name]), name


@pytest.mark.slow
def test_the_example_runs_by_itself(tmp_path: Path) -> None:
    """It learns the digits without fedhet, which it does not import."""
    script = EXAMPLES / "fedavg.py"
    assert "import fedhet" not in script.read_text() and "from fedhet" not in script.read_text()
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env={"PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    words, accuracy = done.stdout.rsplit(maxsplit=1)
    assert words == "test accuracy"
    assert float(accuracy) > 0.8
