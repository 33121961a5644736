"""Ditto."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from methods.by_hand import (
    DATA,
    EPOCHS,
    LR,
    SIZES,
    Case,
    Weights,
    case,
    each,
    gradient,
    local_sgd,
    mean,
    same,
    task,
)
from methods.plugs import noisy

from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError
from fedhet.evaluation import evaluation_messages
from fedhet.flower import wire
from fedhet.methods.ditto import PERSONAL, Ditto
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.task import ClientData, Task

__all__ = ["case"]
Federation = Callable[..., Any]


def kept(run: Any, pid: int) -> Weights | None:
    """v_k as the client keeps it."""
    state = run.store.load(pid, run.strategy.versions.get(pid, 0)) or {}
    return {
        name.removeprefix(f"{PERSONAL}/"): t.numpy()
        for name, t in state.items()
        if name.startswith(f"{PERSONAL}/")
    } or None


@pytest.mark.parametrize("lam", [0.0, 0.7])
@pytest.mark.parametrize("epochs", [1, 3])
def test_by_hand(case: Callable[..., Case], lam: float, epochs: int) -> None:
    """Li et al., algorithm 1: v_k <- v_k - lr (g(v_k) + lam (v_k - w^t)) at the participants only,
    and FedAvg of the w_k."""
    running = case(Ditto, options={"lam": lam, "plocal_epochs": epochs})
    first = {name: array.copy() for name, array in running.weights.items()}
    v: list[Weights] = [first] * len(SIZES)
    for x, cohort, found in running.rounds():
        for k in cohort:
            for _ in range(epochs):
                v[k] = each(
                    lambda a, g, b: a - LR * (g + lam * (a - b)), v[k], gradient(v[k], *DATA[k]), x
                )
        same(found, mean([local_sgd(x, k) for k in cohort], [SIZES[k] for k in cohort]))
        for k in range(len(SIZES)):
            same(kept(running.run, k) or first, v[k])


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
@pytest.mark.parametrize(
    "plugins",
    [list, lambda: [FedNormPlugin(temperature=0.05), FedProxPlugin(mu=0.5)]],
    ids=["alone", "plugins"],
)
def test_the_global_model_is_fedavgs(federation: Federation, plugins: Any, buffers: str) -> None:
    """Bit for bit, and so is what clients keep for it; evaluation moves neither, nor any v_k."""
    how = {
        "plugins": plugins,
        "buffers": buffers,
        "rounds": 3,
        "fraction": 0.75,
        "epochs": 2,
        "local": {"momentum": 0.9},
    }
    ditto, alone = (
        federation(noisy(), Ditto, options={"plocal_epochs": 2}, **how) for _ in range(2)
    )
    fedavg = federation(noisy(), FedAvg, **how)
    for _ in range(3):
        for run in (ditto, alone, fedavg):
            run.step()
        for _ in range(2):
            replies = [ditto.client().handle(msg) for msg in evaluation_messages(ditto.strategy)]
        assert ditto.sha256 == fedavg.sha256
        assert ditto.strategy.reports().keys() == fedavg.strategy.reports().keys()
        plain = [
            fedavg.client().handle(msg).metrics for msg in evaluation_messages(fedavg.strategy)
        ]
        assert [
            {name: reply.metrics[name] for name in told}
            for reply, told in zip(replies, plain, strict=True)
        ] == plain
        for pid in range(4):
            ours, unseen, theirs = (
                r.store.load(pid, r.strategy.versions.get(pid, 0)) or {}
                for r in (ditto, alone, fedavg)
            )
            assert ours.keys() == unseen.keys() and all(
                torch.equal(t, unseen[name]) for name, t in ours.items()
            )
            assert all(torch.equal(t, ours[name]) for name, t in theirs.items())


def test_both_models_take_the_same_first_round_where_nothing_pulls(federation: Federation) -> None:
    """v_k = w_k: same start, same batches, each with momentum from zero; so no optimiser is
    shared."""
    run = federation(
        toy_task(norm=True),
        Ditto,
        options={"lam": 0.0},
        epochs=1,
        local={"momentum": 0.9},
        rounds=2,
    )
    heard: list[Any] = []
    run.step(lambda plan, replies: heard.extend(replies) or replies)
    for update in heard:
        v = kept(run, update.pid)
        assert v is not None and all(
            np.array_equal(v[name], t.numpy()) for name, t in update.weights.items()
        )
    run.step()
    assert not np.array_equal(kept(run, 0)["head.weight"], run.model["head.weight"].numpy())  # type: ignore[index]


def test_the_personal_model_has_its_own_statistics(federation: Federation) -> None:
    """Its batch counter counts its own steps only, whatever policy the global model's buffers
    follow."""
    for buffers in ("average", "local"):
        run = federation(
            toy_task(norm=True),
            Ditto,
            options={"plocal_epochs": 3},
            epochs=1,
            batch_size=4,
            rounds=2,
            buffers=buffers,
        ).run()
        for pid in range(4):
            assert int(kept(run, pid)["body.1.num_batches_tracked"]) == 2 * 3 * (3 + pid)  # type: ignore[index]
    frozen = federation(toy_task(norm=True), Ditto, rounds=1, buffers="frozen").run()
    assert "body.1.running_mean" not in kept(frozen, 0)  # type: ignore[operator]


def test_views(federation: Federation) -> None:
    """Global: the received model; personal: v_k, the initial model where a client has never been
    chosen."""
    plain = task()
    held = Task(
        plain.model,
        plain.criterion,
        [ClientData(c.train, None, c.train) for c in plain.clients],
        None,
        2,
    )
    run = federation(held, Ditto, lr=LR, epochs=EPOCHS, batch_size=99, fraction=0.4)
    first = {name: t.clone() for name, t in run.model.items()}
    cohort = [msg.pid for msg in run.step()]
    for msg in evaluation_messages(run.strategy):
        metrics = run.client().handle(msg).metrics
        v = {name: torch.from_numpy(t) for name, t in (kept(run, msg.pid) or {}).items()} or first
        assert (v is first) == (msg.pid not in cohort)
        data = held.clients[msg.pid].train
        for view, w in (("global", run.model), ("personal", v)):
            loss = float(held.criterion(run.site.load(w).eval()(data.x), data.y).detach().mean())
            assert metrics[f"test.{view}.loss"] == pytest.approx(loss, rel=1e-9), view


def test_personal_models_never_travel(federation: Federation) -> None:
    """What a client packs is FedAvg's reply, name by name and size by size."""
    packed = {}
    for cls in (Ditto, FedAvg):
        run = federation(toy_task(norm=True), cls, rounds=2)
        run.step()
        reply = run.client().handle(run.strategy.plan(2)[0])
        assert not reply.extras
        packed[cls] = [array.tobytes() for array in wire.reply_arrays(reply)[0]]
    assert packed[Ditto] == packed[FedAvg]


