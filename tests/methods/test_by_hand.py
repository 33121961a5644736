"""Three rounds of each method in numpy, from the papers' text, with gradients by hand.

The network is 3-4-2 with ReLU and cross entropy, in float64; every batch is the client's whole
data, so that the order of the samples does not matter. Nothing of fedhet computes an expected
value; the cohorts are those of the messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNorm, FedNormPlugin
from fedhet.methods.fedprox import FedProx, FedProxPlugin
from fedhet.methods.scaffold import Scaffold
from fedhet.task import ClientData, Task

SIZES, LR, EPOCHS, ROUNDS = (5, 8, 3, 6, 7), 0.3, 4, 3
Weights = dict[str, np.ndarray]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Linear(3, 4, dtype=torch.float64),
            nn.Linear(4, 2, dtype=torch.float64),
        )

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def criterion(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


RNG = np.random.default_rng(7)
DATA = [(RNG.normal(size=(n, 3)) + 0.5 * RNG.normal(size=3), RNG.integers(0, 2, n)) for n in SIZES]


def task() -> Task:
    clients = [ClientData((torch.from_numpy(x), torch.from_numpy(y))) for x, y in DATA]  # type: ignore[arg-type]
    return Task(Net, criterion, clients, None, 2)


def latents(w: Weights, x: np.ndarray) -> np.ndarray:
    return np.maximum(x @ w["body.weight"].T + w["body.bias"], 0)


def gradient(w: Weights, x: np.ndarray, y: np.ndarray) -> Weights:
    """Of the mean cross entropy."""
    h = latents(w, x)
    logits = h @ w["head.weight"].T + w["head.bias"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ w["head.weight"]) * (h > 0)
    return {
        "body.weight": back.T @ x,
        "body.bias": back.sum(0),
        "head.weight": p.T @ h,
        "head.bias": p.sum(0),
    }


def each(f: Callable[..., np.ndarray], *trees: Weights) -> Weights:
    return {name: f(*(tree[name] for tree in trees)) for name in trees[0]}


def mean(trees: Sequence[Weights], p: Sequence[float]) -> Weights:
    return {
        name: sum(q * tree[name] for q, tree in zip(p, trees, strict=True)) / sum(p)
        for name in trees[0]
    }


@dataclass
class Case:
    """A run of the package beside which the expected rounds are computed."""

    run: Any

    @property
    def weights(self) -> Weights:
        return {name: t.numpy() for name, t in self.run.model.items()}

    def rounds(self) -> Any:
        """(x before the round, the cohort, what the package makes of them)."""
        for _ in range(ROUNDS):
            before = {name: array.copy() for name, array in self.weights.items()}
            plan = self.run.step()
            yield before, [msg.pid for msg in plan], self.weights


@pytest.fixture
def case(federation: Callable[..., Any]) -> Callable[..., Case]:
    def make(cls: type, **how: Any) -> Case:
        return Case(
            federation(
                task(),
                cls,
                lr=LR,
                epochs=EPOCHS,
                batch_size=max(SIZES),
                rounds=ROUNDS,
                fraction=0.6,
                **how,
            )
        )

    return make


def same(found: Weights, expected: Weights) -> None:
    assert list(found) == list(expected)
    for name in expected:
        np.testing.assert_allclose(
            found[name], expected[name], rtol=1e-10, atol=1e-12, err_msg=name
        )


def corrected(own: Weights, c: Weights) -> Callable[[Weights, Weights], Weights]:
    """SCAFFOLD's local gradient, g - c_i + c."""
    return lambda g, w: each(lambda a, b, d: a - b + d, g, own, c)


def c_plus(own: Weights, c: Weights, x: Weights, y: Weights) -> Weights:
    """Option II: c_i - c + (x - y) / (K lr)."""
    return each(lambda a, b, x0, y1: a - b + (x0 - y1) / (EPOCHS * LR), own, c, x, y)


