"""FedROD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.by_hand import EPOCHS, LR, SIZES, Weights, each, mean, same
from methods.plugs import Explore
from methods.three_classes import CLASSES, DATA, backward, error, features, logits, task
from torch import nn

from fedhet.data.toy import toy_task
from fedhet.engines.vectorized import obstacle
from fedhet.errors import ConfigError
from fedhet.evaluation import evaluation_messages
from fedhet.flower import wire
from fedhet.messages import LocalSettings
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedrod import FedROD
from fedhet.plugin import Plugin
from fedhet.task import ClientData, Samples

Federation = Callable[..., Any]
GAMMA = 0.7
ZERO = {"weight": np.zeros((CLASSES, 4)), "bias": np.zeros(CLASSES)}


def local(x: Weights, head: Weights, pid: int) -> tuple[Weights, Weights]:
    """(The model, the personal head) after some steps on all of the client's data; a class that it
    lacks gets no probability."""
    inputs, y = DATA[pid]
    with np.errstate(divide="ignore"):
        prior = GAMMA * np.log(np.bincount(y, minlength=CLASSES))
    w = x
    for _ in range(EPOCHS):
        z, generic = features(w, inputs), logits(w, inputs)
        d_head = error(generic + z @ head["weight"].T + head["bias"], y) / len(y)
        g = backward(w, inputs, error(generic + prior, y))
        w = each(lambda a, b: a - LR * b, w, g)
        head = {
            "weight": head["weight"] - LR * d_head.T @ z,
            "bias": head["bias"] - LR * d_head.sum(0),
        }
    return w, head


def scores(a: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    return float(np.mean(np.log(np.exp(a).sum(1)) - a[np.arange(len(y)), y])), float(
        np.mean(a.argmax(1) == y)
    )


@pytest.mark.parametrize("init", ["zeros", "copy"])
def test_by_hand(federation: Federation, init: str) -> None:
    """Chen and Chao, algorithm 1 with linear personal heads: both heads learn on the same batches,
    on one body."""
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
    first = (
        {name: run.model[f"head.{name}"].numpy().copy() for name in ZERO}
        if init == "copy"
        else ZERO
    )
    heads: dict[int, Weights] = {}
    for _ in range(3):
        x = {name: t.numpy().copy() for name, t in run.model.items()}
        cohort = [msg.pid for msg in run.step()]
        again = bool(set(cohort) & set(heads))
        ends = {pid: local(x, heads.get(pid, first), pid) for pid in cohort}
        new = {name: t.numpy() for name, t in run.model.items()}
        same(new, mean([ends[k][0] for k in cohort], [SIZES[k] for k in cohort]))
        heads |= {pid: head for pid, (_, head) in ends.items()}
        for pid, head in heads.items():
            kept = run.store.load(pid, run.strategy.versions[pid])
            same({name: kept[f"fedrod.head/{name}"].numpy() for name in head}, head)
        for msg in evaluation_messages(run.strategy):  # everybody, also those that were never asked
            (inputs, y), head = DATA[msg.pid], heads.get(msg.pid, first)
            found, generic = run.client().handle(msg).metrics, logits(new, inputs)
            for view, a in (
                ("global", generic),
                ("personal", generic + features(new, inputs) @ head["weight"].T + head["bias"]),
            ):
                assert [
                    found[f"test.{view}.{what}"] for what in ("loss", "accuracy")
                ] == pytest.approx(scores(a, y))
    assert again and len(heads) > len(cohort)


LOCAL = {"momentum": 0.5, "weight_decay": 0.01, "clip": 0.3}


def test_without_balance_the_global_model_is_fedavgs(federation: Federation) -> None:
    """Bit for bit: the personal head leaves no trace in it, whatever the local optimiser."""
    how = {"rounds": 3, "fraction": 0.75, "epochs": 2, "lr": LR, "local": LOCAL}
    found = [
        federation(task(), cls, options=options, **how).run().sha256
        for cls, options in ((FedAvg, {}), (FedROD, {"gamma": 0}), (FedROD, {"gamma": 1}))
    ]
    assert found[0] == found[1] != found[2]


def test_where_the_personal_heads_start_does_not_move_the_global_model(
    federation: Federation,
) -> None:
    runs = [
        federation(toy_task(norm=True), FedROD, options={"init": init}, rounds=2).run()
        for init in ("zeros", "copy")
    ]
    heads = [run.store.load(0, run.strategy.versions[0])["fedrod.head/weight"] for run in runs]
    assert runs[0].sha256 == runs[1].sha256 and not torch.equal(*heads)


def test_the_personal_head_has_an_optimiser_of_its_own(federation: Federation) -> None:
    """torch's SGD with momentum, decay and clipping on the head alone; the features of full batches
    at lr 0 stay."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, CLASSES, dtype=torch.float64)
            nn.init.zeros_(self.head.weight)

        def features(self, x: Any) -> Any:
            return x

        def forward(self, x: Any) -> Any:
            return self.head(x)

    x, y = (torch.from_numpy(a) for a in DATA[0])
    run = federation(
        replace(task(), model=Frozen), FedROD, rounds=1, lr=LR, epochs=4, batch_size=99, local=LOCAL
    )
    run.step()
    generic, head = Frozen(), nn.Linear(3, CLASSES, dtype=torch.float64)
    generic.load_state_dict(run.site.initial)
    for p in head.parameters():
        nn.init.zeros_(p)
    prior = torch.bincount(y, minlength=CLASSES).double().log()
    rule = {"lr": LR, "momentum": 0.5, "weight_decay": 0.01}
    optimizers = [torch.optim.SGD(module.parameters(), **rule) for module in (generic, head)]
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
    kept = run.store.load(0, run.strategy.versions[0])
    for name, p in head.named_parameters():
        torch.testing.assert_close(kept[f"fedrod.head/{name}"], p.detach(), rtol=1e-9, atol=1e-12)


