"""Ditto."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from maths.cases import named_case
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
from methods.readouts import arrays, client_state, step_and_replies

from fedhet.core.errors import ConfigError
from fedhet.core.kernel import Plugin
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.core.task import ClientData, Task
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.methods.ditto import Ditto
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import FedProxPlugin

__all__ = ["case"]
Federation = Callable[..., Any]


def with_plugins() -> list[Plugin]:
    return [FedNormPlugin(temperature=0.05), FedProxPlugin(mu=0.5)]


def personal(run: Any, pid: int) -> Weights:
    """v_k as the client keeps it; empty where it has never taken part."""
    return arrays(client_state(run, pid, "ditto.v"))


@pytest.mark.parametrize("lam", [0.0, 0.7])
@pytest.mark.parametrize("epochs", [1, 3])
def test_by_hand(case: Callable[..., Case], lam: float, epochs: int) -> None:
    """Li et al., algorithm 1: v_k <- v_k - lr (g(v_k) + lam (v_k - w^t)) at the participants only.

    The w_k are averaged as in FedAvg.
    """
    running = case(Ditto, options={"lam": lam, "plocal_epochs": epochs})
    first = {name: array.copy() for name, array in running.weights.items()}
    v: list[Weights] = [first] * len(SIZES)

    def step(a: np.ndarray, g: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a - LR * (g + lam * (a - b))

    for x, cohort, aggregated in running.rounds():
        for k in cohort:
            for _ in range(epochs):
                v[k] = each(step, v[k], gradient(v[k], *DATA[k]), x)
        expected = mean([local_sgd(x, k) for k in cohort], [SIZES[k] for k in cohort])
        same(aggregated, expected)
        for k in range(len(SIZES)):
            same(personal(running.run, k) or first, v[k])


@pytest.mark.parametrize(
    ("plugins", "buffers"),
    [(list, "average"), (with_plugins, "local"), (with_plugins, "frozen")],
    ids=["average", "local", "frozen"],
)
def test_the_global_model_is_fedavgs(federation: Federation, plugins: Any, buffers: str) -> None:
    """Bit for bit, and so is what clients keep for it; evaluation moves neither, nor any v_k."""
    settings = {
        "plugins": plugins,
        "buffers": buffers,
        "rounds": 3,
        "fraction": 0.75,
        "epochs": 2,
        "local": {"momentum": 0.9},
    }
    ditto, unevaluated = (
        federation(noisy(), Ditto, options={"plocal_epochs": 2}, **settings) for _ in range(2)
    )
    fedavg = federation(noisy(), FedAvg, **settings)
    for _ in range(3):
        for run in (ditto, unevaluated, fedavg):
            run.step()
        for _ in range(2):
            replies = [ditto.client().handle(msg) for msg in evaluation_messages(ditto.strategy)]
        assert ditto.sha256 == fedavg.sha256
        assert ditto.current.recorded.keys() == fedavg.current.recorded.keys()
        for reply, msg in zip(replies, evaluation_messages(fedavg.strategy), strict=True):
            if buffers == "local":  # no global model; "personal" is v_k here and w there
                break
            expected = fedavg.client().handle(msg).metrics
            assert {name: reply.metrics[name] for name in expected} == expected
        for pid in range(4):
            state, unevaluated_state, fedavg_state = (
                run.store.load(pid, run.strategy.run.versions.get(pid, 0)) or {}
                for run in (ditto, unevaluated, fedavg)
            )
            assert state.keys() == unevaluated_state.keys()
            assert all(torch.equal(t, unevaluated_state[name]) for name, t in state.items())
            assert all(torch.equal(t, state[name]) for name, t in fedavg_state.items())


def test_both_models_take_the_same_first_round_without_a_pull(federation: Federation) -> None:
    """v_k = w_k: the same start and batches, each with momentum from zero.

    So the two models share no optimiser.
    """
    run = federation(
        toy_task(norm=True),
        Ditto,
        options={"lam": 0.0},
        epochs=1,
        local={"momentum": 0.9},
        rounds=2,
    )
    _, updates = step_and_replies(run)
    for update in updates:
        v = personal(run, update.pid)
        assert v and update.weights
        assert all(np.array_equal(v[name], t.numpy()) for name, t in update.weights.items())
    run.step()
    x = arrays(run.model)
    assert not np.array_equal(personal(run, 0)["head.weight"], x["head.weight"])


def test_the_personal_model_has_its_own_statistics(federation: Federation) -> None:
    """Its batch counter counts its own steps only, under any policy for the global buffers."""
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
            assert int(personal(run, pid)["body.1.num_batches_tracked"]) == 2 * 3 * (3 + pid)
    frozen = personal(federation(toy_task(norm=True), Ditto, rounds=1, buffers="frozen").run(), 0)
    assert frozen and "body.1.running_mean" not in frozen


def test_views(federation: Federation) -> None:
    """Global: the received model. Personal: v_k, or the initial model without participation."""
    plain = task()
    clients = [ClientData(c.train, None, c.train) for c in plain.clients]
    tested_on_train = Task(plain.model, plain.criterion, clients, None, 2)
    run = federation(tested_on_train, Ditto, lr=LR, epochs=EPOCHS, batch_size=99, fraction=0.4)
    first = {name: t.clone() for name, t in run.model.items()}
    cohort = [msg.pid for msg in run.step()]
    for msg in evaluation_messages(run.strategy):
        metrics = run.client().handle(msg).metrics
        v = client_state(run, msg.pid, "ditto.v") or first
        assert (v is first) == (msg.pid not in cohort)
        data = clients[msg.pid].train
        for view, w in (("global", run.model), ("personal", v)):
            output = run.workspace.load(w).eval()(data.x)
            loss = float(plain.criterion(output, data.y).detach().mean())
            assert metrics[f"test.{view}.loss"] == pytest.approx(loss, rel=1e-9), view


def test_personal_models_never_travel(federation: Federation) -> None:
    """The packed reply of a client is FedAvg's, array by array."""
    packed = {}
    for cls in (Ditto, FedAvg):
        run = federation(toy_task(norm=True), cls, rounds=2)
        run.step()
        msg = run.strategy.plan(2).messages[0]
        reply = run.client().handle(msg)
        assert not reply.extras
        packed[cls] = [array.tobytes() for array in wire.reply_arrays(msg, reply)[0]]
    assert packed[Ditto] == packed[FedAvg]