def local_sgd(
    x: Weights, pid: int, change: Callable[[Weights, Weights], Weights] = lambda g, w: g
) -> Weights:
    w = x
    for _ in range(EPOCHS):
        w = each(lambda a, g: a - LR * g, w, change(gradient(w, *DATA[pid]), w))
    return w


def test_fedavg(case: Callable[..., Case]) -> None:
    """McMahan et al., algorithm 1: w <- sum_k n_k/n w_k over the clients of the round."""
    for x, cohort, found in case(FedAvg).rounds():
        assert len(cohort) == 3
        same(found, mean([local_sgd(x, k) for k in cohort], [SIZES[k] for k in cohort]))


def test_fedprox(case: Callable[..., Case]) -> None:
    """Li et al., eq. 2: min F_k(w) + mu/2 |w - w^t|^2, whose gradient has mu (w - w^t) more."""
    mu = 0.8
    for x, cohort, found in case(FedProx, plugins=lambda: [FedProxPlugin(mu=mu)]).rounds():

        def pulled(g: Weights, w: Weights, x: Weights = x) -> Weights:
            return each(lambda a, b, c: a + mu * (b - c), g, w, x)

        same(found, mean([local_sgd(x, k, pulled) for k in cohort], [SIZES[k] for k in cohort]))


def test_scaffold(case: Callable[..., Case]) -> None:
    """Karimireddy et al., algorithm 1 with option II, whose server adds (1/N) sum of the changes of
    c_i to c."""
    lr_g, clients = 0.7, len(SIZES)
    running = case(Scaffold, options={"lr_g": lr_g})
    zero = each(np.zeros_like, running.weights)
    c, c_i = zero, [zero] * clients
    for x, cohort, found in running.rounds():
        dy, dc = [], []
        for i in cohort:
            y = local_sgd(x, i, corrected(c_i[i], c))
            plus = c_plus(c_i[i], c, x, y)
            dy.append(each(np.subtract, y, x))
            dc.append(each(np.subtract, plus, c_i[i]))
            c_i[i] = plus
        c = {name: c[name] + sum(d[name] for d in dc) / clients for name in zero}
        same(found, each(lambda a, b: a + lr_g * b, x, mean(dy, [1] * len(dy))))
        for i in range(clients):  # what each client remembers, also those that were not asked
            kept = running.run.store.load(i, running.run.strategy.versions.get(i, 0)) or {}
            same(
                {name: kept[f"scaffold.c_i/{name}"].numpy() for name in zero} if kept else zero,
                c_i[i],
            )


@pytest.mark.parametrize("z_when", ["after_training", "before_training"])
@pytest.mark.parametrize("temperature", [0.5, 0.05])
def test_fednorm(case: Callable[..., Case], z_when: str, temperature: float) -> None:
    """Kundalwal et al., algorithm 1 with equations 3, 4, 7 and 8; nu is FedAvg's n_k."""
    running = case(FedNorm, plugins=lambda: [FedNormPlugin(temperature=temperature, z_when=z_when)])
    for x, cohort, found in running.rounds():
        local = [local_sgd(x, k) for k in cohort]
        used = local if z_when == "after_training" else [x] * len(cohort)
        z = [
            latents(w, DATA[k][0]).mean(0).astype(np.float32).astype(float)
            for w, k in zip(used, cohort, strict=True)
        ]
        s = [
            [
                1.0 if r == p else z[r] @ z[p] / np.sqrt(z[r] @ z[r] * (z[p] @ z[p]))
                for p in range(len(z))
            ]
            for r in range(len(z))
        ]
        e = [np.exp(sum(row) / temperature) for row in s]
        factors = [sum(e[q] for q in range(len(z)) if q != r) / sum(e) for r in range(len(z))]
        weights = [factor * SIZES[k] for factor, k in zip(factors, cohort, strict=True)]
        assert max(weights) / sum(weights) != pytest.approx(
            max(SIZES[k] for k in cohort) / sum(SIZES[k] for k in cohort), rel=1e-3
        )
        same(found, mean(local, weights))
        report = running.run.strategy.reports()["fednorm"]
        np.testing.assert_allclose(report["similarity"], s, rtol=1e-10)
        np.testing.assert_allclose(report["factors"], factors, rtol=1e-10)
        np.testing.assert_allclose(report["weights"], np.array(weights) / sum(weights), rtol=1e-10)
        assert report["pids"].tolist() == cohort and report["weight_max"] == float(
            report["weights"].max()
        )


