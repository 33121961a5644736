"""FedSGD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.plugs import Fixed, Half
from methods.test_by_hand import DATA, LR, SIZES, Case, case, each, gradient, mean, same, task
from torch import Tensor
from vectors.adapter import replay

from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError, RunFailed
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.methods.fedsgd import FedSGD
from fedhet.plugin import Plugin
from fedhet.task import Samples
from fedhet.training import Batch

__all__ = ["case"]
V = (0.1, 0.4, 0.2, 0.2, 0.1)


@pytest.mark.parametrize("weights", [None, V], ids=["n_k", "fixed"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_by_hand(case: Callable[..., Case], decay: float, weights: Any) -> None:
    """McMahan et al., section 2: w <- w - eta sum_k n_k/n g_k; weight decay on the server."""
    running = case(
        FedSGD, plugins=lambda: [Fixed(V)] if weights else [], local={"weight_decay": decay}
    )
    for x, cohort, found in running.rounds():
        g = mean([gradient(x, *DATA[k]) for k in cohort], [(weights or SIZES)[k] for k in cohort])
        same(found, each(lambda a, b: a - LR * (b + decay * a), x, g))


@pytest.mark.parametrize(
    "local", [{}, {"weight_decay": 0.05}, {"clip": 0.2}], ids=["plain", "decay", "clip"]
)
@pytest.mark.parametrize("lr_decay", [1.0, 0.5])
def test_it_is_fedavg_with_one_epoch_of_one_batch(
    federation: Callable[..., Any], local: dict[str, float], lr_decay: float
) -> None:
    """In float64 to 1e-13, in float32 (batch norm included) to rounding. Clipping comes before
    decay in FedAvg's optimiser too."""
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
        sgd, avg = (federation(make(), cls, **how).run() for cls in (FedSGD, FedAvg))
        for name, expected in avg.model.items():
            torch.testing.assert_close(sgd.model[name], expected, rtol=rtol, atol=atol, msg=name)


def test_local_epochs_and_batches_mean_nothing(federation: Callable[..., Any]) -> None:
    few, many = (
        federation(toy_task(), FedSGD, rounds=3, epochs=e, batch_size=b).run()
        for e, b in ((1, 4), (7, 99))
    )
    assert few.sha256 == many.sha256


@pytest.mark.parametrize("chunk", [1, 5, 8])
def test_chunks_add_up_to_the_whole(federation: Callable[..., Any], chunk: int) -> None:
    """Also under sample weights, whose factors belong to positions, and with a penalty per
    batch."""

    class Weighing(Plugin):
        name = "weighing"

        def sample_weights(self, data: Samples) -> Tensor:
            return torch.linspace(0, 2, len(data), dtype=torch.float64)

        def penalty(self, batch: Batch) -> Tensor:
            return sum((p**2).sum() for p in self.client.site.parameters)  # type: ignore[return-value]

    whole, parts = (
        federation(
            task(), FedSGD, plugins=lambda: [Weighing()], options={"chunk": size}, lr=0.1, rounds=2
        ).run()
        for size in (1024, chunk)
    )
    plain = federation(task(), FedSGD, lr=0.1, rounds=2).run()
    for name, expected in whole.model.items():
        torch.testing.assert_close(parts.model[name], expected, rtol=1e-12, atol=1e-13)
        assert not torch.allclose(plain.model[name], expected)


def test_batch_norm_sees_all_of_a_client_at_once(federation: Callable[..., Any]) -> None:
    """running_mean = 0.9 * 0 + 0.1 * the mean over the client's data, then averaged by n_k; n_k - 1
    under running_var."""
    data = toy_task(norm=True)
    run = federation(data, FedSGD)
    w = {name: t.double() for name, t in run.model.items()}
    run.step()
    inputs = [
        client.train.x.double() @ w["body.0.weight"].T + w["body.0.bias"] for client in data.clients
    ]
    for name, statistic, start in (
        ("mean", lambda h: h.mean(0), 0.0),
        ("var", lambda h: h.var(0), 1.0),
    ):
        expected = sum(len(h) * (0.9 * start + 0.1 * statistic(h)) for h in inputs) / sum(
            len(h) for h in inputs
        )
        torch.testing.assert_close(
            run.model[f"body.1.running_{name}"].double(), expected, rtol=1e-5, atol=1e-6
        )
    assert int(run.model["body.1.num_batches_tracked"]) == 1


@pytest.mark.parametrize("buffers", ["local", "frozen"])
def test_other_policies_for_buffers(federation: Callable[..., Any], buffers: str) -> None:
    run = federation(toy_task(norm=True), FedSGD, buffers=buffers, rounds=2)
    plan = run.step()
    assert not run.model["body.1.running_mean"].any()
    kept = run.store.load(plan[0].pid, 1)
    assert bool(kept) is (buffers == "local") and (
        not kept or kept["client.kept/body.1.running_mean"].any()
    )
    run.step()