def test_plugins_stay_out_of_the_personal_model(federation: Federation) -> None:
    """The proximal plug-in pulls w_k only."""
    plain, pulled = (
        federation(toy_task(), Ditto, plugins=plugins, lr=0.3).run()
        for plugins in (list, lambda: [FedProxPlugin(mu=3)])
    )
    assert plain.sha256 != pulled.sha256
    for pid in range(4):
        same(kept(pulled, pid) or {}, kept(plain, pid) or {})


@pytest.mark.parametrize(
    "options", [{"lam": -0.1}, {"lam": True}, {"plocal_epochs": 0}, {"plocal_epochs": 1.5}]
)
def test_bad_options_are_named(federation: Federation, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}="):
        federation(toy_task(), Ditto, options=options)


def test_the_personal_training_depends_on_nothing_of_the_global_one(federation: Federation) -> None:
    """Its dropout masks are those of its own stream; nor does it reach into the next message that
    the same object serves."""
    one, three = (federation(noisy(), Ditto, epochs=epochs).run() for epochs in (1, 3))
    reused = federation(noisy(), Ditto)
    client, plan = reused.client(), reused.strategy.plan(1)
    reused.strategy.settle(client.handle(msg) for msg in plan)
    assert reused.sha256 == one.sha256 != three.sha256
    for pid in range(4):
        same(kept(one, pid) or {}, kept(three, pid) or {})
        same(kept(one, pid) or {}, kept(reused, pid) or {})
