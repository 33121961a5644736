"""SCAFFOLD with control=steps (option II), and what both options have in common.

test_scaffold_gradient.py has option I, test_scaffold_limits.py the points that both converge to.
"""

from __future__ import annotations

import ast
import inspect
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
    corrected,
    each,
    latents,
    local_sgd,
    mean,
    same,
)
from torch import Tensor

from fedhet.core.errors import ConfigError
from fedhet.core.kernel import Method, Plugin
from fedhet.core.task import ClientData, Samples, Task
from fedhet.data.toy import toy_task
from fedhet.methods import scaffold
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.feddyn import FedDyn
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold

Federation = Callable[..., Any]
CLIENTS = 6
FEDNORM = pytest.mark.parametrize(
    "plugins", [list, lambda: [FedNormPlugin(temperature=0.005)]], ids=["alone", "fednorm"]
)


def c_plus(own: Weights, c: Weights, x: Weights, y: Weights) -> Weights:
    """Option II: c_i - c + (x - y) / (K lr)."""
    return each(lambda a, b, x0, y1: a - b + (x0 - y1) / (EPOCHS * LR), own, c, x, y)


def test_by_hand(case: Callable[..., Case]) -> None:
    """Karimireddy et al., algorithm 1 with option II; c moves by (1/N) sum_i (c_i+ - c_i)."""
    lr_g = 0.7
    clients = len(SIZES)
    running = case(Scaffold, options={"lr_g": lr_g})
    zero = each(np.zeros_like, running.weights)
    c = zero
    c_i = [zero] * clients
    for x, cohort, new in running.rounds():
        dy, dc = [], []
        for i in cohort:
            y = local_sgd(x, i, corrected(c_i[i], c))
            plus = c_plus(c_i[i], c, x, y)
            dy.append(each(np.subtract, y, x))
            dc.append(each(np.subtract, plus, c_i[i]))
            c_i[i] = plus
        c = {name: c[name] + sum(d[name] for d in dc) / clients for name in zero}
        same(new, each(lambda a, b: a + lr_g * b, x, mean(dy, [1] * len(dy))))
        for i in range(clients):  # what each client remembers, also where it did not take part
            kept = running.run.store.load(i, running.run.strategy.run.versions.get(i, 0)) or {}
            own = {name: kept[f"scaffold.c_i/{name}"].numpy() for name in zero} if kept else zero
            same(own, c_i[i])


def test_fednorm_by_hand(case: Callable[..., Case]) -> None:
    """nu = 1/R; x moves by sum_r w_r dy_r, and c is the mean of all c_j under lambda_j.

    lambda_j is R w_j of client j's last participation, and 1 before it.
    """
    clients = len(SIZES)
    running = case(Scaffold, plugins=lambda: [FedNormPlugin(temperature=0.1)])
    zero = each(np.zeros_like, running.weights)
    c = zero
    c_i = [zero] * clients
    share = [1.0] * clients
    for x, cohort, new in running.rounds():
        local = []
        for i in cohort:
            local.append(local_sgd(x, i, corrected(c_i[i], c)))
            c_i[i] = c_plus(c_i[i], c, x, local[-1])
        z = [
            latents(w, DATA[i][0]).mean(0).astype(np.float32).astype(float)
            for w, i in zip(local, cohort, strict=True)
        ]
        unit = np.array([v / np.linalg.norm(v) for v in z])
        e = np.exp((unit @ unit.T).sum(1) / 0.1)
        weights = 1 - e / e.sum()
        weights /= weights.sum()
        assert weights.std() > 0.01  # else this would be SCAFFOLD without a plug-in
        for i, w in zip(cohort, weights, strict=True):
            share[i] = len(cohort) * w
        c = mean(c_i, share)
        same(new, mean(local, list(weights)))


def controls(run: Any) -> list[dict[str, Tensor]]:
    """c_i of every client, from what the clients keep; 0 where a client has not taken part."""
    variates = []
    for pid in range(CLIENTS):
        kept = run.store.load(pid, run.strategy.run.versions.get(pid, 0)) or {}
        variates.append(
            {
                name: kept.get(f"scaffold.c_i/{name}", torch.zeros_like(t)).double()
                for name, t in run.model.items()
            }
        )
    return variates


