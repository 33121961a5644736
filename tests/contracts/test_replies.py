"""A bad reply stops the run with the client, the phase, the step and the cause, or is left out.

A reply that is left out leaves the step as if the client had no data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedhet.core.client.client import FedClient
from fedhet.core.errors import RunFailed
from fedhet.core.messages import Broadcast, Failure, Reply, Upload
from fedhet.core.task import ClientData, Samples, Task
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold

Change = Callable[[Upload], Reply]
NAN = float("nan")
INFINITY = float("inf")


# ---- damage: each function returns what makes a bad reply of a good one


def raises(update: Upload) -> Reply:
    return Failure(update.pid, "train", 1, "ValueError: disk full")


def weights(change: Callable[[dict[str, Tensor]], Any]) -> Change:
    """Apply `change` to the weights."""

    def apply(update: Upload) -> Reply:
        change(update.weights)
        return update

    return apply


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Replace one tensor of the weights."""
    return weights(lambda tree: tree.update({name: change(tree[name])}))


def attribute(name: str, value: Any) -> Change:
    """Set an attribute of the reply."""

    def apply(update: Upload) -> Reply:
        setattr(update, name, value)
        return update

    return apply


def extra(name: str, value: Any) -> Change:
    """Set an extra."""

    def apply(update: Upload) -> Reply:
        update.extras[name] = value
        return update

    return apply


def without_extra(name: str) -> Change:
    """Remove an extra."""

    def apply(update: Upload) -> Reply:
        del update.extras[name]
        return update

    return apply


def tree_extra(name: str, change: Callable[[dict[str, Tensor]], Any]) -> Change:
    """Apply `change` to an extra that is a tree."""

    def apply(update: Upload) -> Reply:
        change(update.tree(name))
        return update

    return apply


Z = "fednorm.z"
C_PLUS = "scaffold.c_plus"
STEPS = "scaffold.steps"

# name -> (damage, what the error says)
BAD: dict[str, tuple[Change, str]] = {
    "raises": (raises, "disk full"),
    "nan": (weights(lambda tree: tree["head.bias"].fill_(NAN)), "head.bias"),
    "inf": (weights(lambda tree: tree["body.0.weight"][0].fill_(INFINITY)), "body.0.weight"),
    "shape": (weight("head.bias", lambda t: torch.zeros(3)), r"head.bias.*\(3,\).*\(2,\)"),
    "transposed": (weight("head.weight", lambda t: t.T), r"head.weight.*\(3, 2\)"),
    "dtype": (weight("head.bias", lambda t: t.double()), "head.bias.*float64.*float32"),
    "missing": (weights(lambda tree: tree.pop("head.bias")), "missing.*head.bias"),
    "unexpected": (weights(lambda tree: tree.update(more=torch.zeros(1))), "unexpected.*more"),
    "no weights": (attribute("weights", {}), "weights"),
    "no samples": (attribute("num_examples", 0), "num_examples .*0"),
    "negative": (attribute("num_examples", -3), "num_examples .*-3"),
    "fraction": (attribute("num_examples", 2.5), "num_examples .*2.5"),
    "nan samples": (attribute("num_examples", NAN), "num_examples .*nan"),
    "bool": (attribute("num_examples", True), "num_examples .*True"),
    "text": (attribute("num_examples", "12"), "num_examples .*'12'"),
    "metrics": (attribute("metrics", {"loss": "low"}), "loss"),
    "no metrics": (attribute("metrics", []), "metrics"),
}
BAD_Z: dict[str, tuple[Change, str]] = {
    "z missing": (without_extra(Z), "fednorm.z.*missing"),
    "z nan": (extra(Z, torch.tensor([NAN, 0.0, 0.0])), "fednorm.z.*NaN"),
    "z length": (extra(Z, torch.ones(5)), "fednorm.z.*5"),
    "z matrix": (extra(Z, torch.ones(3, 1)), r"fednorm.z.*\(3, 1\)"),
    "z whole numbers": (extra(Z, torch.ones(3, dtype=torch.int64)), "fednorm.z.*int64"),
    "z scalar": (extra(Z, 1.0), "fednorm.z.*float"),
    "z tree": (extra(Z, {"z": torch.ones(3)}), "fednorm.z.*dict"),
}
BAD_C: dict[str, tuple[Change, str]] = {
    "c missing": (without_extra(C_PLUS), "scaffold.c_plus.*missing"),
    "c tensor": (extra(C_PLUS, torch.ones(3)), "scaffold.c_plus.*tree"),
    "c nan": (
        tree_extra(C_PLUS, lambda tree: tree["head.bias"].fill_(NAN)),
        "scaffold.c_plus.*head.bias",
    ),
    "c names": (
        tree_extra(C_PLUS, lambda tree: tree.pop("head.bias")),
        "scaffold.c_plus.*head.bias",
    ),
    "steps missing": (without_extra(STEPS), "scaffold.steps.*missing"),
    "steps zero": (extra(STEPS, 0), "scaffold.steps.*0"),
    "steps fraction": (extra(STEPS, 2.5), r"scaffold.steps.*2\.5.*whole number"),
    "steps nan": (extra(STEPS, NAN), "scaffold.steps.*nan"),
    "steps text": (extra(STEPS, "4"), "scaffold.steps.*'4'"),
    "steps flag": (extra(STEPS, True), "scaffold.steps.*True"),
}
# Every second one comes from the client whose reply is the first, the others from a later one.
CASES = [
    pytest.param(cls, plugins, *bad, (3, 1)[i % 2], id=name)
    for cls, plugins, table in [
        (FedAvg, list, BAD),
        (FedAvg, lambda: [FedNormPlugin()], BAD_Z),
        (Scaffold, list, BAD_C),
    ]
    for i, (name, bad) in enumerate(table.items())
]