class Spy(Plugin):
    """Notes the positions of every forward pass."""

    name = "spy"

    def __init__(self, notes: list[list[int]]) -> None:
        super().__init__()
        self.notes = notes

    def losses(self, batch: Batch) -> Tensor:
        self.notes.append(batch.index.tolist())
        return torch.zeros(len(batch.y))


def test_one_random_batch(federation: Callable[..., Any]) -> None:
    """batches=1: client.batch_size different samples of each client, others in the next round;
    full: all, once."""
    notes: list[list[int]] = []
    federation(
        toy_task(3),
        FedSGD,
        plugins=lambda: [Spy(notes)],
        options={"batches": 1},
        batch_size=7,
        rounds=2,
    ).run()
    assert [len(set(found)) for found in notes] == [7] * 6
    assert all(notes[i] != notes[i + 3] for i in range(3))
    notes.clear()
    federation(toy_task(3), FedSGD, plugins=lambda: [Spy(notes)], batch_size=7).run()
    assert [sorted(found) for found in notes] == [list(range(n)) for n in (20, 16, 12)]


def test_hooks_change_the_gradient_that_is_sent(federation: Callable[..., Any]) -> None:
    """Half of every gradient at twice the rate is the same step, bit for bit."""
    halved = federation(
        toy_task(norm=True), FedSGD, plugins=lambda: [Half()], lr=0.2, rounds=3
    ).run()
    plain, twice = (
        federation(toy_task(norm=True), FedSGD, lr=lr, rounds=3).run() for lr in (0.1, 0.2)
    )
    assert halved.sha256 == plain.sha256 != twice.sha256


def test_the_proximal_term_has_no_gradient_at_x(federation: Callable[..., Any]) -> None:
    prox, plain = (
        federation(toy_task(), FedSGD, plugins=plugins, rounds=3).run()
        for plugins in (lambda: [FedProxPlugin(mu=5.0)], list)
    )
    assert prox.sha256 == plain.sha256


@pytest.mark.parametrize("plugins", [[], ["fednorm"], ["fedprox"]], ids=str)
@pytest.mark.parametrize("steps", [3, [2, 5, 9, 7, 3]], ids=str)
def test_it_reaches_the_optimum_of_the_quadratic(plugins: list[str], steps: Any) -> None:
    """However many local steps are asked for: it takes none."""
    a, b = [1.0, 4.0, 2.0, 0.5, 3.0], [1.0, -1.0, 0.0, 2.0, 0.3]
    params = {
        "a": a,
        "b": b,
        "steps": steps,
        "lr": 0.2,
        "method": "fedsgd",
        "plugins": plugins,
        "rounds": 40,
    }
    assert replay("convergence", "quadratic", params, {})["w"] == pytest.approx(
        float(np.average(b, weights=a)), abs=1e-9
    )


def test_bytes(launch: Callable[..., Any]) -> None:
    sent = launch(
        "method=fedsgd", "rounds=1", "eval.clients=false", task=toy_task(norm=True)
    ).summary["bytes"]
    parameters, buffers = 4 * 4 * 29, 4 * (4 * 6 + 8)  # of 4 clients
    assert sent == {
        "up": {"fedsgd.g": parameters, "fedsgd.buffers": buffers},
        "down": {"model": parameters + buffers, "fedsgd.chunk": 32},
    }


@pytest.mark.parametrize("extra", ["fedsgd.g", "fedsgd.buffers"])
def test_what_a_server_is_sent_is_checked(federation: Callable[..., Any], extra: str) -> None:
    def broken(plan: list[Any], replies: list[Any]) -> list[Any]:
        tree = {
            name: torch.full_like(t, float("inf")) if t.is_floating_point() else t
            for name, t in replies[2].extras[extra].items()
        }
        return [
            *replies[:2],
            replace(replies[2], extras={**replies[2].extras, extra: tree}),
            *replies[3:],
        ]

    with pytest.raises(RunFailed, match=rf"client 1 .*'{extra}'.*infinite"):
        federation(toy_task(norm=True), FedSGD).step(broken)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"local": {"momentum": 0.5}}, r"client\.momentum=0\.5.*server_opt"),
        ({"local": {"optimizer": "adam"}}, r"client\.optimizer=adam.*server_opt"),
        ({"options": {"batches": 2}}, r"method\.batches=2.*full, 1"),
        ({"options": {"chunk": 0}}, r"method\.chunk=0"),
    ],
)
def test_bad_settings_are_named(
    federation: Callable[..., Any], how: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        federation(toy_task(), FedSGD, **how)