@FEDNORM
@pytest.mark.parametrize(
    ("norm", "how"),
    [
        (False, {"lr_decay": 0.7}),
        (True, {"lr_decay": 0.7}),
        (True, {"options": {"control": "gradient"}, "local": {"momentum": 0.5}}),
    ],
    ids=["steps", "steps-batch-norm", "gradient-batch-norm"],
)
def test_c_is_the_mean_of_all_controls(
    federation: Federation, norm: bool, how: dict[str, Any], plugins: Callable[[], list[Plugin]]
) -> None:
    """At partial participation; under lambda_j where FedNorm sets the weights, else lambda = 1.

    Where the rate decays, the server recovers each control with the rate of its own step.
    """
    run = federation(
        toy_task(CLIENTS, norm=norm),
        Scaffold,
        plugins=plugins,
        rounds=8,
        fraction=0.5,
        epochs=2,
        **how,
    )
    share = torch.ones(CLIENTS, dtype=torch.float64)
    for _ in range(7):
        run.step()
        for plugin in run.strategy.plugins:
            recorded = run.current.recorded[plugin.name]
            share[recorded["pids"]] = recorded["weights"] * len(recorded["pids"])
    sent = run.strategy.plan(8).messages[0].extras["scaffold.c"]
    trained = [name for name, _ in run.workspace.model.named_parameters()]
    assert list(sent) == trained  # controls are for parameters, never for buffers
    # All have taken part, each in some rounds only.
    assert len(run.strategy.run.versions) == CLIENTS
    assert bool(run.strategy.plugins) == (float(share.std()) > 1e-3)
    own = controls(run)
    for name in sent:
        expected = sum(s * c_i[name] for s, c_i in zip(share, own, strict=True)) / share.sum()
        torch.testing.assert_close(sent[name].double(), expected, rtol=1e-5, atol=1e-7)
    assert max(float(t.abs().max()) for t in sent.values()) > 1e-3


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_first_round_is_fedavg_where_clients_are_equal(
    federation: Federation, fraction: float
) -> None:
    """All controls are 0, and 1/R is n_k / sum n."""
    ours, fedavg = (
        federation(toy_task(equal=True), cls, rounds=2, fraction=fraction)
        for cls in (Scaffold, FedAvg)
    )
    ours.step()
    fedavg.step()
    assert ours.sha256 == fedavg.sha256
    ours.step()
    fedavg.step()
    assert ours.sha256 != fedavg.sha256


def test_one_client_is_sgd(federation: Federation) -> None:
    """c = c_1, so the correction is nothing but rounding."""
    ours, fedavg = (federation(toy_task(1), cls, rounds=4).run() for cls in (Scaffold, FedAvg))
    for name, expected in fedavg.model.items():
        torch.testing.assert_close(ours.model[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [Scaffold, FedDyn])
def test_clients_without_data_do_not_count(federation: Federation, method: type[Method]) -> None:
    """Neither in SCAFFOLD's N nor in FedDyn's m."""
    toy = toy_task(3)
    none = ClientData(Samples(toy.clients[0].train.x[:0], toy.clients[0].train.y[:0]))
    more = Task(toy.model, toy.criterion, [*toy.clients, none], None, 2)
    plain, with_none = (federation(task, method, rounds=3).run() for task in (toy, more))
    assert with_none.sha256 == plain.sha256


def test_a_rate_of_0_is_refused_by_option_ii_only(federation: Federation) -> None:
    with pytest.raises(ConfigError, match=r"client.lr=0: method=scaffold .*control=gradient"):
        federation(toy_task(), Scaffold, lr=0.0)
    run = federation(toy_task(), Scaffold, lr=0.0, options={"control": "gradient"})
    before = run.sha256
    run.step()
    assert run.sha256 == before


def test_option_ii_needs_plain_sgd(federation: Federation) -> None:
    """The message names the way out, option I, which takes any optimiser."""
    for key, value in [
        ("momentum", 0.9),
        ("weight_decay", 0.1),
        ("clip", 1.0),
        ("optimizer", "adam"),
    ]:
        with named_case(key, value):
            message = rf"client\.{key}={value}.*plain SGD.*method\.control=gradient"
            with pytest.raises(ConfigError, match=message):
                federation(toy_task(), Scaffold, local={key: value})
            how = {"local": {key: value}, "options": {"control": "gradient"}, "rounds": 2}
            federation(toy_task(), Scaffold, **how).run()


def test_bad_options_are_named(federation: Federation) -> None:
    for options in [{"lr_g": 0}, {"lr_g": float("nan")}, {"control_weights": "mean"}]:
        with (
            named_case(options),
            pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}="),
        ):
            federation(toy_task(), Scaffold, options=options)


def test_strategy_and_client_stay_short() -> None:
    """What a method adds to FedAvg fits on one screen."""
    source = inspect.getsource(scaffold)
    lines = source.splitlines()
    code = 0
    for cls in ast.parse(source).body:
        if isinstance(cls, ast.ClassDef) and cls.name in ("Scaffold", "ScaffoldClient"):
            written = {n for n in range(cls.lineno, cls.end_lineno + 1) if lines[n - 1].strip()}
            for node in ast.walk(cls):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                    docstring = node.body[0]
                    written -= set(range(docstring.lineno, docstring.end_lineno + 1))
            code += len(written)
    assert 0 < code <= 80
