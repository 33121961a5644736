"""FedDisk: its phases by hand in numpy, its reductions, and the early stopping of the global
MADE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhet import trees
from fedhet.data.toy import ToyModel, toy_task
from fedhet.errors import RunFailed
from fedhet.maths import feddisk
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.feddisk import FedDiskPlugin
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold
from fedhet.plugin import Plugin
from fedhet.task import ClientData, Samples, Task

Make = Callable[..., Any]
SHORT = {"hidden": 8, "made_max_rounds": 3, "local_max_epochs": 4, "clf_max_epochs": 4}
LINES = [f"plugin.feddisk.{name}={value}" for name, value in SHORT.items()]
COMMON = [
    "seed=1",
    "rounds=2",
    "client.epochs=2",
    "client.batch_size=5",
    "client.lr=0.1",
    "eval.every=2",
    "eval.clients=false",
]


def plugins(**options: Any) -> Callable[[], list[Plugin]]:
    return lambda: [FedDiskPlugin(**{**SHORT, **options})]


def criterion(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


def task_of(*inputs: Tensor) -> Task:
    """Clients with these inputs (n, 4) in [0, 1], and labels that the first input decides."""
    return Task(
        ToyModel,
        criterion,
        [ClientData(Samples(x, (x[:, 0] > 0.5).long())) for x in inputs],
        None,
        2,
    )


def kept(run: Any, pid: int) -> Tensor:
    return run.store.load(pid, run.strategy.versions[pid])["feddisk.w/w"]


def phases(run: Any) -> dict[str, int]:
    return {entry.name: entry.rounds for entry in run.strategy.timetable}


# ---- by hand


def made_step(w: dict[str, np.ndarray], x: np.ndarray, lr: float) -> dict[str, np.ndarray]:
    """One step of gradient descent on the mean of sum_d BCE, with masks from the definition and
    gradients by hand."""
    hidden, dim = w["W1"].shape
    m = [1 + k * (dim - 1) // hidden for k in range(hidden)]
    m1 = np.array([[float(m[k] >= d) for d in range(1, dim + 1)] for k in range(hidden)])
    m2 = np.array([[float(d > m[k]) for k in range(hidden)] for d in range(1, dim + 1)])
    h = np.maximum(x @ (w["W1"] * m1).T + w["b1"], 0)
    out = 1 / (1 + np.exp(-(h @ (w["W2"] * m2).T + w["b2"])))
    error = (out - x) / len(x)
    back = error @ (w["W2"] * m2) * (h > 0)
    grads = {"W1": back.T @ x * m1, "b1": back.sum(0), "W2": error.T @ h * m2, "b2": error.sum(0)}
    return {name: w[name] - lr * grads[name] for name in w}


@pytest.mark.parametrize(
    "cls", [FedAvg, Scaffold]
)  # SCAFFOLD averages uniformly, but equation 12 has n_k / n
def test_two_rounds_of_the_global_made(federation: Make, cls: type) -> None:
    lr, task = 0.5, toy_task(3)
    run = federation(
        task,
        cls,
        plugins=plugins(
            made_optimizer="sgd",
            made_lr=lr,
            made_batch_size=100,
            made_local_epochs=2,
            min_samples=99,
        ),
    )
    w = {name: t.double().numpy() for name, t in run.strategy.weights["density"].items()}
    for _ in range(2):
        run.step()
        new = []
        for client in task.clients:
            local = w
            for _ in range(2):
                local = made_step(local, client.train.x.double().numpy(), lr)
            new.append(local)
        sizes = np.array(task.sizes) / sum(task.sizes)
        w = {name: sum(p * local[name] for p, local in zip(sizes, new, strict=True)) for name in w}
        for name, expected in w.items():
            np.testing.assert_allclose(
                run.strategy.weights["density"][name], expected, rtol=2e-5, atol=1e-6
            )


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.double())


def test_the_weighted_round(federation: Make) -> None:
    """Softmax regression, one batch of all samples: (1 / |B|) sum_b w_b l_b, then n_k / n."""
    task, lr = toy_task(3), 0.7
    task = Task(Linear, criterion, task.clients, None, 2)
    run = federation(
        task,
        FedAvg,
        plugins=plugins(ratio="raw", clf_lr=0.3, clf_max_epochs=50),
        lr=lr,
        batch_size=100,
        epochs=2,
    )
    run.step()
    old = {name: t.numpy().copy() for name, t in run.model.items()}
    weights = [kept(run, pid).double().numpy() for pid in range(3)]
    assert all(len(w) == n and w.std() > 1e-3 for w, n in zip(weights, task.sizes, strict=True))
    run.step()
    new = dict.fromkeys(old, 0.0)
    for client, w in zip(task.clients, weights, strict=True):
        x, y, n = client.train.x.double().numpy(), client.train.y.numpy(), len(client.train)
        weight, bias = old["head.weight"].copy(), old["head.bias"].copy()
        for _ in range(2):
            z = x @ weight.T + bias
            p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
            error = (p - np.eye(2)[y]) * w[:, None] / n
            weight, bias = weight - lr * error.T @ x, bias - lr * error.sum(0)
        new = {
            name: new[name] + n / sum(task.sizes) * value
            for name, value in (("head.weight", weight), ("head.bias", bias))
        }
    for name, expected in new.items():
        np.testing.assert_allclose(run.model[name], expected, rtol=1e-6, atol=1e-9)


# ---- reductions and repeatability


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
def test_weights_of_one_are_the_host_bit_for_bit(federation: Make, cls: type) -> None:
    weighted = federation(
        toy_task(), cls, plugins=plugins(min_samples=99), rounds=3, fraction=0.5
    ).run()
    host = federation(toy_task(), cls, rounds=3, fraction=0.5).run()
    assert trees.sha256({"model": weighted.model}) == trees.sha256({"model": host.model})
    assert all(
        torch.equal(kept(weighted, pid), torch.ones(12 + 4 * pid))
        for pid in range(4)
        if cls is FedAvg
    )
    assert trees.sha256(
        {
            "model": (
                federation(toy_task(), cls, plugins=plugins(), rounds=3, fraction=0.5).run().model
            )
        }
    ) != trees.sha256({"model": host.model})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["method=feddisk"], ["method=fedavg", "plugin=[feddisk]"]),
        (["method=feddiskab"], ["method=feddisk", "plugin.feddisk.ratio=raw"]),
        (["method=feddisk"], ["method=feddisk", "engine.workers=2"]),
        (["method=feddiskab"], ["method=feddiskab", "engine.workers=2"]),
    ],
    ids=["feddisk", "feddiskab", "feddisk-workers", "feddiskab-workers"],
)
def test_same_bytes(launch: Make, one: list[str], other: list[str]) -> None:
    found, expected = (
        launch(*COMMON, *LINES, *lines, task=toy_task()).summary["weights_sha256"]
        for lines in (one, other)
    )
    assert found == expected


def test_every_option_changes_the_result(federation: Make) -> None:
    options: list[dict[str, Any]] = [
        {"ratio": "sampled"},
        {"ratio": "outputs"},
        {"ratio": "raw"},
        {"features": "conditional"},
        {"binarise": True},
        {"masks": "random"},
        {"normalise": "none"},
        {"normalise": "minmax2"},
        {"clf_lr": 0.1},
        {"made_lr": 0.01},
        {"min_samples": 20},
        {"made_local_epochs": 1},
    ]
    found = [
        federation(toy_task(), FedAvg, plugins=plugins(**changed), rounds=2, epochs=2).run().sha256
        for changed in options
    ]
    assert len(set(found)) == len(options)


@pytest.mark.parametrize("ratio", ["sampled", "outputs", "raw"])
def test_it_composes_and_repeats(federation: Make, ratio: str) -> None:
    def run() -> Any:
        return federation(
            toy_task(norm=True),
            Scaffold,
            plugins=lambda: [*plugins(ratio=ratio)(), FedNormPlugin()],
            rounds=3,
            fraction=0.5,
        )

    first, second = run().run(), run().run()
    assert first.sha256 == second.sha256
    assert trees.first_nonfinite(first.model) is None


def test_the_model_sees_the_same_cohorts_and_batches_with_and_without_it(federation: Make) -> None:
    with_it, without = (
        federation(toy_task(), FedAvg, plugins=p, rounds=2, fraction=0.5) for p in (plugins(), list)
    )
    cohorts = [[msg.pid for msg in run.step()] for run in (without, without)]
    while not with_it.round or with_it.strategy.current.entry.name != "feddisk.weigh":
        with_it.step()
    assert [[msg.pid for msg in with_it.step()] for _ in range(2)] == cohorts


# ---- the early stopping of the global MADE


def test_the_best_made_is_restored(federation: Make) -> None:
    """A step size that overshoots; the validation loss of round t is that of the MADE which round t
    received."""
    options = {
        "made_optimizer": "sgd",
        "made_lr": 1.2,
        "made_batch_size": 4,
        "made_local_epochs": 8,
    }
    run = federation(
        toy_task(5), FedAvg, plugins=plugins(**options, made_max_rounds=30, made_patience=2)
    )
    received, losses = [], []
    while True:
        received.append(dict(run.strategy.weights["density"]))
        run.step()
        if run.strategy.current.entry.name != "feddisk.density":
            break
        losses.append(run.strategy.plugins[0].report["val_loss"])
    done = len(losses)
    best = int(np.argmin(losses))
    assert 0 < best == done - 1 - 2 and done < 30
    assert phases(run)["feddisk.density"] == done == run.strategy.plugins[0].report["E1"]
    assert all(
        torch.equal(t, received[best][name]) for name, t in run.strategy.weights["density"].items()
    )
    # and the loss is the n-weighted mean over held-out tenths of the training data
    site, mask = run.site, feddisk.masks(4, 8)
    total = 0.0
    for pid, n in enumerate(site.task.sizes):
        client = run.client()
        client.pid, plugin = pid, client.plugins[0]
        train, held = plugin._split(site.task.clients[pid].train.x)
        assert len(held) == round(0.1 * n) and len(train) + len(held) == n
        total += n * float(feddisk.nll(received[best], mask, held).double().mean())
    assert losses[best] == pytest.approx(total / sum(site.task.sizes), rel=1e-12)


def test_a_loss_that_falls_to_the_end_keeps_the_newest_made(federation: Make) -> None:
    run = federation(toy_task(), FedAvg, plugins=plugins(made_lr=1e-3))
    for _ in range(3):
        run.step()
    newest = dict(run.strategy.weights["density"])
    run.step()
    assert run.strategy.current.entry.name == "feddisk.weigh"
    assert all(torch.equal(t, newest[name]) for name, t in run.strategy.weights["density"].items())


def test_a_loss_that_is_no_number_is_refused_from_small_clients_too(federation: Make) -> None:
    def invent(plan: list[Any], replies: list[Any]) -> list[Any]:
        replies[-1].extras["feddisk.val"] = float("nan")
        return replies

    with pytest.raises(
        RunFailed, match=r"client 0 failed in phase 'feddisk\.density'.*'feddisk\.val' is nan"
    ):
        federation(toy_task(), FedAvg, plugins=plugins(min_samples=13)).step(alter=invent)


def test_a_client_that_should_validate_must_say_the_loss(federation: Make) -> None:
    def silent(plan: list[Any], replies: list[Any]) -> list[Any]:
        del replies[1].extras["feddisk.val"]
        return replies

    with pytest.raises(RunFailed, match=r"client 2 .*feddisk\.density.*'feddisk\.val' is missing"):
        federation(toy_task(), FedAvg, plugins=plugins()).step(alter=silent)


def test_a_client_that_weighs_must_say_its_effective_size(federation: Make) -> None:
    def silent(plan: list[Any], replies: list[Any]) -> list[Any]:
        replies[1].metrics.clear()
        return replies

    with pytest.raises(
        RunFailed, match=r"client \d .*feddisk\.weigh.*the reply lacks the metric 'feddisk\.ess'"
    ):
        federation(toy_task(), FedAvg, plugins=plugins(ratio="raw")).step(alter=silent)
