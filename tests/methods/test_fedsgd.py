"""FedSGD."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from convergence.quadratic import final_weight
from maths.cases import named_case
from methods.by_hand import DATA, LR, SIZES, Case, V, each, gradient, mean, same, task
from methods.plugs import Fixed, Half, Weighing, spy
from torch import Tensor

from fedhet.core.client.context import ClientContext
from fedhet.core.client.training import Batch
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.kernel import Message, State, Term
from fedhet.core.trees import AnyTree, Prepared
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedntd import FedNTDPlugin
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.fedsgd import FedSGD

Federation = Callable[..., Any]


@pytest.mark.parametrize("weights", [None, V], ids=["n_k", "fixed"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_by_hand(case: Callable[..., Case], decay: float, weights: Any) -> None:
    """McMahan et al., section 2: w <- w - eta sum_k n_k/n g_k; weight decay on the server."""
    running = case(
        FedSGD, plugins=lambda: [Fixed(V)] if weights else [], local={"weight_decay": decay}
    )
    for x, cohort, new in running.rounds():
        g = mean([gradient(x, *DATA[k]) for k in cohort], [(weights or SIZES)[k] for k in cohort])
        same(new, each(lambda a, b: a - LR * (b + decay * a), x, g))


@pytest.mark.parametrize(
    "local", [{}, {"weight_decay": 0.05}, {"clip": 0.2}], ids=["plain", "decay", "clip"]
)
@pytest.mark.parametrize("lr_decay", [1.0, 0.5])
def test_it_is_fedavg_with_one_epoch_of_one_batch(
    federation: Federation, local: dict[str, float], lr_decay: float
) -> None:
    """In float64 to 1e-13, in float32 (batch norm included) to rounding.

    Clipping comes before weight decay in FedAvg's optimiser too.
    """
    for make, rtol, atol in ((task, 1e-12, 1e-13), (lambda: toy_task(norm=True), 2e-6, 2e-7)):
        how = {
            "rounds": 4,
            "fraction": 0.75,
            "lr": 0.3,
            "epochs": 1,
            "batch_size": 99,
            "local": local,
            "lr_decay": lr_decay,
        }
        fedsgd, fedavg = (federation(make(), cls, **how).run() for cls in (FedSGD, FedAvg))
        for name, expected in fedavg.model.items():
            torch.testing.assert_close(fedsgd.model[name], expected, rtol=rtol, atol=atol, msg=name)


def test_local_epochs_and_batches_have_no_effect(federation: Federation) -> None:
    few, many = (
        federation(toy_task(), FedSGD, rounds=3, epochs=epochs, batch_size=size).run()
        for epochs, size in ((1, 4), (7, 99))
    )
    assert few.sha256 == many.sha256


@dataclass(frozen=True)
class Penalised(Weighing):
    """Sample weights, which belong to positions in the data, and a penalty for each batch."""

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        return [*super().terms(msg, state, ctx), Term("penalty", squares)]


def squares(params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
    return sum((p**2).sum() for p in params.values())  # type: ignore[return-value]


@pytest.mark.parametrize("chunk", [1, 5, 8])
def test_chunks_add_up_to_the_whole(federation: Federation, chunk: int) -> None:
    """Also with sample weights and a penalty."""
    how = {"lr": 0.1, "rounds": 2}
    whole, parts = (
        federation(
            task(), FedSGD, plugins=lambda: [Penalised()], options={"chunk": size}, **how
        ).run()
        for size in (1024, chunk)
    )
    plain = federation(task(), FedSGD, **how).run()
    for name, expected in whole.model.items():
        torch.testing.assert_close(parts.model[name], expected, rtol=1e-12, atol=1e-13)
        assert not torch.allclose(plain.model[name], expected)


def test_batch_norm_sees_all_of_a_client_at_once(federation: Federation) -> None:
    """running_mean is 0.9 * 0 + 0.1 * the mean over a client's data, then averaged by n_k.

    running_var divides by n_k - 1.
    """
    data = toy_task(norm=True)
    run = federation(data, FedSGD)
    w = {name: t.double() for name, t in run.model.items()}
    run.step()
    inputs = [
        client.train.x.double() @ w["body.0.weight"].T + w["body.0.bias"] for client in data.clients
    ]
    n = sum(len(h) for h in inputs)
    for name, statistic, start in (
        ("mean", lambda h: h.mean(0), 0.0),
        ("var", lambda h: h.var(0), 1.0),
    ):
        expected = sum(len(h) * (0.9 * start + 0.1 * statistic(h)) for h in inputs) / n
        running = run.model[f"body.1.running_{name}"].double()
        torch.testing.assert_close(running, expected, rtol=1e-5, atol=1e-6)
    assert int(run.model["body.1.num_batches_tracked"]) == 1


@pytest.mark.parametrize("buffers", ["local", "frozen"])
def test_other_policies_for_buffers(federation: Federation, buffers: str) -> None:
    run = federation(toy_task(norm=True), FedSGD, buffers=buffers, rounds=2)
    plan = run.step()
    assert not run.model["body.1.running_mean"].any()
    kept = run.store.load(plan[0].pid, 1)
    if buffers == "local":
        assert kept["client.kept/body.1.running_mean"].any()
    else:
        assert not kept
    run.step()


def test_one_random_batch(federation: Federation) -> None:
    """batches=1 takes client.batch_size different samples of each client, others in each round.

    batches=full takes all samples once.
    """
    seen: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    federation(
        toy_task(3),
        FedSGD,
        plugins=lambda: [spy(seen)],
        options={"batches": 1},
        batch_size=7,
        rounds=2,
    ).run()
    assert [len(set(batch)) for batches in seen.values() for batch in batches] == [7] * 6
    assert all(seen[1, pid] != seen[2, pid] for pid in range(3))
    seen.clear()
    federation(toy_task(3), FedSGD, plugins=lambda: [spy(seen)], batch_size=7).run()
    for pid, n in enumerate((12, 16, 20)):
        assert [sorted(batch) for batch in seen[1, pid]] == [list(range(n))]


def test_hooks_change_the_gradient_that_is_sent(federation: Federation) -> None:
    """Half of every gradient at twice the rate is the same step, bit for bit."""
    halved = federation(
        toy_task(norm=True), FedSGD, plugins=lambda: [Half()], lr=0.2, rounds=3
    ).run()
    plain, twice = (
        federation(toy_task(norm=True), FedSGD, lr=lr, rounds=3).run() for lr in (0.1, 0.2)
    )
    assert halved.sha256 == plain.sha256 != twice.sha256


@dataclass(frozen=True, kw_only=True)
class Prox(FedProxPlugin):
    needs = frozenset({"model"})


@dataclass(frozen=True, kw_only=True)
class NTD(FedNTDPlugin):
    needs = frozenset({"model"})


@pytest.mark.parametrize(("plugin", "own"), [(Prox, FedProxPlugin), (NTD, FedNTDPlugin)])
def test_terms_without_a_gradient_at_x_are_refused(
    federation: Federation, plugin: type, own: type[Any]
) -> None:
    """If they were not, the run would be FedSGD, up to the rounding of a derivative of zero."""
    with_term, plain = (
        federation(toy_task(), FedSGD, plugins=plugins, rounds=3).run()
        for plugins in (lambda: [plugin()], list)
    )
    for name, tensor in with_term.model.items():
        torch.testing.assert_close(tensor, plain.model[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match=f"method=fedsgd refuses plugin '{own.name}'"):
        federation(toy_task(), FedSGD, plugins=lambda: [own()])


@pytest.mark.parametrize(
    ("plugins", "steps"),
    [
        pytest.param([], [2, 5, 9, 7, 3], id="alone"),
        pytest.param(["fednorm"], 3, id="fednorm", marks=pytest.mark.slow),
    ],
)
def test_it_reaches_the_optimum_of_the_quadratic(plugins: list[str], steps: Any) -> None:
    """Whatever the number of local steps, of which it takes none."""
    a = [1.0, 4.0, 2.0, 0.5, 3.0]
    b = [1.0, -1.0, 0.0, 2.0, 0.3]
    w = final_weight(a=a, b=b, steps=steps, lr=0.2, method="fedsgd", plugins=plugins, rounds=40)
    assert w == pytest.approx(float(np.average(b, weights=a)), abs=1e-9)


def test_bytes(launch: Callable[..., Any]) -> None:
    run = launch("method=fedsgd", "rounds=1", "eval.clients=false", task=toy_task(norm=True))
    parameters = 4 * 4 * 29  # of 4 clients
    buffers = 4 * (4 * 6 + 8)
    assert run.summary["bytes"] == {
        "up": {"fedsgd.g": parameters, "fedsgd.buffers": buffers},
        "down": {"model": parameters + buffers},
    }


def test_the_tensors_that_a_server_receives_are_checked(federation: Federation) -> None:
    for extra in ["fedsgd.g", "fedsgd.buffers"]:
        with named_case(extra):

            def broken(plan: list[Any], replies: list[Any], extra: str = extra) -> list[Any]:
                tree = {
                    name: torch.full_like(t, float("inf")) if t.is_floating_point() else t
                    for name, t in replies[2].extras[extra].items()
                }
                extras = {**replies[2].extras, extra: tree}
                return [*replies[:2], replace(replies[2], extras=extras), *replies[3:]]

            with pytest.raises(RunFailed, match=rf"client 1 .*'{extra}'.*infinite"):
                federation(toy_task(norm=True), FedSGD).step(broken)


def test_bad_settings_are_named(federation: Federation) -> None:
    cases = [
        ({"local": {"momentum": 0.5}}, r"client\.momentum=0\.5.*server_opt"),
        ({"local": {"optimizer": "adam"}}, r"client\.optimizer=adam.*server_opt"),
        ({"options": {"batches": 2}}, r"method\.batches=2.*full, 1"),
        ({"options": {"chunk": 0}}, r"method\.chunk=0"),
    ]
    for how, message in cases:
        with named_case(how, message), pytest.raises(ConfigError, match=message):
            federation(toy_task(), FedSGD, **how)
