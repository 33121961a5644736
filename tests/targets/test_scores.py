"""The scores of every target against scikit-learn's, on whole sets and joined from parts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from asking import packed_message
from flwr.common import Code, EvaluateRes, Status
from sklearn import metrics
from targets.tasks import task_of
from torch import Tensor, nn

from fedhet.core import targets
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.messages import Failure, Upload
from fedhet.core.metrics import assess
from fedhet.core.server.evaluation import (
    check_scores,
    client_details,
    client_means,
    evaluation_messages,
    received,
)
from fedhet.core.targets import Labels, Number
from fedhet.core.task import ClientData, Task
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from federation import Federation


def joined(target: targets.Target, output: Tensor, y: Tensor, cuts: list[int]) -> dict[str, float]:
    """The scores of the parts between the cuts, joined."""
    parts = zip(output.tensor_split(cuts), y.tensor_split(cuts), strict=True)
    return target.scores(target.joined([target.tally(*part) for part in parts]))


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 90]])
@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("count", [1, 3])
def test_numbers(cuts: list[int], offset: float, count: int) -> None:
    """Also where the numbers are far from zero, and where the model predicts scaled ones."""
    y = draws(0, 100, count).double() * torch.arange(1, count + 1) + offset
    guess = y + 0.5 * draws(1, 100, count)
    expected = {
        "r2": metrics.r2_score(y, guess),
        "mae": metrics.mean_absolute_error(y, guess),
        "rmse": metrics.root_mean_squared_error(y, guess),
    }
    assert joined(Number(count), guess, y, cuts) == pytest.approx(expected, rel=1e-9)
    mean, std = (offset + 2,) * count, tuple(range(3, 3 + count))
    scaled = (guess - torch.tensor(mean)) / torch.tensor(std)
    found = joined(Number(count, mean, std), scaled, y, cuts)
    assert found == pytest.approx(expected, rel=1e-7)


def test_a_single_number_may_come_as_a_vector() -> None:
    y, guess = draws(0, 9).double(), draws(1, 9).double()
    expected = metrics.r2_score(y, guess)
    for output, target in ((guess[:, None], y), (guess, y[:, None]), (guess, y)):
        assert Number(1).scores(Number(1).tally(output, target))["r2"] == pytest.approx(expected)
        loss = Number(1).losses(output, target)
        assert torch.allclose(loss, (guess - y) ** 2)
    with pytest.raises(ValueError, match=r"shape \(9, 2\), .*targets \(9,\)"):
        Number(1).losses(draws(0, 9, 2), y)


def test_r2_is_not_defined_where_nothing_varies() -> None:
    """A number that is the same in all samples is left out, and its rounding is no variation."""
    constant = torch.full((9, 1), 0.1)
    target = Number(1)
    for cuts in ([], [4], [1, 5]):
        assert set(joined(target, draws(0, 9, 1), constant, cuts)) == {"mae", "rmse"}
    both = torch.cat([constant, draws(1, 9, 1)], dim=1)
    guess = draws(2, 9, 2)
    expected = metrics.r2_score(both[:, 1], guess[:, 1])
    assert joined(Number(2), guess, both, [4])["r2"] == pytest.approx(expected)
    # Each part has one value, both together have two.
    two = torch.tensor([[1.0], [1.0], [3.0], [3.0]])
    assert joined(target, two, two, [2])["r2"] == 1


def test_a_diverged_model_has_the_worst_r2() -> None:
    target = Number(1)
    y = draws(0, 4, 1)
    for wrong in (math.nan, math.inf):
        scores = joined(target, torch.tensor([[0.0], [wrong], [0.0], [0.0]]), y, [2])
        assert scores == {"r2": -math.inf, "mae": math.inf, "rmse": math.inf}


def test_the_scores_of_a_diverged_model_are_no_lie() -> None:
    """Else the honest clients of a step that one reply has spoilt would be refused."""
    worst = {"r2": -math.inf, "mae": math.inf, "rmse": math.inf, "loss": math.inf, "n": 4.0}
    tally = Number(1).tally(torch.ones(4, 1), torch.zeros(4, 1))
    for changed, good in (({}, True), ({"r2": 1.5}, False), ({"rmse": math.nan}, False)):
        metrics = {f"test.global.{name}": value for name, value in (worst | changed).items()}
        with nullcontext() if good else pytest.raises(ValueError, match="allowed for n"):
            update = Upload(0, 4, metrics=metrics, extras={"test.global": dict(tally)})
            check_scores(update, ["test.global"], Number(1), [], {"test": 4})


@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 90]])
def test_labels(cuts: list[int]) -> None:
    output = draws(0, 100, 4) - 0.5
    y = (draws(1, 100, 4) + output > 0.3).float()
    y[:, 2] = 0
    output[:, 3] = -1
    y[:, 3] = 0  # a label that occurs neither in targets nor in predictions
    guess = output > 0
    expected = {
        "f1_micro": metrics.f1_score(y, guess, average="micro"),
        "f1_macro": metrics.f1_score(y[:, :3], guess[:, :3], average="macro"),
        "subset_accuracy": metrics.accuracy_score(y, guess),
    }
    assert joined(Labels(4), output, y, cuts) == pytest.approx(expected)
    nothing = torch.zeros(5, 4)
    assert joined(Labels(4), nothing - 1, nothing, [2]) == {"subset_accuracy": 1}


def test_classes() -> None:
    task = toy_task()
    model = task.model()
    data = task.clients[3].train
    scores, _ = assess(model, [data], task)[0]
    guess = model(data.x).argmax(1)
    assert scores["accuracy"] == metrics.accuracy_score(data.y, guess)
    assert scores["f1"] == pytest.approx(metrics.f1_score(data.y, guess, average="macro"))


def test_losses() -> None:
    output, y = draws(0, 6, 3), draws(1, 6, 3)
    scaled = Number(3, (1.0, 2.0, 3.0), (2.0, 3.0, 4.0)).losses(output, y)
    expected = (output - (y - torch.tensor([1, 2, 3])) / torch.tensor([2, 3, 4])) ** 2
    assert torch.allclose(scaled, expected.mean(1))
    has = (y > 0).float()
    p = output.sigmoid()
    by_hand = -(has * p.log() + (1 - has) * (1 - p).log()).mean(1)
    assert torch.allclose(Labels(3).losses(output, has), by_hand, atol=1e-6)


@pytest.mark.parametrize("part", ["test", "train"])
@pytest.mark.parametrize("target", ["number", "labels"])
def test_the_score_of_several_clients_is_that_of_all_their_samples(
    target: str, part: str, launch: Callable[..., Any]
) -> None:
    task = task_of(target)
    run = launch("method=fedavg", "rounds=1", "client.lr=0.5", "eval.train=true", task=task)
    model = task.model()
    model.load_state_dict(run.weights)
    data = [getattr(client, part) for client in task.clients]
    x, y = torch.cat([one.x for one in data]), torch.cat([one.y for one in data])
    with torch.no_grad():
        output = model(x)
    (row,) = map(json.loads, (run.dir / "rounds.jsonl").read_text().splitlines())
    name = "clients" if part == "test" else part
    if target == "number":
        expected = metrics.r2_score(y, output)
        assert row[f"r2_{name}_weighted"] == pytest.approx(expected)
        own = [metrics.r2_score(one.y, model(one.x).detach()) for one in data]
        if part == "test":
            assert run.summary["r2_clients_weighted"] == pytest.approx(expected)
            assert run.summary["r2_clients_worst_decile"] == pytest.approx(min(own))
    else:
        expected = metrics.f1_score(y, output > 0, average="micro", zero_division=0)
        assert row[f"f1_micro_{name}_weighted"] == pytest.approx(expected)
        if part == "test":
            assert run.summary["f1_micro_clients_weighted"] == pytest.approx(expected)


# ---- tallies from clients
def update(**changes: Any) -> Upload:
    """A client's evaluation of three samples of two numbers, with another tally."""
    tally = Number(2).tally(draws(0, 3, 2), draws(1, 3, 2)) | changes
    return Upload(0, 5, metrics={"test.global.n": 3.0}, extras={"test.global": tally})


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (Upload(0, 5, metrics={"test.global.n": 3.0}), "a tally is a NoneType"),
        (update(squared=torch.zeros(3).double()), "'squared': .*expected a torch.float64"),
        (update(squared=torch.zeros(2)), "'squared': .*expected a torch.float64"),
        (update(variation=torch.tensor([1.0, -1.0]).double()), "not finite and >= 0"),
        (update(mean=torch.tensor([1.0, math.nan]).double()), "not finite and >= 0"),
        (update(samples=torch.tensor(4)), r"counts 4 samples, but test\.global\.n is 3"),
        (update(samples=torch.tensor(0)), "a tally of 0 samples"),
        (update(more=torch.tensor(0)), r"a tally: names differ: .*unexpected \['more'\]"),
    ],
)
def test_a_wrong_tally_is_the_clients_failure(
    sent: Upload, message: str, federation: type[Federation]
) -> None:
    own = (draws(0, 3, 2), draws(1, 3, 2))
    data = ClientData(own, None, own)
    task = Task(lambda: nn.Linear(2, 2), Number(2).losses, [data, data], None, target="number")
    run = federation(task, FedAvg, on_failure="skip")
    failures: list[Failure] = []
    good = replace(update(), pid=1)
    assert received([sent, good], run.strategy, failures.append) == [good]
    (failure,) = failures
    assert failure.pid == 0
    assert re.search(message, failure.cause), failure.cause
    run.strategy.setup = replace(run.strategy.setup, on_failure="stop")
    with pytest.raises(RunFailed, match=r"client 0 failed .*phase 'evaluate'"):
        received([sent, good], run.strategy, failures.append)


