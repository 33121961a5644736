"""A bad reply stops the run with the client, the phase, the step and the cause, or is left out as
if the client had no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedhet.data.toy import toy_task
from fedhet.errors import RunFailed
from fedhet.messages import Broadcast, Failure, Reply, Update
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold
from fedhet.task import ClientData, Samples, Task

Change = Callable[[Update], Reply]
NAN = float("nan")


def weights(change: Callable[[dict[str, Tensor]], Any]) -> Change:
    def apply(update: Update) -> Reply:
        assert update.weights is not None
        change(update.weights)
        return update

    return apply


def extras(**values: Any) -> Change:
    def apply(update: Update) -> Reply:
        for name, value in values.items():
            update.extras[name.replace("__", ".")] = value
        return update

    return apply


def field(**values: Any) -> Change:
    def apply(update: Update) -> Reply:
        for name, value in values.items():
            setattr(update, name, value)
        return update

    return apply


def tree(update: Update, name: str) -> dict[str, Tensor]:
    found = update.extras[name]
    assert isinstance(found, dict)
    return found


def lacking(name: str) -> Change:
    def apply(update: Update) -> Reply:
        del update.extras[name]
        return update

    return apply


BAD: dict[str, tuple[Change, str]] = {
    "raises": (lambda u: Failure(u.pid, "train", 1, "ValueError: disk full"), "disk full"),
    "nan": (weights(lambda w: w["head.bias"].fill_(NAN)), "head.bias"),
    "inf": (weights(lambda w: w["body.0.weight"][0].fill_(float("inf"))), "body.0.weight"),
    "shape": (
        weights(lambda w: w.update({"head.bias": torch.zeros(3)})),
        r"head.bias.*\(3,\).*\(2,\)",
    ),
    "transposed": (
        weights(lambda w: w.update({"head.weight": w["head.weight"].T})),
        r"head.weight.*\(3, 2\)",
    ),
    "dtype": (
        weights(lambda w: w.update({"head.bias": w["head.bias"].double()})),
        "head.bias.*float64.*float32",
    ),
    "missing": (weights(lambda w: w.pop("head.bias")), "missing.*head.bias"),
    "unexpected": (weights(lambda w: w.update(more=torch.zeros(1))), "unexpected.*more"),
    "no weights": (field(weights=None), "weights"),
    "no samples": (field(num_examples=0), "num_examples is 0"),
    "negative": (field(num_examples=-3), "num_examples is -3"),
    "fraction": (field(num_examples=2.5), "num_examples is 2.5"),
    "nan samples": (field(num_examples=NAN), "num_examples is nan"),
    "bool": (field(num_examples=True), "num_examples is True"),
    "text": (field(num_examples="12"), "num_examples is '12'"),
    "metrics": (field(metrics={"loss": "low"}), "loss"),
    "no metrics": (field(metrics=[]), "metrics"),
}
BAD_Z: dict[str, tuple[Change, str]] = {
    "z missing": (lacking("fednorm.z"), "fednorm.z.*missing"),
    "z nan": (extras(fednorm__z=torch.tensor([NAN, 0.0, 0.0])), "fednorm.z.*NaN"),
    "z length": (extras(fednorm__z=torch.ones(5)), "fednorm.z.*5"),
    "z matrix": (extras(fednorm__z=torch.ones(3, 1)), r"fednorm.z.*\(3, 1\)"),
    "z whole numbers": (extras(fednorm__z=torch.ones(3, dtype=torch.int64)), "fednorm.z.*int64"),
    "z scalar": (extras(fednorm__z=1.0), "fednorm.z.*float"),
    "z tree": (extras(fednorm__z={"z": torch.ones(3)}), "fednorm.z.*dict"),
}
BAD_C: dict[str, tuple[Change, str]] = {
    "c missing": (lacking("scaffold.c_plus"), "scaffold.c_plus.*missing"),
    "c tensor": (extras(scaffold__c_plus=torch.ones(3)), "scaffold.c_plus.*tree"),
    "c nan": (
        lambda u: (tree(u, "scaffold.c_plus")["head.bias"].fill_(NAN), u)[1],
        "scaffold.c_plus.*head.bias",
    ),
    "c names": (
        lambda u: (tree(u, "scaffold.c_plus").pop("head.bias"), u)[1],
        "scaffold.c_plus.*head.bias",
    ),
    "steps missing": (lacking("scaffold.steps"), "scaffold.steps.*missing"),
    "steps zero": (extras(scaffold__steps=0), "scaffold.steps.*0"),
    "steps fraction": (extras(scaffold__steps=2.5), r"scaffold.steps.*2\.5.*whole number >= 1"),
    "steps nan": (extras(scaffold__steps=NAN), "scaffold.steps.*nan"),
    "steps text": (extras(scaffold__steps="4"), "scaffold.steps.*'4'"),
    "steps flag": (extras(scaffold__steps=True), "scaffold.steps.*True"),
}
CASES = [
    pytest.param(cls, plugins, *bad, id=name)
    for cls, plugins, table in [
        (FedAvg, list, BAD),
        (FedAvg, lambda: [FedNormPlugin()], BAD_Z),
        (Scaffold, list, BAD_C),
    ]
    for name, bad in table.items()
]


def without(pid: int) -> Task:
    """The toy federation in which client `pid` has no training data, so that it is never asked."""
    task = toy_task()
    clients = list(task.clients)
    none = clients[pid].train
    clients[pid] = ClientData(Samples(none.x[:0], none.y[:0]))
    return Task(task.model, task.criterion, clients, task.test, 2)


def damaging(pid: int, change: Change) -> Callable[[list[Broadcast], list[Any]], list[Any]]:
    return lambda plan, replies: [change(reply) if reply.pid == pid else reply for reply in replies]


@pytest.mark.parametrize(("cls", "plugins", "change", "said"), CASES)
@pytest.mark.parametrize("pid", [3, 1])  # the first in the order of replies, and a later one
def test_stop_and_skip(
    federation: Callable[..., Any], cls: type, plugins: Any, change: Change, said: str, pid: int
) -> None:
    stopped = federation(toy_task(), cls, plugins=plugins, rounds=2)
    before = stopped.sha256
    with pytest.raises(
        RunFailed, match=rf"(?s)client {pid} failed in phase 'train', step 1: .*{said}"
    ):
        stopped.step(damaging(pid, change))
    assert stopped.sha256 == before

    skipped = federation(toy_task(), cls, plugins=plugins, rounds=2, on_failure="skip")
    expected = federation(without(pid), cls, plugins=plugins, rounds=2)
    for _ in range(2):
        skipped.step(damaging(pid, change))
        expected.step()
        failures = skipped.strategy.current.failures
        assert [(f.pid, f.phase) for f in failures] == [(pid, "train")]
        # left out, and the others' weights sum to one again
        assert skipped.sha256 == expected.sha256


@pytest.mark.parametrize(
    ("ndim", "said"),
    [
        (None, "a floating-point tensor is expected"),
        (2, "a floating-point tensor of 2 dimensions is expected"),
    ],
)
def test_a_wrong_tensor_is_told_what_is_expected(ndim: int | None, said: str) -> None:
    with pytest.raises(
        ValueError, match=rf"extra 'z' is a torch.int64 tensor of shape \(3,\); {said}$"
    ):
        Update(0, 1, extras={"z": torch.arange(3)}).tensor("z", ndim)


def test_all_skipped_is_an_error(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(), FedAvg, on_failure="skip")
    with pytest.raises(RunFailed, match=r"client 3 failed.*client 0 failed"):
        run.step(
            lambda plan, replies: [Failure(msg.pid, msg.phase, msg.step, "gone") for msg in plan]
        )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda s: Samples(s.x, s.y + 7),
            r"\w+Error: .*[Tt]arget",
        ),  # labels that the model does not have: training raises
        (
            lambda s: Samples(s.x * NAN, s.y),
            "weights, tensor .* NaN or infinite",
        ),  # training ends with nothing but NaN
    ],
    ids=["raises", "diverges"],
)
def test_training_that_fails_names_its_client(
    federation: Callable[..., Any], damage: Callable[[Samples], Samples], said: str
) -> None:
    task = toy_task()
    clients = list(task.clients)
    clients[2] = ClientData(damage(clients[2].train))
    with pytest.raises(RunFailed, match=f"client 2 failed in phase 'train', step 1: {said}"):
        federation(Task(task.model, task.criterion, clients, None, 2), FedAvg).step()


@pytest.mark.parametrize(
    "settings", [[], [FedNormPlugin(temperature=2.0)]], ids=["missing", "other settings"]
)
def test_a_client_with_other_plugins_is_refused(
    federation: Callable[..., Any], settings: list[FedNormPlugin]
) -> None:
    run = federation(toy_task(), FedAvg, plugins=lambda: [FedNormPlugin()])
    run.client = lambda: FedAvg.client_cls(run.site, settings, run.store)
    with pytest.raises(
        RunFailed, match=r"client 3 .*differ in their plug-ins.*fednorm.*on the server.*here"
    ):
        run.step()


def test_metrics_are_means_over_those_who_sent_them(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(3), FedAvg)

    def measuring(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        for reply in replies:
            reply.metrics = {
                "all": float(reply.pid),
                **({"some": 6.0} if reply.pid == 1 else {"others": 2.0 + reply.pid}),
            }
        return replies

    run.step(measuring)
    assert run.strategy.current.metrics == {"all": 1.0, "some": 6.0, "others": 3.0}
