"""FedBABU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from asking import packed_message
from maths.cases import named_case
from methods.by_hand import (
    DATA,
    EPOCHS,
    LR,
    SIZES,
    Case,
    V,
    Weights,
    criterion,
    gradient,
    latents,
    mean,
    same,
    task,
)
from methods.plugs import Fixed
from torch import nn

from fedhet.core.client.context import ClientContext
from fedhet.core.errors import ConfigError
from fedhet.core.server.evaluation import evaluation_messages, global_scores
from fedhet.core.task import ClientData, Task
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedbabu import FedBABU
from fedhet.methods.fedprox import FedProxPlugin

Federation = Callable[..., Any]
BODY = ("body.weight", "body.bias")
HEAD = ("head.weight", "head.bias")


def sgd(w: Weights, pid: int, names: tuple[str, ...], epochs: int) -> Weights:
    """Steps of local SGD on the tensors with these names."""
    for _ in range(epochs):
        g = gradient(w, *DATA[pid])
        w = {name: t - LR * g[name] if name in names else t for name, t in w.items()}
    return w


@pytest.mark.parametrize("weights", [None, V], ids=["n_k", "fixed"])
def test_by_hand(case: Callable[..., Case], weights: Any) -> None:
    """Oh et al., algorithm 1: the head's learning rate is 0, and the body is averaged."""
    running = case(FedBABU, plugins=lambda: [Fixed(V)] if weights else [])
    first = running.weights
    for x, cohort, new in running.rounds():
        ends = [sgd(x, k, BODY, EPOCHS) for k in cohort]
        same(new, mean(ends, [(weights or SIZES)[k] for k in cohort]))
        assert all(np.array_equal(new[name], first[name]) for name in HEAD)


def with_test_data() -> Task:
    """The task by hand, whose clients are also tested on their own training data."""
    plain = task()
    clients = [ClientData(client.train, None, client.train) for client in plain.clients]
    return Task(plain.model, criterion, clients, None, 2)


@pytest.mark.parametrize(("part", "names"), [("full", BODY + HEAD), ("head", HEAD), ("body", BODY)])
@pytest.mark.parametrize("epochs", [0, 3])
def test_fine_tuning_by_hand(
    federation: Federation, part: str, names: tuple[str, ...], epochs: int
) -> None:
    """Full batches: E steps of the part from the global model, which is scored as received."""
    options = {"finetune": part, "finetune_epochs": epochs}
    run = federation(
        with_test_data(),
        FedBABU,
        options=options,
        lr=LR,
        epochs=2,
        batch_size=99,
        rounds=2,
    )
    for _ in range(2):
        run.step()
        x = {name: t.numpy().copy() for name, t in run.model.items()}
        for msg in evaluation_messages(run.strategy):
            metrics = run.client().handle(msg).metrics
            inputs, y = DATA[msg.pid]
            for view, w in (("global", x), ("personal", sgd(x, msg.pid, names, epochs))):
                logits = latents(w, inputs) @ w["head.weight"].T + w["head.bias"]
                loss = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y])
                accuracy = np.mean(logits.argmax(1) == y)
                assert metrics[f"test.{view}.loss"] == pytest.approx(loss, rel=1e-9), view
                assert metrics[f"test.{view}.accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("part", "buffers"), [("full", "average"), ("head", "local"), ("body", "frozen")]
)
def test_evaluation_leaves_no_trace(federation: Federation, part: str, buffers: str) -> None:
    """Weights and client state are the same in every round with and without evaluation."""
    how = {
        "options": {"finetune": part},
        "buffers": buffers,
        "rounds": 3,
        "fraction": 0.75,
        "epochs": 2,
        "local": {"momentum": 0.5},
    }
    watched, alone = (federation(toy_task(norm=True), FedBABU, **how) for _ in range(2))
    flags = {name: p.requires_grad for name, p in watched.workspace.model.named_parameters()}
    assert set(flags.values()) == {True, False}
    for _ in range(3):
        watched.step()
        alone.step()
        for _ in range(2):
            for msg in evaluation_messages(watched.strategy):
                metrics = watched.client().handle(msg).metrics
                received = metrics.get("test.global.loss")  # none under buffers=local
                assert (received is None) == (buffers == "local")
                assert metrics["test.personal.loss"] != received
            global_scores(watched.strategy)
        assert {
            name: p.requires_grad for name, p in watched.workspace.model.named_parameters()
        } == flags
        assert watched.sha256 == alone.sha256
        for pid in range(4):
            kept, other = (
                run.store.load(pid, run.strategy.run.versions.get(pid, 0)) or {}
                for run in (watched, alone)
            )
            assert kept.keys() == other.keys()
            assert all(torch.equal(t, other[name]) for name, t in kept.items())


