"""SCAFFOLD with control=gradient (option I)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    corrected,
    each,
    gradient,
    local_sgd,
    mean,
    same,
    task,
)
from methods.plugs import Half, Weighing, spy
from torch import Tensor

from fedhet.core.authors import AnyTree, Batch, ClientContext, Message, Plugin, State, Term, Tree
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.data.toy import toy_task
from fedhet.methods.scaffold import Scaffold

Federation = Callable[..., Any]
OPTION_I = {"control": "gradient"}


def test_by_hand(case: Callable[..., Case]) -> None:
    """Karimireddy et al., algorithm 1, line 12, option I: c_i+ <- g_i(x).

    c moves by (1/N) sum_i (c_i+ - c_i).
    """
    lr_g = 0.7
    clients = len(SIZES)
    running = case(Scaffold, options={**OPTION_I, "lr_g": lr_g})
    zero = each(np.zeros_like, running.weights)
    c = zero
    c_i = [zero] * clients
    for x, cohort, new in running.rounds():
        dy, dc = [], []
        for i in cohort:
            dy.append(each(np.subtract, local_sgd(x, i, corrected(c_i[i], c)), x))
            plus = gradient(x, *DATA[i])
            dc.append(each(np.subtract, plus, c_i[i]))
            c_i[i] = plus
        c = {name: c[name] + sum(d[name] for d in dc) / clients for name in zero}
        same(new, each(lambda a, b: a + lr_g * b, x, mean(dy, [1] * len(dy))))


def test_momentum_decay_and_clipping_by_hand(case: Callable[..., Case]) -> None:
    """The correction is part of the gradient; c_i is the plain g_i(x).

    g - c_i + c is clipped, then weight decay is added, and the sum goes into the momentum.
    """
    local = {"momentum": 0.6, "weight_decay": 0.1, "clip": 0.3}
    clients = len(SIZES)
    running = case(Scaffold, options=OPTION_I, local=local)
    zero = each(np.zeros_like, running.weights)
    c = zero
    c_i = [zero] * clients
    for x, cohort, new in running.rounds():
        ends = []
        for i in cohort:
            y, d = x, zero
            for _ in range(EPOCHS):
                g = corrected(c_i[i], c)(gradient(y, *DATA[i]), y)
                scale = min(1.0, 0.3 / (np.sqrt(sum((t**2).sum() for t in g.values())) + 1e-6))
                d = each(lambda v, t, w, s=scale: 0.6 * v + s * t + 0.1 * w, d, g, y)
                y = each(lambda w, v: w - LR * v, y, d)
            ends.append(y)
        for i in cohort:
            c_i[i] = gradient(x, *DATA[i])
        c = mean(c_i, [1] * clients)
        same(new, mean(ends, [1] * len(ends)))


def test_the_extra_pass_leaves_no_trace(federation: Federation) -> None:
    """In round 1 the controls are 0, so both options train alike, running statistics included."""
    one, two = (
        federation(toy_task(norm=True), Scaffold, options={"control": control}, rounds=2)
        for control in ("gradient", "steps")
    )
    one.step()
    two.step()
    assert one.sha256 == two.sha256
    one.step()
    two.step()
    assert one.sha256 != two.sha256


def test_the_extra_pass_covers_every_sample_once(federation: Federation) -> None:
    """12 samples at once, then in batches of 5."""
    seen: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    run = federation(
        toy_task(1), Scaffold, plugins=lambda: [spy(seen)], options=OPTION_I, batch_size=5, epochs=1
    )
    run.step()
    assert [len(batch) for batch in seen[1, 0]] == [12, 5, 5, 2]


def test_bytes(launch: Callable[..., Any]) -> None:
    """Option I sends one tree more."""
    lines = ["rounds=1", "eval.clients=false"]
    tree = 4 * 92
    sent = {}
    for control in ("steps", "gradient"):
        run = launch("method=scaffold", f"method.control={control}", *lines, task=toy_task())
        sent[control] = run.summary["bytes"]
    down = {"model": tree, "scaffold.c": tree}
    up = {"model": tree, "scaffold.c_plus": tree}
    assert sent["steps"] == {"down": down, "up": {**up, "scaffold.steps": 32}}
    assert sent["gradient"] == {"down": down, "up": {**up, "scaffold.c_i": tree}}


def test_the_control_is_the_gradient_of_the_loss_as_plugins_shape_it(
    federation: Federation,
) -> None:
    """Sample weights are in it; a hook that scales steps is not, or it would act twice."""
    plain, weighed, halved = (
        federation(task(), Scaffold, plugins=plugins, options=OPTION_I)
        for plugins in (list, lambda: [Weighing()], lambda: [Half()])
    )
    variates = []
    for run in (plain, weighed, halved):
        replies = [run.client().handle(msg) for msg in run.strategy.plan(1).messages]
        reply = next(reply for reply in replies if reply.pid == 1)
        variates.append(reply.extras["scaffold.c_plus"])
    x, y = DATA[1]
    w = {name: t.numpy() for name, t in plain.model.items()}
    factors = np.linspace(0, 2, len(y))
    by_sample = [gradient(w, x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    exact = {"rtol": 1e-10, "atol": 1e-14}
    for name in w:
        weighted = sum(f * g[name] for f, g in zip(factors, by_sample, strict=True)) / len(y)
        np.testing.assert_allclose(variates[0][name], gradient(w, x, y)[name], **exact)
        np.testing.assert_allclose(variates[1][name], weighted, **exact)
        assert torch.equal(variates[2][name], variates[0][name])


def test_fedlex_is_refused_by_option_ii_only(federation: Federation) -> None:
    @dataclass(frozen=True)
    class Lex(Half):
        name = "fedlex"

    with pytest.raises(ConfigError, match=r"scaffold .*'fedlex'.*control=gradient"):
        federation(toy_task(), Scaffold, plugins=lambda: [Lex()])
    federation(toy_task(), Scaffold, plugins=lambda: [Lex()], options=OPTION_I, rounds=2).run()


def test_a_missing_extra_is_named(federation: Federation) -> None:
    for extra in ["scaffold.c_i", "scaffold.c_plus"]:
        with named_case(extra):

            def without(plan: list[Any], replies: list[Any], extra: str = extra) -> list[Any]:
                for reply in replies:
                    if reply.pid == 1:
                        del reply.extras[extra]
                return replies

            with pytest.raises(RunFailed, match=rf"client 1 .*'{extra}' .*missing"):
                federation(toy_task(), Scaffold, options=OPTION_I).step(without)


def test_a_skipped_client_keeps_its_old_control(federation: Federation) -> None:
    """Its update was left out in round 2, so in round 3 it starts from the c_i of round 1.

    That is the one in the server's sum.
    """

    def spoiled(plan: list[Any], replies: list[Any]) -> list[Any]:
        return [replace(r, extras={}) if r.pid == 1 else r for r in replies]

    run = federation(toy_task(), Scaffold, options=OPTION_I, on_failure="skip", rounds=3)
    plan = run.step()
    assert len(plan) == 4
    first = run.store.load(1, 1)
    run.step(spoiled)
    third = next(msg for msg in run.strategy.plan(3).messages if msg.pid == 1)
    assert third.version == 1
    own = run.client().handle(third).extras["scaffold.c_i"]
    assert all(torch.equal(t, first[f"scaffold.c_i/{name}"]) for name, t in own.items())


def tilt(params: AnyTree, batch: Batch | None, own: Tree) -> Tensor:
    return sum(((params[name] * a).sum() for name, a in own.items()), torch.zeros(()))


def slope(params: AnyTree, batch: None, own: Tree) -> Tree:
    return own


@dataclass(frozen=True, kw_only=True)
class Tilted(Plugin):
    """Adds <a, w> to the local loss, or its gradient a to the gradient."""

    name = "tilted"

    kind: str = "penalty"

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        a = {name: torch.full_like(msg.weights[name], 0.1) for name in ctx.workspace.trained}
        return [Term(self.kind, tilt if self.kind == "penalty" else slope, a)]


def test_a_term_and_its_gradient_are_the_same_to_the_control(federation: Federation) -> None:
    """Option I takes the gradient of the whole local loss, however a plug-in has written it."""
    totals = []
    for kind in ("penalty", "gradient"):
        plugins = [Tilted(kind=kind)]
        run = federation(
            toy_task(), Scaffold, plugins=lambda made=plugins: made, options=OPTION_I, batch_size=99
        )
        run.step()
        totals.append(run.strategy.run.states["method"]["total"])
    for name, value in totals[0].items():
        torch.testing.assert_close(totals[1][name], value, rtol=1e-5, atol=1e-7)
    plain = federation(toy_task(), Scaffold, options=OPTION_I, batch_size=99)
    plain.step()
    for name, value in plain.strategy.run.states["method"]["total"].items():
        assert not torch.allclose(totals[0][name], value)