def test_fednorms_record(launch: Callable[..., Any]) -> None:
    """rounds.jsonl has the largest weight, arrays/ the rest, by participant."""
    run = launch(
        "method=fednorm", "rounds=2", "fraction=0.75", "eval.clients=false", task=toy_task()
    )
    rows = [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
    for row in rows:
        found = load_file(run.dir / "arrays" / f"fednorm-{row['step']}.safetensors")
        assert {name: tuple(t.shape) for name, t in found.items()} == {
            "similarity": (3, 3),
            "factors": (3,),
            "weights": (3,),
            "pids": (3,),
        }
        unnormalised = found["factors"] * torch.tensor(
            [12.0 + 4 * pid for pid in found["pids"].tolist()]
        )  # Lambda_r n_r
        torch.testing.assert_close(found["weights"], unnormalised / unnormalised.sum())
        assert row["fednorm.weight_max"] == float(found["weights"].max())


@pytest.mark.parametrize(("clients", "told"), [(2, 1), (3, 0)])
def test_that_two_participants_make_fednorm_idle_is_told_once(
    federation: Callable[..., Any], caplog: pytest.LogCaptureFixture, clients: int, told: int
) -> None:
    with caplog.at_level(logging.INFO, "fedhet"):
        federation(toy_task(clients), FedNorm, plugins=lambda: [FedNormPlugin()], rounds=3).run()
    assert [
        record.getMessage()
        for record in caplog.records
        if "two participants" in record.getMessage()
    ] == told * [
        "fednorm: with two participants its weights are the host's, so it does nothing in such"
        " rounds"
    ]


def test_fednorm_on_scaffold(case: Callable[..., Case]) -> None:
    """nu = 1/R; x moves by sum_r w_r dy_r, and c is the mean of all c_j under lambda_j = R w_j of
    their last participation."""
    running, clients = case(Scaffold, plugins=lambda: [FedNormPlugin(temperature=0.1)]), len(SIZES)
    zero = each(np.zeros_like, running.weights)
    c, c_i, share = zero, [zero] * clients, [1.0] * clients
    for x, cohort, found in running.rounds():
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
        assert weights.std() > 0.01  # else this would be plain SCAFFOLD
        for i, w in zip(cohort, weights, strict=True):
            share[i] = len(cohort) * w
        c = mean(c_i, share)
        same(found, mean(local, list(weights)))


@pytest.mark.parametrize("z_when", ["after_training", "before_training"])
def test_latents_are_those_of_evaluation(federation: Callable[..., Any], z_when: str) -> None:
    """No dropout, running statistics, no augmentation; of the very weights that are sent, or of
    those that were received."""

    def model() -> nn.Module:
        made = toy_task(norm=True).model()
        made.body.append(nn.Dropout(0.5))  # type: ignore[union-attr, operator]
        return made

    toy = toy_task(norm=True)
    task = Task(
        model,
        toy.criterion,
        toy.clients,
        None,
        2,
        lambda x: 2 * x,
        augment=lambda x, generator: torch.zeros_like(x),
    )
    running = federation(task, FedNorm, plugins=lambda: [FedNormPlugin(z_when=z_when)])
    msg = running.strategy.plan(1)[0]
    update = running.client().handle(msg)
    evaluated = model().eval()
    evaluated.load_state_dict(update.weights if z_when == "after_training" else msg.weights)
    expected = evaluated.features(2 * toy.clients[msg.pid].train.x).detach().double().mean(0)  # type: ignore[operator]
    torch.testing.assert_close(update.extras["fednorm.z"].double(), expected, rtol=1e-5, atol=1e-6)