def test_hits_are_among_targets_and_guesses() -> None:
    target = Labels(2)
    tally = target.tally(torch.ones(3, 2), torch.ones(3, 2))
    assert target.check(tally) is tally
    for name, value in (("hits", 4), ("targets", 2), ("exact", 4), ("samples", 0), ("hits", -1)):
        with pytest.raises(ValueError, match="tally"):
            target.check({**tally, name: torch.full_like(tally[name], value)})


@pytest.mark.parametrize("target", ["number", "labels", "class"])
def test_tallies_travel_by_flower(target: str, federation: type[Federation]) -> None:
    """The scores are the same from replies that have been on the wire, as EvaluateRes."""
    task = replace(toy_task(), detailed=True) if target == "class" else task_of(target)
    run = federation(task, FedAvg)
    run.step()
    sent, arrived = [], []
    for msg in evaluation_messages(run.strategy):
        arrays, config = packed_message(msg)
        sent.append(run.client().handle(msg))
        loss, examples, metrics_of_flower = wire.Adapter(run.client()).evaluate(arrays, config)
        result = EvaluateRes(Status(Code.OK, ""), loss, examples, metrics_of_flower)
        arrived.append(wire.read_result(msg, result, 2**20))
    scoring = run.workspace.task.scoring
    both = [
        client_means(received(replies, run.strategy, print), ["global"], scoring)
        for replies in (sent, arrived)
    ]
    assert both[0] == both[1]
    details = [client_details(replies, ["global"], scoring) for replies in (sent, arrived)]
    assert details[0] == details[1] and bool(details[0]) == (target == "class")
    assert scoring.key("clients_weighted") in both[0]