def test_plugins_stay_out_of_the_personal_model(federation: Federation) -> None:
    """The proximal plug-in pulls w_k only."""
    plain, pulled = (
        federation(toy_task(), Ditto, plugins=plugins, lr=0.3).run()
        for plugins in (list, lambda: [FedProxPlugin(mu=3)])
    )
    assert plain.sha256 != pulled.sha256
    for pid in range(4):
        same(personal(pulled, pid), personal(plain, pid))


def test_bad_options_are_named(federation: Federation) -> None:
    for options in [{"lam": -0.1}, {"lam": True}, {"plocal_epochs": 0}, {"plocal_epochs": 1.5}]:
        with (
            named_case(options),
            pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}="),
        ):
            federation(toy_task(), Ditto, options=options)


def test_the_personal_training_is_independent_of_the_global_one(federation: Federation) -> None:
    """Its dropout masks come from a separate stream.

    Nor does it affect the next message that the same client object serves.
    """
    one, three = (federation(noisy(), Ditto, epochs=epochs).run() for epochs in (1, 3))
    reused = federation(noisy(), Ditto)
    client = reused.client()
    plan = reused.plan()
    reused.finish_step(client.handle(msg) for msg in plan)
    assert reused.sha256 == one.sha256 != three.sha256
    for pid in range(4):
        same(personal(one, pid), personal(three, pid))
        same(personal(one, pid), personal(reused, pid))
