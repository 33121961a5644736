"""engine.vectorize: clients trained as one have the result of one after another, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engines.fast import COMMON, DENSITY, LOCAL, images, largest_difference
from torch import Tensor, nn

from fedhet.core.errors import ConfigError, RunFailed
from fedhet.data.toy import toy_task
from fedhet.engines import vectorized

Launch = Callable[..., Any]


@pytest.mark.parametrize(
    "lines",
    [
        ["method=fedavg"],
        ["method=fedavg", *LOCAL],
        pytest.param(["method=fednorm"], marks=pytest.mark.slow),
        ["method=fedbabu"],
        pytest.param(["method=fedsa"], marks=pytest.mark.slow),
        pytest.param(["method=fedgmm"], marks=pytest.mark.slow),
        pytest.param(["method=feddisk", *DENSITY], marks=pytest.mark.slow),
        ["method=fedadam", "server_opt.lr=0.01"],
    ],
    ids=lambda lines: lines[0].removeprefix("method=") + ("+local" if LOCAL[0] in lines else ""),
)
@pytest.mark.parametrize("k", [2, pytest.param(5, marks=pytest.mark.matrix)])
def test_clients_trained_as_one_give_the_sequential_result(
    launch: Launch, k: int, lines: list[str]
) -> None:
    """Clients of unequal sizes, last batches that are smaller, and groups that are not full."""
    one_by_one = launch(*COMMON, *lines, "engine.vectorize=0", task=toy_task(6))
    together = launch(*COMMON, *lines, f"engine.vectorize={k}", task=toy_task(6))
    assert largest_difference(one_by_one.weights, together.weights) < 1e-5
    initial = toy_task(6).model().state_dict()
    assert largest_difference(one_by_one.weights, initial) > 1e-2
    assert together.summary["bytes"] == one_by_one.summary["bytes"]


def test_convolutions_give_the_sequential_result(launch: Launch) -> None:
    lines = [*COMMON, "method=fedavg"]
    one_by_one = launch(*lines, "engine.vectorize=0", task=images())
    together = launch(*lines, "engine.vectorize=3", task=images())
    assert largest_difference(one_by_one.weights, together.weights) < 1e-5


def test_clients_are_trained_in_groups(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    train_together = vectorized.train_together

    def noting(group: list[vectorized.Member]) -> list[list[Tensor]]:
        sizes.append(len(group))
        return train_together(group)

    monkeypatch.setattr(vectorized, "train_together", noting)
    lines = [*COMMON, "method=fedavg", "fraction=1", "rounds=1"]
    launch(*lines, "engine.vectorize=4", task=toy_task(6))
    assert sizes == [4, 2]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["method=scaffold"], "ScaffoldClient has its own train"),
        pytest.param(["method=ditto"], "DittoClient has its own train", marks=pytest.mark.slow),
        pytest.param(["method=fedala"], "FedALAClient has its own train", marks=pytest.mark.slow),
        (["method=fedavg", "plugin=[fedprox]"], "plugin 'fedprox' has the hook gradient"),
        (["method=fedavg", "client=adam"], "client.optimizer=adam"),
    ],
)
def test_clients_that_cannot_train_as_one_are_refused_with_the_reason(
    launch: Launch, lines: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.vectorize=2.*{reason}"):
        launch(*COMMON, *lines, "engine.vectorize=2", task=toy_task())
    automatic = launch(*COMMON, *lines, "engine.vectorize=auto", task=toy_task())
    assert automatic.summary["status"] == "ok"


def test_batch_norm_and_worker_processes_are_refused(launch: Launch) -> None:
    lines = [*COMMON, "method=fedavg", "engine.vectorize=2"]
    with pytest.raises(ConfigError, match="the model has buffers"):
        launch(*lines, task=toy_task(norm=True))
    with pytest.raises(ConfigError, match=r"engine\.vectorize=2 with engine\.workers=2"):
        launch(*lines, "engine.workers=2", task=toy_task())


def test_dropout_is_refused_unless_it_drops_nothing(launch: Launch) -> None:
    def run(p: float, k: int) -> Any:
        task = toy_task()
        task.model = lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(p), nn.Linear(3, 2))
        return launch(*COMMON, "method=fedavg", "rounds=1", f"engine.vectorize={k}", task=task)

    with pytest.raises(ConfigError, match="dropout would draw other numbers"):
        run(0.5, 2)
    assert largest_difference(run(0, 2).weights, run(0, 0).weights) < 1e-5


def test_a_group_that_fails_names_its_clients(launch: Launch) -> None:
    def criterion(output: Tensor, y: Tensor) -> Tensor:
        if len(y) > 3:
            raise ValueError("three samples at a time")
        return nn.functional.cross_entropy(output, y, reduction="none")

    task = toy_task(4)
    task.criterion = criterion
    with pytest.raises(RunFailed, match=r"client \d failed.*in a group of 2"):
        launch(*COMMON, "method=fedavg", "engine.vectorize=2", task=task)


def test_what_torch_cannot_vectorise_is_reported_at_the_start(launch: Launch) -> None:
    def criterion(output: Tensor, y: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(output, y, reduction="none")
        return losses if float(losses.detach().sum()) > 0 else losses * 0

    task = toy_task(3)
    task.criterion = criterion
    lines = [*COMMON, "method=fedavg", "engine.vectorize=2"]
    with pytest.raises(ConfigError, match=r"engine\.vectorize=2: .*torch says: .*item\(\)"):
        launch(*lines, task=task)
    with pytest.raises(ConfigError, match=r"engine\.compile=true: use one of the two"):
        launch(*lines, "engine.compile=true", task=task)
