"""A task given as objects is checked before the run begins, and recorded as what it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from composing import composed
from torch import Tensor, nn
from torch.nn import functional

import fedhet
from fedhet.core.errors import ConfigError, DataError
from fedhet.core.task import ClientData, Samples, Task
from fedhet.core.workspace import Workspace
from fedhet.data.toy import ToyModel, toy_task
from fedhet.runs.object_task import check_task
from fedhet.testing import run_quietly

LINES = ["method=fedavg", "rounds=1"]
X = torch.linspace(0, 1, 24).reshape(6, 4)
Y = torch.tensor([0, 1, 1, 0, 1, 0])
NAN = float("nan")


def given(*clients: ClientData, **other: Any) -> Task:
    """The toy task with a first client that is fine, these clients, and these arguments."""
    toy = toy_task()
    arguments = {"model": toy.model, "criterion": toy.criterion, "test": None, "classes": 2}
    arguments |= {"clients": [ClientData((X, Y)), *clients], **other}
    return Task(**arguments)


def run(folder: Path, task: Task, *lines: str) -> fedhet.Run:
    return run_quietly(composed(*LINES, *lines), folder / "run", task)


def refused(folder: Path, error: type[Exception], message: str, task: Task, *lines: str) -> None:
    with pytest.raises(error, match=message):
        run(folder, task, *lines)
    assert not (folder / "run").exists()


# ---- the criterion
def keeping(losses: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, y: losses(functional.cross_entropy(output, y, reduction="none"), y)


CRITERIA: dict[str, tuple[Any, str]] = {
    "mean": (nn.CrossEntropyLoss(), r'CrossEntropyLoss returns shape \(\) .*reduction="none"'),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), r"CrossEntropyLoss returns shape \(\)"),
    "function": (functional.cross_entropy, r'cross_entropy returns shape \(\).*reduction="none"'),
    "mean with a dimension": (keeping(lambda losses, y: losses.mean(0, keepdim=True)), r"\(1,\)"),
    "column": (
        keeping(lambda losses, y: losses[:, None]),
        r"returns shape \(3, 1\) .*expected .* shape \(3,\)",
    ),
    "by class": (lambda output, y: (output - y[:, None]) ** 2, r"returns shape \(3, 2\)"),
    "squeezed": (keeping(lambda losses, y: losses.squeeze()), r"returns shape \(\).*shape \(1,\)"),
    "number": (lambda output, y: 0.5, "returns .*float"),
    "other targets": (
        nn.MSELoss(reduction="none"),
        r"does not take .* shape \(3, 2\).*RuntimeError",
    ),
}


@pytest.mark.parametrize(("criterion", "message"), CRITERIA.values(), ids=CRITERIA)
def test_a_criterion_is_per_sample(tmp_path: Path, criterion: Any, message: str) -> None:
    for n in (6, 1):  # of one sample, a mean and a loss per sample look alike
        task = given(criterion=criterion, clients=[ClientData((X[:n], Y[:n]))])
        refused(tmp_path, ConfigError, f"client 0, train, the criterion .*{message}", task)


def test_targets_that_would_be_broadcast(tmp_path: Path) -> None:
    task = given(
        clients=[ClientData((X, X[:, 0]))],
        model=lambda: nn.Linear(4, 1),
        criterion=nn.MSELoss(reduction="none"),
        target="number",
    )
    refused(tmp_path, ConfigError, r"returns shape \(3, 3\) .* \(3, 1\) .* \(3,\)", task)
    squeezed = replace(task, criterion=lambda output, y: (output.squeeze(1) - y) ** 2)
    assert run(tmp_path, squeezed).summary["status"] == "ok"


# ---- targets and inputs
DATA: dict[str, tuple[Any, str]] = {
    "out of range": ((X, Y + 1), "sample 1: the target is 2; with classes=2, .* from 0 to 1"),
    "negative": ((X, Y - 1), "sample 0: the target is -1"),
    "ignored by torch": ((X, torch.where(Y > 0, Y, -100)), "sample 0: the target is -100"),
    "floating": (
        (X, Y + 0.5),
        r'torch\.float32, the first is 0\.5; .*target="number"',
    ),
    "bool": ((X, Y > 0), r"torch\.bool, the first is False"),
    "column": ((X, Y[:, None]), r"shape \(6, 1\); .*\(n,\) whole numbers"),
    "one-hot": ((X, torch.eye(2)[Y]), r"shape \(6, 2\); .*\(n,\) whole numbers"),
    "NaN": ((torch.where(X > 0.9, NAN, X), Y), "sample 5: the input contains nan"),
    "infinite": ((X / X[1, 2].sub(X), Y), "sample 1: the input contains inf"),
}


@pytest.mark.parametrize(("data", "message"), DATA.values(), ids=DATA)
def test_data_errors_name_the_sample(tmp_path: Path, data: Any, message: str) -> None:
    refused(tmp_path, DataError, f"^client 1, train.*{message}", given(ClientData(data)))


@pytest.mark.parametrize("part", ["val", "test", None])
@pytest.mark.parametrize("kind", ["out of range", "NaN"])
def test_data_errors_name_the_part(tmp_path: Path, kind: str, part: str | None) -> None:
    data, message = DATA[kind]
    if part is None:
        task, place = given(test=data), "the global test set"
    else:
        task, place = given(ClientData(**{"train": (X, Y), part: data})), f"client 1, {part}"
    refused(tmp_path, DataError, f"^{place}.*{message}", task)


@pytest.mark.parametrize("target", ["number", "loss"])
def test_nan_in_targets_that_are_no_classes(tmp_path: Path, target: str) -> None:
    y = torch.tensor([[1.0, 2.0], [3.0, NAN]])
    task = given(
        clients=[ClientData((X[:2], y))],
        model=lambda: nn.Linear(4, 2),
        criterion=lambda output, y: ((output - y) ** 2).mean(1),
        target=target,
    )
    refused(tmp_path, DataError, "client 0, train, sample 1: the target contains nan", task)


def test_a_transform_may_replace_nan(tmp_path: Path) -> None:
    missing = ClientData((torch.where(X > 0.9, NAN, X), Y))
    done = run(tmp_path, given(missing, transform=torch.nan_to_num))
    assert all(t.isfinite().all() for t in done.weights.values())


# ---- classes and the model
def net(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(4, outputs)


TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "other classes": ({"classes": 3}, r"ToyModel returns shape \(3, 2\); .*must be \(3, 3\)"),
    "too many outputs": ({"model": net(5)}, r"Linear returns shape \(3, 5\); .*must be \(3, 2\)"),
    "other inputs": (
        {"model": lambda: nn.Linear(5, 2)},
        r"Linear.* does not take 3 samples of client 0, train, torch\.float32 of shape \(3, 4\)",
    ),
    "doubles": ({"model": lambda: nn.Linear(4, 2).double()}, r"parameters are torch\.float64"),
    "several outputs": (
        {"model": lambda: nn.LSTM(4, 2)},
        "the model LSTM returns a tuple, not a tensor",
    ),
    "no module": ({"model": lambda: 3}, "model makes an object of type int; expected"),
    "lazy": ({"model": lambda: nn.LazyLinear(2)}, "LazyLinear has lazy layers"),
}


@pytest.mark.parametrize(("arguments", "message"), TASKS.values(), ids=TASKS)
def test_model_and_classes_fit(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    refused(tmp_path, ConfigError, f"^Task: .*{message}", given(**arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": None}, "classes=None .*target=class: .*number, >= 1"),
        ({"classes": 0}, "classes=0 .*target=class: .*>= 1.*target=number.*target=loss"),
        ({"classes": "2"}, "classes='2'"),
        ({"classes": -1}, "classes=-1"),
        ({"model": ToyModel()}, "object .*type ToyModel; .*builds .*fresh"),
        ({"model": lambda shape: ToyModel()}, "missing .*required argument: 'shape'; "),
        ({"criterion": nn.CrossEntropyLoss}, r"\(output, y\) -> losses"),
    ],
)
def test_arguments_of_a_task(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^Task: .*{message}"):
        given(**arguments)


class Lazily(Sequence[ClientData]):
    """Loads a client whenever it is accessed."""

    def __init__(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        self.parts = parts
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, pid: Any) -> Any:
        self.loaded.append(pid)
        return ClientData(Samples(*self.parts[pid]))


def test_of_clients_that_are_loaded_one_is_checked(tmp_path: Path) -> None:
    clients = Lazily([(X[:0], Y[:0]), (X, Y + 1), (X, Y)])
    task = given(clients=clients, sizes=[0, 6, 6])
    assert clients.loaded == []
    refused(tmp_path, DataError, "client 1, train, sample 1: the target is 2", task)
    assert clients.loaded == [1]


def test_a_trial_changes_nothing() -> None:
    """Neither the buffers of the model nor the caller's random state."""

    def model() -> nn.Module:
        made = ToyModel(norm=True)
        made.body.append(nn.Dropout(0.3))
        return made

    workspace = Workspace(replace(toy_task(), model=model), device=torch.device("cpu"), seed=0)
    torch.manual_seed(0)
    check_task(workspace)
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))
    state = workspace.model.state_dict()
    assert all(torch.equal(t, workspace.initial[name]) for name, t in state.items())