# ---- what a task may be
def test_a_task_that_is_not_clear_is_refused() -> None:
    toy = toy_task()
    with pytest.raises(ConfigError, match=r"^Task: classes=0 .*target=class: .*target=number"):
        replace(toy, classes=0)
    with pytest.raises(ConfigError, match=r"Task\.target=numbers .*mean number"):
        replace(toy, target="numbers")


def test_a_task_of_ones_own_targets_reports_the_loss_alone(launch: Callable[..., Any]) -> None:
    """Such as those of an autoencoder; the loss then chooses the best round, too."""
    toy = toy_task()

    def criterion(output: Tensor, y: Tensor) -> Tensor:
        return (output.sum(1) - 1) ** 2

    task = Task(toy.model, criterion, toy.clients, toy.test, target="loss")
    lines = ["method=fedavg", "rounds=2", "early_stopping.patience=9"]
    run = launch(*lines, task=task)
    assert run.summary["score"] is None
    assert run.summary["loss"] < 1
    assert (run.dir / "best_val.safetensors").exists()
    row = (run.dir / "rounds.jsonl").read_text().splitlines()[-1]
    assert "loss_val_weighted" in row and "acc_" not in row and "r2" not in row
    with pytest.raises(ConfigError, match=r"eval\.thresholds=\[0\.5\]: .*task .*target=loss "):
        launch(*lines, "eval.thresholds=[.5]", task=task)