def test_a_failed_fine_tuning_leaves_no_trace_either(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = federation(toy_task(), FedBABU)
    run.step()
    before = run.sha256
    client = run.client()
    monkeypatch.setattr(ClientContext, "fit", lambda *args, **kwargs: 1 / 0)
    failure = client.handle(evaluation_messages(run.strategy)[1])
    assert failure.pid == 1
    assert "ZeroDivisionError" in failure.cause
    trained = [name for name, p in run.workspace.model.named_parameters() if p.requires_grad]
    assert trained == run.workspace.trained
    assert run.sha256 == before


def test_nothing_moves_the_head_and_it_never_travels(launch: Callable[..., Any]) -> None:
    """Neither weight decay nor momentum; the bytes are those of the body's 15 parameters."""
    lines = [
        "method=fedbabu",
        "client.weight_decay=0.1",
        "client.momentum=0.9",
        "client.lr=0.5",
        "eval.every=1",
    ]
    one, four = (launch(*lines, f"rounds={rounds}", task=toy_task()) for rounds in (1, 4))
    for name in HEAD:
        assert torch.equal(one.weights[name], four.weights[name])
        assert one.weights[name].any()
    assert not torch.equal(one.weights["body.0.weight"], four.weights["body.0.weight"])
    assert one.summary["bytes"] == {"up": {"model": 4 * 4 * 15}, "down": {"model": 4 * 4 * 15}}


def test_no_packed_message_has_the_head(federation: Federation) -> None:
    """Nor has an evaluation's reply, though the client has just fine-tuned a head of its own."""
    run = federation(toy_task(norm=True), FedBABU)
    body = [tuple(t.shape) for name, t in run.model.items() if not name.startswith("head.")]
    for msg in run.strategy.plan(1).messages:
        assert [array.shape for array in packed_message(msg)[0]] == body
        arrays, _, config = wire.reply_arrays(msg, run.client().handle(msg))
        assert [array.shape for array in arrays] == body
        assert not any(isinstance(value, bytes) for value in config.values())
    for msg in evaluation_messages(run.strategy):
        arrays, _, config = wire.reply_arrays(msg, run.client().handle(msg))
        assert arrays == []
        assert not any(isinstance(value, bytes) for value in config.values())


def test_both_accuracies_are_recorded_and_engines_agree(launch: Callable[..., Any]) -> None:
    """Workers fine-tune with the options of the run.

    Without evaluation the weights are the same.
    """
    lines = [
        "method=fedbabu",
        "method.finetune_epochs=3",
        "method.finetune=head",
        "rounds=2",
        "client.lr=0.5",
        "client.lr_decay=0.5",
    ]
    runs = [
        launch(*lines, *more, task=toy_task(norm=True))
        for more in ([], ["engine.workers=2"], ["eval.clients=false"])
    ]
    assert len({run.summary["weights_sha256"] for run in runs}) == 1
    texts = [(run.dir / "rounds.jsonl").read_text() for run in runs]
    records = [[json.loads(line) for line in text.splitlines()] for text in texts]
    scores = ("clients_mean", "clients_weighted", "val_mean")
    personal = ("personal_mean", "personal_weighted", "personal_val_mean")
    for one, two, without in zip(*records, strict=True):
        for score in (*scores, *personal):
            assert one[f"acc_{score}"] == two[f"acc_{score}"]
        assert "acc_personal_mean" not in without
        assert one["acc_global"] == without["acc_global"] is not None


def test_fine_tuning_uses_the_base_rate(federation: Federation) -> None:
    run = federation(toy_task(), FedBABU, lr=0.4, lr_decay=0.5, rounds=3)
    for rate in (0.4, 0.2, 0.1):
        assert {msg.local.lr for msg in run.step()} == {rate}
        assert {msg.local.lr for msg in evaluation_messages(run.strategy)} == {0.4}


def test_plugins_do_not_act_in_fine_tuning(federation: Federation) -> None:
    """The proximal term pulls in training only."""
    metrics = []
    for plugins in (list, lambda: [FedProxPlugin(mu=3.0)]):
        run = federation(toy_task(), FedBABU, plugins=plugins, lr=0.3, rounds=2)
        messages = evaluation_messages(run.strategy)
        metrics.append([run.client().handle(msg).metrics for msg in messages])
    assert metrics[0] == metrics[1]


def test_the_body_follows_fedprox(federation: Federation) -> None:
    fedprox, plain = (
        federation(toy_task(), FedBABU, plugins=plugins, epochs=3).run()
        for plugins in (lambda: [FedProxPlugin(mu=5.0)], list)
    )
    assert fedprox.sha256 != plain.sha256


class Headless(nn.Sequential):
    """Has no `head`."""


class FunctionHead(nn.Linear):
    """Has a `head` that is no module."""

    def head(self, z: Any) -> Any:
        return z


def test_a_model_without_a_head_is_refused(federation: Federation) -> None:
    for model in [lambda: Headless(nn.Linear(4, 2)), lambda: FunctionHead(4, 2)]:
        with (
            named_case(model),
            pytest.raises(ConfigError, match=r"fedbabu.*module `head`.*(Headless|FunctionHead)"),
        ):
            federation(replace(toy_task(), model=model), FedBABU)


def test_bad_options_are_named(federation: Federation) -> None:
    for options in [{"finetune_epochs": -1}, {"finetune_epochs": 1.5}, {"finetune": "last"}]:
        with (
            named_case(options),
            pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}="),
        ):
            federation(toy_task(), FedBABU, options=options)


def test_a_parameter_that_the_model_froze_stays_frozen(federation: Federation) -> None:
    """Fine-tuning does not train it either."""

    def frozen() -> nn.Module:
        model = toy_task().model()
        model.body[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
        return model

    run = federation(replace(toy_task(), model=frozen), FedBABU, rounds=2)
    before = run.model["body.0.bias"].clone()
    run.step()
    client = run.client()
    for msg in evaluation_messages(run.strategy):
        client.handle(msg)
        assert torch.equal(run.workspace.model.body[0].bias, before)
    assert torch.equal(run.model["body.0.bias"], before)


def test_other_methods_send_nothing_to_evaluate(federation: Federation) -> None:
    run = federation(toy_task(), FedAvg)
    run.step()
    assert all(not msg.extras for msg in evaluation_messages(run.strategy))