# ---- settings and the record
@pytest.mark.parametrize(
    "lines",
    [
        ["dataset=mnist", "model.hidden=[8]", "partition.clients=50"],
        ["model=mlp"],  # a default, but not what is trained
        ["data_dir=elsewhere"],
        ["experiment=smoke"],
    ],
)
def test_settings_that_a_task_replaces(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(ConfigError, match="Task") as refusal:
        run(tmp_path, toy_task(), *lines)
    named = ["dataset", "partition"] if lines == ["experiment=smoke"] else lines
    assert all(line in str(refusal.value) for line in named)
    assert not (tmp_path / "run").exists()


def test_the_record_is_that_of_the_task(tmp_path: Path) -> None:
    task = given(ClientData((X, Y), (X[:2], Y[:2]), (X[:3], Y[:3])), test=(X, Y))
    done = run(tmp_path, task, "client.lr=0.3", "device=cpu")
    config = yaml.safe_load((done.dir / "config.yaml").read_text())
    assert not {"dataset", "partition", "model", "data_dir"} & set(config)
    assert (config["client"]["lr"], config["device"]) == (0.3, "cpu")
    assert config["task"]["model"] == "fedhet.data.toy.ToyModel"
    assert (config["task"]["classes"], config["task"]["clients"]) == (2, 2)
    partition = json.loads((done.dir / "partition.json").read_text())
    assert (partition["name"], partition["clients"]) == ("task", 2)
    assert partition["train_sizes"] == [6, 6]
    assert partition["counts"] == [[3, 3], [3 + 1 + 1, 3 + 1 + 2]]
    summary = done.summary
    assert (summary["dataset"], summary["model"]) == (None, "ToyModel")
    assert None not in summary["accuracy"].values()
    everything = "".join(path.read_text() for path in done.dir.glob("*.*[nl]") if path.is_file())
    assert not [word for word in ("digits", "mlp", "dirichlet") if word in everything]
    with pytest.raises(ConfigError, match=r"object.*model="):
        fedhet.load(done.dir)
