"""What is not done as one: clients are then served one by one, and the log says why, once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from contracts.short import slow
from fused.fusing import LINES, Launch, apart, digits, groups
from torch import Tensor, nn
from torch.nn import functional

from fedhet.core.client.context import ClientContext
from fedhet.core.client.training import Batch
from fedhet.core.kernel import Client, Message, Result, State, Term, serves
from fedhet.core.task import ClientData, Samples, Task
from fedhet.core.trees import AnyTree, Tree
from fedhet.data.toy import toy_task
from fedhet.engines.fused.steps import Training
from fedhet.models import CharLSTM
from fedhet.runs import config
from fedhet.testing import check_equal, run_quietly


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [text for text in messages if text.startswith("engine.fused: one client after another")]


def network(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), layer, nn.Flatten(), nn.Linear(108, 10)
    )


def texts() -> Task:
    """Windows of six characters out of nine, and the character that follows."""
    draw = torch.Generator().manual_seed(0)
    samples = [torch.randint(9, (n, 7), generator=draw, dtype=torch.int16) for n in (7, 13, 10)]
    return Task(
        model=lambda: CharLSTM(shape=(6,), classes=9, embedding=3, hidden=5, layers=2),
        criterion=lambda output, y: functional.cross_entropy(output, y, reduction="none"),
        clients=[ClientData((x[:, :6], x[:, 6].long())) for x in samples],
        test=None,
        classes=9,
    )


def decides(output: Tensor, y: Tensor) -> Tensor:
    losses = functional.cross_entropy(output, y, reduction="none")
    return losses if float(losses.detach().sum()) > 0 else losses * 0


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (lambda: toy_task(norm=True), "the model has buffers, which training may change"),
        (texts, "recurrent layers one model after another"),
        (lambda: digits(network(nn.Dropout2d(0.5))), "Dropout2d draws numbers for each"),
        (lambda: digits(network(nn.Dropout(0.5))), "Dropout draws numbers for each"),
        (lambda: digits(criterion=decides), r"\.item\(\)"),
    ],
    ids=["batch norm", "recurrent", "Dropout2d", "Dropout", "a value decides"],
)
def test_such_clients_have_the_bytes_of_one_after_another(
    launch: Launch, caplog: pytest.LogCaptureFixture, task: Callable[[], Task], reason: str
) -> None:
    lines = [*LINES, "method=fedavg", "rounds=2", "client.lr=0.05"]
    alone = launch(*lines, task=task())
    with caplog.at_level(logging.INFO, "fedhet"):
        fused = launch(*lines, "engine.fused=3", task=task())
    assert fused.summary["weights_sha256"] == alone.summary["weights_sha256"]
    (said,) = reasons(caplog)
    assert reason.replace("\\", "") in said


SCALES: dict[int, Tensor] = {}  # of each client its own, which a term must not read by itself


def scaled(params: AnyTree, batch: Batch, own: Tree) -> Tensor:
    """The loss with a factor of the client's own."""
    return batch.workspace.task.criterion(batch.logits, batch.y) * own["scale"]


class Scaled(Client):
    """Trains with a factor of its own, which it reads where it must not."""

    def _terms(self, pid: int) -> dict[str, Any]:
        scale = SCALES.setdefault(pid, torch.tensor(1.0 + pid))

        def loss(params: AnyTree, batch: Batch, own: Tree) -> Tensor:
            return batch.workspace.task.criterion(batch.logits, batch.y) * scale

        return {"loss": Term("loss", loss)}

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        return Result(ctx.fit(msg.weights, **self._terms(msg.pid)).params), state


class GivenScale(Scaled):
    def _terms(self, pid: int) -> dict[str, Any]:
        return {"loss": Term("loss", scaled, {"scale": torch.tensor(1.0 + pid)})}


class OwnGradient(Scaled):
    def _terms(self, pid: int) -> dict[str, Any]:
        scale = SCALES.setdefault(pid, torch.tensor(1.0 + pid))

        def factors(params: AnyTree, batch: None, own: Tree) -> Tree:
            return dict.fromkeys(own, scale)

        return {"terms": [Term("scale", factors, dict.fromkeys(names(), torch.zeros(())))]}


def names() -> list[str]:
    return [name for name, _ in digits().model().named_parameters()]