def test_the_personal_head_never_leaves_the_client(federation: Federation) -> None:
    """On the wire there are the model's tensors and the header."""
    run = federation(toy_task(), FedROD, rounds=2)
    for _ in range(2):
        heard: list[Any] = []
        run.step(lambda plan, replies, heard=heard: heard.extend(replies) or replies)
        for reply in heard:
            arrays, _, carried = wire.reply_arrays(reply)
            assert [array.shape for array in arrays] == [
                tuple(run.model[name].shape) for name in run.site.shared
            ]
            assert not any("fedrod" in key for key in carried) and "fedrod" not in carried["fedhet"]
            head = run.store.load(reply.pid, run.strategy.versions[reply.pid])[
                "fedrod.head/weight"
            ].numpy()
            assert head.any() and not any(
                array.shape == head.shape and np.array_equal(array, head) for array in arrays
            )


def test_evaluation_changes_nothing(federation: Federation) -> None:
    watched, alone = (
        federation(toy_task(norm=True), FedROD, rounds=3, fraction=0.5) for _ in range(2)
    )
    for _ in range(3):
        for run in (watched, alone):
            run.step()
        for msg in evaluation_messages(watched.strategy):
            metrics = watched.client().handle(msg).metrics
            trained = msg.pid in watched.strategy.versions
            assert (metrics["test.personal.loss"] != metrics["test.global.loss"]) is trained
        assert watched.sha256 == alone.sha256
        for pid, version in alone.strategy.versions.items():
            kept, other = (run.store.load(pid, version) for run in (watched, alone))
            assert kept.keys() == other.keys() and all(
                torch.equal(t, other[name]) for name, t in kept.items()
            )


def test_what_a_plugin_adds_is_counted(federation: Federation) -> None:
    """Samples of a class that the client lacks are trained on with that class's count."""

    class Copies(Plugin):
        name = "copies"

        def data(self, raw: Samples) -> Samples:
            return Samples(torch.cat([raw.x, raw.x]), torch.cat([raw.y, torch.full_like(raw.y, 2)]))

    _, y = DATA[2]
    assert 2 not in y
    x, y = (torch.from_numpy(a) for a in DATA[2])
    plain, added = task(), [ClientData((torch.cat([x, x]), torch.cat([y, torch.full_like(y, 2)])))]
    by_plugin = federation(
        replace(plain, clients=[plain.clients[2]], sizes=[len(y)]),
        FedROD,
        plugins=lambda: [Copies()],
    ).run()
    assert (
        by_plugin.sha256
        == federation(replace(plain, clients=added, sizes=[2 * len(y)]), FedROD).run().sha256
    )


def test_a_plugins_own_phase_trains_on_the_criterion(federation: Federation) -> None:
    """Without what only FedROD's phase sends, as FedAvg does; its rounds stay the same."""
    ends: dict[type, list[Any]] = {FedROD: [], FedAvg: []}
    runs = {
        cls: federation(task(), cls, plugins=lambda cls=cls: [Explore(ends[cls])], rounds=2).run()
        for cls in ends
    }
    assert (
        all(
            torch.equal(t, b[name])
            for a, b in zip(*ends.values(), strict=True)
            for name, t in a.items()
        )
        and ends[FedROD]
    )
    assert runs[FedROD].sha256 == federation(task(), FedROD, rounds=2).run().sha256


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def features(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    "model", [lambda: nn.Linear(3, 3), Deep], ids=["no features", "no linear head"]
)
def test_a_model_without_a_linear_head_is_refused(federation: Federation, model: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"method=fedrod .*features\(x\) and a linear layer `head`, which (Linear|Deep) has not"
        ),
    ):
        federation(replace(task(), model=model), FedROD)


def test_a_task_without_classes_is_refused(federation: Federation) -> None:
    with pytest.raises(ConfigError, match="method=fedrod balances the classes"):
        federation(replace(task(), classes=0), FedROD)


@pytest.mark.parametrize("options", [{"gamma": -0.1}, {"gamma": None}, {"init": "random"}])
def test_bad_options_are_named(federation: Federation, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}="):
        federation(task(), FedROD, options=options)


def test_clients_are_not_trained_as_one(federation: Federation) -> None:
    assert (
        obstacle(federation(task(), FedROD).client(), LocalSettings(lr=0.1))
        == "FedRODClient has its own train"
    )
