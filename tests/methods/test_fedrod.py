"""FedROD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from maths.cases import named_case
from methods.by_hand import EPOCHS, LR, SIZES, Weights, each, mean, same
from methods.plugs import explore
from methods.readouts import arrays, client_state, copied, step_and_replies
from methods.three_classes import CLASSES, DATA, backward, error, features, logits, task
from torch import nn

from fedhet.core.errors import ConfigError
from fedhet.core.kernel import Plugin, State
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.core.task import ClientData, Samples
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedrod import HEAD, FedROD

Federation = Callable[..., Any]
GAMMA = 0.7
ZERO = {"weight": np.zeros((CLASSES, 4)), "bias": np.zeros(CLASSES)}
LOCAL = {"momentum": 0.5, "weight_decay": 0.01, "clip": 0.3}


def personal_logits(w: Weights, head: Weights, x: np.ndarray) -> np.ndarray:
    return logits(w, x) + features(w, x) @ head["weight"].T + head["bias"]


def local(x: Weights, head: Weights, pid: int) -> tuple[Weights, Weights]:
    """(The model, the personal head) after some steps on all of the client's data.

    A class that the client lacks gets no probability.
    """
    inputs, y = DATA[pid]
    with np.errstate(divide="ignore"):
        prior = GAMMA * np.log(np.bincount(y, minlength=CLASSES))
    w = x
    for _ in range(EPOCHS):
        z = features(w, inputs)
        d_head = error(personal_logits(w, head, inputs), y) / len(y)
        g = backward(w, inputs, error(logits(w, inputs) + prior, y))
        w = each(lambda a, b: a - LR * b, w, g)
        d_weights = {"weight": d_head.T @ z, "bias": d_head.sum(0)}
        head = each(lambda a, b: a - LR * b, head, d_weights)
    return w, head


def loss_and_accuracy(a: np.ndarray, y: np.ndarray) -> list[float]:
    """Of the logits `a` at the labels y."""
    loss = np.mean(np.log(np.exp(a).sum(1)) - a[np.arange(len(y)), y])
    return [float(loss), float(np.mean(a.argmax(1) == y))]


@pytest.mark.parametrize("init", ["zeros", "copy"])
def test_by_hand(federation: Federation, init: str) -> None:
    """Chen and Chao, algorithm 1 with linear personal heads.

    Both heads learn on the same batches, on one body.
    """
    run = federation(
        task(),
        FedROD,
        options={"gamma": GAMMA, "init": init},
        lr=LR,
        epochs=EPOCHS,
        batch_size=99,
        rounds=3,
        fraction=0.6,
    )
    first = ZERO
    if init == "copy":
        first = {name: run.model[f"head.{name}"].numpy().copy() for name in ZERO}
    heads: dict[int, Weights] = {}
    for _ in range(3):
        x = copied(run.model)
        cohort = [msg.pid for msg in run.step()]
        some_return = bool(set(cohort) & set(heads))
        ends = {pid: local(x, heads.get(pid, first), pid) for pid in cohort}
        new = arrays(run.model)
        same(new, mean([ends[k][0] for k in cohort], [SIZES[k] for k in cohort]))
        heads |= {pid: head for pid, (_, head) in ends.items()}
        for pid, head in heads.items():
            same(arrays(client_state(run, pid, HEAD)), head)
        for msg in evaluation_messages(run.strategy):  # also those that never took part
            inputs, y = DATA[msg.pid]
            metrics = run.client().handle(msg).metrics
            outputs = {
                "global": logits(new, inputs),
                "personal": personal_logits(new, heads.get(msg.pid, first), inputs),
            }
            for view, output in outputs.items():
                scores = [metrics[f"test.{view}.{name}"] for name in ("loss", "accuracy")]
                assert scores == pytest.approx(loss_and_accuracy(output, y))
    assert some_return and len(heads) > len(cohort)


def test_without_balance_the_global_model_is_fedavgs(federation: Federation) -> None:
    """Bit for bit: the personal head leaves no trace in it, whatever the local optimiser."""
    settings = {"rounds": 3, "fraction": 0.75, "epochs": 2, "lr": LR, "local": LOCAL}
    fedavg = federation(task(), FedAvg, **settings).run().sha256
    plain, balanced = (
        federation(task(), FedROD, options={"gamma": gamma}, **settings).run().sha256
        for gamma in (0, 1)
    )
    assert fedavg == plain != balanced


def test_where_the_personal_heads_start_does_not_move_the_global_model(
    federation: Federation,
) -> None:
    zeros, copy = (
        federation(toy_task(norm=True), FedROD, options={"init": init}, rounds=2).run()
        for init in ("zeros", "copy")
    )
    assert zeros.sha256 == copy.sha256
    heads = [client_state(run, 0, HEAD)["weight"] for run in (zeros, copy)]
    assert not torch.equal(*heads)


class HeadOnly(nn.Module):
    """A head that starts from zeros, on the inputs themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, CLASSES, dtype=torch.float64)
        nn.init.zeros_(self.head.weight)

    def features(self, x: Any) -> Any:
        return x

    def forward(self, x: Any) -> Any:
        return self.head(x)