@pytest.mark.parametrize(
    ("cls", "fused"), [(Scaled, False), (OwnGradient, False), (GivenScale, True)]
)
def test_a_term_that_reads_another_tensor_than_it_is_given_is_found(
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cls: type[Client],
    fused: bool,
) -> None:
    monkeypatch.setattr("fedhet.methods.fedavg.FedAvg.client", cls)
    lines = [*LINES, "method=fedavg", "client.lr=0.02"]
    alone = launch(*lines, task=digits())
    with groups() as counted, caplog.at_level(logging.INFO, "fedhet"):
        together = launch(*lines, "engine.fused=3", task=digits())
    same = together.summary["weights_sha256"] == alone.summary["weights_sha256"]
    assert same is not fused
    said = "a term of one client reads a tensor that is not in its `own`"
    assert [said in reason for reason in reasons(caplog)] == ([] if fused else [True])
    assert (counted["steps", 3] > 1) is fused


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Linear(5, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


def clustered(n: int, pid: int) -> ClientData:
    draw = torch.Generator().manual_seed(100 * pid + n)
    y = torch.randint(0, 2 if pid == 1 else 3, (n,), generator=draw)
    noise = torch.randn(n, 6, generator=draw)
    return ClientData(((0.2 + 0.25 * y[:, None] + 0.04 * pid + 0.15 * noise).clamp(0, 1), y))


def test_a_gradient_of_rounding_alone_is_no_wrong_tensor(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    """FedPCL's loss is constant where the ReLU is dead, and its gradient is 7e-9 there.

    A refusal would depend on whether the process had already checked a step of this kind.
    """
    task = Task(
        model=WithHead,
        criterion=lambda output, y: functional.cross_entropy(output, y, reduction="none"),
        clients=[clustered(n, pid) for pid, n in enumerate((9, 21, 16, 33, 27))],
        test=None,
        classes=3,
    )
    lines = ["rounds=3", "fraction=.7", "client.batch_size=5", "method=fedpcl", "engine.fused=3"]
    with caplog.at_level(logging.INFO, "fedhet"):
        launch(*lines, task=task)
    assert reasons(caplog) == []


# ---- failures
class Fails(Client):
    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        if msg.pid == 1:
            raise ValueError("not today")
        return []


@pytest.mark.parametrize("k", ["off", 1, 3])
def test_a_client_that_fails_leaves_the_others_alone(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, k: int | str
) -> None:
    lines = [*LINES, "method=fedavg", "on_failure=skip", "fraction=1"]
    monkeypatch.setattr("fedhet.methods.fedavg.FedAvg.client", Fails)
    run = launch(*lines, f"engine.fused={k}", task=digits())
    assert {(f["pid"], f["phase"]) for f in run.summary["failures"]} == {(1, "train")}
    if k == 3:  # the bytes of groups in which nobody fails do not depend on the group either
        one = launch(*lines, "engine.fused=1", task=digits())
        assert run.summary["weights_sha256"] == one.summary["weights_sha256"]


def test_a_broken_batch_is_one_clients_failure(launch: Launch) -> None:
    """The label of one sample is out of range, which a stack of clients cannot tell."""

    def criterion(output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output, y, reduction="none")

    def task() -> Task:
        made = digits(criterion=criterion, target="loss")
        y = made.clients[2].train.y.clone()
        y[3] = 99
        made.clients[2] = ClientData(Samples(made.clients[2].train.x, y))
        return replace(made)

    lines = [*LINES, "method=fedavg", "on_failure=skip", "eval.clients=false", "fraction=1"]
    alone, fused = (launch(*lines, f"engine.fused={k}", task=task()) for k in ("off", 3))
    assert {f["pid"] for f in fused.summary["failures"]} == {2}
    assert fused.summary["failures"] == alone.summary["failures"]
    assert apart(alone.weights, fused.weights) < 1e-6


# ---- interruptions
@pytest.mark.parametrize("method", ["fedavg", *slow("scaffold", "ditto")])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Ctrl-C in the midst of a group: no client of it has changed anything."""
    lines = [*LINES, f"method={method}", "engine.fused=3", "checkpoint.every=0"]
    whole = launch(*lines, task=digits())
    perform = Training.perform
    calls: list[int] = []

    def interrupted(some: Any) -> Any:
        calls.append(len(some))
        result = perform(some)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Training, "perform", staticmethod(interrupted))
        with pytest.raises(KeyboardInterrupt):
            launch(*lines, task=digits())
    folder = whole.dir.parent / "run-1"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    resumed = run_quietly(config.compose([f"resume={folder}"]), folder, digits())
    check_equal(whole, resumed, "interrupted")