def without_data(pid: int) -> Task:
    """The toy federation in which client `pid` has no training data and so never takes part."""
    task = toy_task()
    clients = list(task.clients)
    train = clients[pid].train
    clients[pid] = ClientData(Samples(train.x[:0], train.y[:0]))
    return Task(task.model, task.criterion, clients, task.test, 2)


def damaging(pid: int, change: Change) -> Callable[[list[Broadcast], list[Any]], list[Any]]:
    return lambda plan, replies: [change(reply) if reply.pid == pid else reply for reply in replies]


@pytest.mark.parametrize(("cls", "plugins", "change", "message", "pid"), CASES)
def test_stop_and_skip(
    federation: Callable[..., Any], cls: type, plugins: Any, change: Change, message: str, pid: int
) -> None:
    stopped = federation(toy_task(), cls, plugins=plugins, rounds=2)
    before = stopped.sha256
    place = f"client {pid} .*'train', step 1"
    with pytest.raises(RunFailed, match=rf"(?s){place}: .*{message}"):
        stopped.step(damaging(pid, change))
    assert stopped.sha256 == before

    skipped = federation(toy_task(), cls, plugins=plugins, rounds=2, on_failure="skip")
    # SCAFFOLD's N counts a client that fails, and none without data.
    task = toy_task() if cls is Scaffold else without_data(pid)
    expected = federation(task, cls, plugins=plugins, rounds=2, on_failure="skip")
    for step in (1, 2):
        skipped.step(damaging(pid, change))
        expected.step(damaging(pid, lambda reply, step=step: Failure(pid, "train", step, "gone")))  # type: ignore[misc]
        failures = skipped.current.failures
        assert [(f.pid, f.phase) for f in failures] == [(pid, "train")]
        # The client is left out, and the others' weights sum to one again.
        assert skipped.sha256 == expected.sha256


def test_a_wrong_tensor_is_reported_with_what_is_expected() -> None:
    update = Upload(0, 1, extras={"z": torch.arange(3)})
    received = r"extra 'z' is a torch.int64 tensor of shape \(3,\)"
    with pytest.raises(ValueError, match=rf"{received}; a floating-point tensor is expected$"):
        update.tensor("z")


def test_a_step_without_any_success_is_an_error(federation: Callable[..., Any]) -> None:
    def failing(plan: list[Broadcast], replies: list[Any]) -> list[Failure]:
        return [Failure(msg.pid, msg.phase, msg.step, "gone") for msg in plan]

    run = federation(toy_task(), FedAvg, on_failure="skip")
    with pytest.raises(RunFailed, match=r"client 3 .*client 0 "):
        run.step(failing)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        # The model has no such labels, so training raises.
        (lambda data: Samples(data.x, data.y + 7), r"\w+Error: .*[Tt]arget"),
        # Training ends with NaN in every weight.
        (lambda data: Samples(data.x * NAN, data.y), "weights.* NaN "),
    ],
    ids=["raises", "diverges"],
)
def test_training_that_fails_names_its_client(
    federation: Callable[..., Any], damage: Callable[[Samples], Samples], message: str
) -> None:
    task = toy_task()
    clients = list(task.clients)
    clients[2] = ClientData(damage(clients[2].train))
    with pytest.raises(RunFailed, match=f"client 2 .*'train', step 1: {message}"):
        federation(Task(task.model, task.criterion, clients, None, 2), FedAvg).step()


@pytest.mark.parametrize(
    "plugins", [[], [FedNormPlugin(temperature=2.0)]], ids=["missing", "other settings"]
)
def test_a_client_with_other_plugins_is_refused(
    federation: Callable[..., Any], plugins: list[FedNormPlugin]
) -> None:
    run = federation(toy_task(), FedAvg, plugins=lambda: [FedNormPlugin()])
    run.client = lambda: FedClient(run.workspace, FedAvg(), plugins, run.store)
    message = r"client 3 .*plug-ins.*fednorm.*server.*here"
    with pytest.raises(RunFailed, match=message):
        run.step()


def test_metrics_are_means_over_the_clients_that_sent_them(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(3), FedAvg)

    def with_metrics(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        for reply in replies:
            own = {"some": 6.0} if reply.pid == 1 else {"others": 2.0 + reply.pid}
            reply.metrics = {"all": float(reply.pid), **own}
        return replies

    run.step(with_metrics)
    assert run.current.metrics == {"all": 1.0, "some": 6.0, "others": 3.0}