def test_the_personal_head_has_its_own_optimiser(federation: Federation) -> None:
    """It is torch's SGD with momentum, decay and clipping on the personal head alone."""
    x, y = (torch.from_numpy(a) for a in DATA[0])
    run = federation(
        replace(task(), model=HeadOnly),
        FedROD,
        rounds=1,
        lr=LR,
        epochs=4,
        batch_size=99,
        local=LOCAL,
    )
    run.step()
    generic = HeadOnly()
    generic.load_state_dict(run.workspace.initial)
    head = nn.Linear(3, CLASSES, dtype=torch.float64)
    for p in head.parameters():
        nn.init.zeros_(p)
    prior = torch.bincount(y, minlength=CLASSES).double().log()
    settings = {"lr": LR, "momentum": 0.5, "weight_decay": 0.01}
    optimizers = [torch.optim.SGD(module.parameters(), **settings) for module in (generic, head)]
    for _ in range(4):
        losses = (
            nn.functional.cross_entropy(generic(x) + prior, y),
            nn.functional.cross_entropy(generic(x).detach() + head(x), y),
        )
        for module, optimizer, loss in zip((generic, head), optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        for optimizer in optimizers:
            optimizer.step()
    kept = client_state(run, 0, HEAD)
    for name, p in head.named_parameters():
        torch.testing.assert_close(kept[name], p.detach(), rtol=1e-9, atol=1e-12)


def test_the_personal_head_never_leaves_the_client(federation: Federation) -> None:
    """On the wire there are the model's tensors and the header."""
    run = federation(toy_task(), FedROD, rounds=2)
    for _ in range(2):
        plan, replies = step_and_replies(run)
        for msg, reply in zip(plan, replies, strict=True):
            packed, _, config = wire.reply_arrays(msg, reply)
            shapes = [tuple(run.model[name].shape) for name in run.workspace.shared]
            assert [array.shape for array in packed] == shapes
            assert not any("fedrod" in key for key in config)
            assert "fedrod" not in config["fedhet"]
            head = client_state(run, reply.pid, HEAD)["weight"].numpy()
            assert head.any()
            assert not any(np.array_equal(array, head) for array in packed)


def test_evaluation_changes_nothing(federation: Federation) -> None:
    watched, alone = (
        federation(toy_task(norm=True), FedROD, rounds=3, fraction=0.5) for _ in range(2)
    )
    for _ in range(3):
        for run in (watched, alone):
            run.step()
        for msg in evaluation_messages(watched.strategy):
            metrics = watched.client().handle(msg).metrics
            trained = msg.pid in watched.strategy.run.versions
            assert (metrics["test.personal.loss"] != metrics["test.global.loss"]) is trained
        assert watched.sha256 == alone.sha256
        for pid, version in alone.strategy.run.versions.items():
            kept, expected = (run.store.load(pid, version) for run in (watched, alone))
            assert kept.keys() == expected.keys()
            assert all(torch.equal(t, expected[name]) for name, t in kept.items())


def test_samples_that_a_plugin_adds_are_counted(federation: Federation) -> None:
    """Samples of a class that the client lacks are trained on with that class's count."""

    @dataclass(frozen=True)
    class Copies(Plugin):
        name = "copies"

        def data(self, samples: Samples, state: State) -> Samples:
            x, y = samples.x, samples.y
            return Samples(torch.cat([x, x]), torch.cat([y, torch.full_like(y, 2)]))

    x, y = (torch.from_numpy(a) for a in DATA[2])
    assert 2 not in y
    added = ClientData((torch.cat([x, x]), torch.cat([y, torch.full_like(y, 2)])))
    plain_task = replace(task(), clients=[task().clients[2]], sizes=[len(y)])
    larger_task = replace(task(), clients=[added], sizes=[2 * len(y)])
    by_plugin = federation(plain_task, FedROD, plugins=lambda: [Copies()]).run()
    assert by_plugin.sha256 == federation(larger_task, FedROD).run().sha256


def test_a_plugins_own_phase_trains_on_the_criterion(federation: Federation) -> None:
    """As under FedAvg, because FedROD's terms are those of its own training.

    The rounds after it stay the same.
    """
    ends: dict[type, list[Any]] = {FedROD: [], FedAvg: []}
    runs = {
        cls: federation(task(), cls, plugins=lambda cls=cls: [explore(ends[cls])], rounds=2).run()
        for cls in ends
    }
    assert ends[FedROD]
    for explored, expected in zip(*ends.values(), strict=True):
        assert all(torch.equal(t, expected[name]) for name, t in explored.items())
    assert runs[FedROD].sha256 == federation(task(), FedROD, rounds=2).run().sha256


class DeepHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def features(self, x: Any) -> Any:
        return x


def test_a_model_without_a_linear_head_is_refused(federation: Federation) -> None:
    for model in [lambda: nn.Linear(3, 3), DeepHead]:
        message = rf"method=fedrod .*features\(x\).*linear.*`head`.* {type(model()).__name__}"
        with named_case(model), pytest.raises(ConfigError, match=message):
            federation(replace(task(), model=model), FedROD)


def test_a_task_without_classes_is_refused(federation: Federation) -> None:
    with pytest.raises(ConfigError, match=r"method=fedrod .*class .*target=labels"):
        federation(replace(task(), target="labels"), FedROD)


def test_bad_options_are_named(federation: Federation) -> None:
    for options in [{"gamma": -0.1}, {"gamma": None}, {"init": "random"}]:
        with (
            named_case(options),
            pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}="),
        ):
            federation(task(), FedROD, options=options)
