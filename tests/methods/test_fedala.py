"""FedALA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.by_hand import (
    DATA,
    LR,
    SIZES,
    Case,
    Weights,
    case,
    gradient,
    latents,
    local_sgd,
    mean,
    same,
    task,
)
from methods.plugs import noisy

from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError, RunFailed
from fedhet.evaluation import evaluation_messages
from fedhet.flower import wire
from fedhet.methods.fedala import LOCAL, WEIGHTS, FedALA, FedALAClient
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.plugin import Plugin
from fedhet.task import ClientData, Task

__all__ = ["case"]
Federation = Callable[..., Any]
TOP = {1: ("head.weight", "head.bias"), 2: ("body.weight", "body.bias", "head.weight", "head.bias")}


def kept(run: Any, pid: int, key: str) -> Weights:
    state = run.store.load(pid, run.strategy.versions.get(pid, 0)) or {}
    return {
        name.removeprefix(f"{key}/"): t.numpy()
        for name, t in state.items()
        if name.startswith(f"{key}/")
    }


def cross_entropy(w: Weights, x: np.ndarray, y: np.ndarray) -> float:
    logits = latents(w, x) @ w["head.weight"].T + w["head.bias"]
    return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]))


class Mixing:
    """A client of the paper's text, on full batches: what it keeps, and where it starts."""

    def __init__(
        self, pid: int, top: tuple[str, ...], eta: float, threshold: float, most: int
    ) -> None:
        self.pid, self.top, self.eta, self.threshold, self.most = pid, top, eta, threshold, most
        self.local: Weights | None = None
        self.weights: Weights | None = None
        self.epochs: list[int] = []

    def start(self, x: Weights, weights: Weights) -> Weights:
        assert self.local is not None
        return {
            **x,
            **{
                name: self.local[name] + (x[name] - self.local[name]) * weights[name]
                for name in self.top
            },
        }

    def learned(self, x: Weights) -> Weights | None:
        if self.local is None or all(
            np.array_equal(x[name], self.local[name]) for name in self.top
        ):
            return self.weights
        weights = self.weights or {name: np.ones_like(x[name]) for name in self.top}
        losses: list[float] = []
        while len(losses) < (self.most if self.weights is None else 1):
            at = self.start(x, weights)
            losses.append(cross_entropy(at, *DATA[self.pid]))
            g = gradient(at, *DATA[self.pid])
            weights = {
                name: np.clip(a - self.eta * g[name] * (x[name] - self.local[name]), 0, 1)
                for name, a in weights.items()
            }
            if len(losses) >= 10 and np.std(losses[-10:]) < self.threshold:
                break
        self.epochs.append(len(losses))
        return weights

    def begin(self, x: Weights) -> Weights:
        weights = self.learned(x)
        return x if weights is None else self.start(x, weights)

    def train(self, x: Weights) -> Weights:
        self.weights = self.learned(x)
        found = local_sgd(x if self.weights is None else self.start(x, self.weights), self.pid)
        self.local = {name: found[name].copy() for name in self.top}
        return found


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize(
    ("eta", "threshold", "most"), [(1.0, 0.1, 100), (40.0, 2e-3, 60), (40.0, 0.0, 12)]
)
def test_by_hand(
    case: Callable[..., Case], p: int, eta: float, threshold: float, most: int
) -> None:
    """Zhang et al., algorithm 1, with every sample: each client's own w_k and A_k, and FedAvg of
    what they end with."""
    running = case(
        FedALA, options={"p": p, "eta": eta, "threshold": threshold, "max_epochs": most, "s": 100}
    )
    clients = [Mixing(pid, TOP[p], eta, threshold, most) for pid in range(len(SIZES))]
    for x, cohort, found in running.rounds():
        same(found, mean([clients[k].train(x) for k in cohort], [SIZES[k] for k in cohort]))
        for client in clients:
            same(kept(running.run, client.pid, LOCAL), client.local or {})
            same(kept(running.run, client.pid, WEIGHTS), client.weights or {})
    learned = np.concatenate(
        [a.ravel() for client in clients for a in (client.weights or {}).values()]
    )
    assert ((learned > 0) & (learned < 1)).any()
    first = [client.epochs[0] for client in clients if client.epochs]
    assert (
        (set(first) == {10})
        if eta == 1
        else any(10 < count < most for count in first)
        if threshold
        else set(first) == {most}
    )
    assert any(client.epochs[1:] for client in clients)


@pytest.mark.parametrize("p", [1, 2])
def test_views(federation: Federation, p: int) -> None:
    """Global: x; personal: where the client would start to train on it, by an A_k that it learns
    for this and forgets."""
    plain = task()
    held = Task(
        plain.model,
        plain.criterion,
        [ClientData(c.train, None, c.train) for c in plain.clients],
        None,
        2,
    )
    options = {"p": p, "eta": 40.0, "threshold": 2e-3, "max_epochs": 30, "s": 100}
    run = federation(
        held, FedALA, options=options, lr=LR, epochs=4, batch_size=99, fraction=0.6, rounds=3
    )
    clients = [Mixing(pid, TOP[p], 40.0, 2e-3, 30) for pid in range(len(SIZES))]
    differs = 0
    for _ in range(3):
        x = {name: t.numpy().copy() for name, t in run.model.items()}
        for msg in run.step():
            clients[msg.pid].train(x)
        x = {name: t.numpy().copy() for name, t in run.model.items()}
        for msg in evaluation_messages(run.strategy):
            metrics = run.client().handle(msg).metrics
            expected = [cross_entropy(w, *DATA[msg.pid]) for w in (x, clients[msg.pid].begin(x))]
            assert [metrics["test.global.loss"], metrics["test.personal.loss"]] == pytest.approx(
                expected, rel=1e-9
            )
            differs += expected[0] != expected[1]
    assert 3 < differs < 15  # who has never taken part has nothing to mix


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
@pytest.mark.parametrize(
    "plugins",
    [list, lambda: [FedNormPlugin(temperature=0.05), FedProxPlugin(mu=0.5)]],
    ids=["alone", "plugins"],
)
def test_eta_0_is_fedavg(federation: Federation, plugins: Any, buffers: str) -> None:
    """Bit for bit, though A_k = 1 is learnt each time in train mode."""
    how = {
        "plugins": plugins,
        "buffers": buffers,
        "rounds": 4,
        "fraction": 0.75,
        "epochs": 2,
        "local": {"momentum": 0.9},
    }
    fixed = federation(noisy(), FedALA, options={"eta": 0.0, "p": "all"}, **how).run()
    assert any(kept(fixed, pid, WEIGHTS) for pid in range(4))
    assert (
        fixed.sha256
        == federation(noisy(), FedAvg, **how).run().sha256
        != federation(noisy(), FedALA, **how).run().sha256
    )


def test_one_client_is_fedavg(federation: Federation) -> None:
    """What it receives is what it has sent: there is nothing to mix."""
    ala, fedavg = (
        federation(toy_task(1, norm=True), cls, rounds=4).run() for cls in (FedALA, FedAvg)
    )
    assert ala.sha256 == fedavg.sha256 and not kept(ala, 0, WEIGHTS) and kept(ala, 0, LOCAL)


def test_unchanged_means_every_entry(federation: Federation) -> None:
    """A received layer that differs in one entry of its bias is a change, one whose sum alone is
    the same too."""
    run = federation(toy_task(1), FedALA, rounds=2)
    run.step()
    msg = run.strategy.plan(2)[0]
    for change in (torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.1]), torch.tensor([0.1, -0.1])):
        client = run.client()
        client.handle(
            replace(msg, weights={**msg.weights, "head.bias": msg.weights["head.bias"] + change})
        )
        assert (client.state.get(WEIGHTS) is not None) == bool(change.any())


def test_two_clients_that_alternate_keep_their_own(federation: Federation) -> None:
    """Each round moves the state of its client only, and w_k is what that client has sent."""
    run = federation(toy_task(2, norm=True), FedALA, options={"eta": 50.0}, rounds=12, fraction=0.5)
    before: list[Any] = [{}, {}]
    heard: list[Any] = []
    for _ in range(12):
        (msg,) = run.step(lambda plan, replies: heard.extend(replies) or replies)
        now = [{key: kept(run, pid, key) for key in (LOCAL, WEIGHTS)} for pid in range(2)]
        same(now[1 - msg.pid][LOCAL], before[1 - msg.pid].get(LOCAL, {}))
        same(now[1 - msg.pid][WEIGHTS], before[1 - msg.pid].get(WEIGHTS, {}))
        sent = {name: heard[-1].weights[name].numpy() for name in TOP[1]}
        same(now[msg.pid][LOCAL], sent)
        before = now
    assert {update.pid for update in heard} == {0, 1}
    assert not np.array_equal(before[0][WEIGHTS]["head.weight"], before[1][WEIGHTS]["head.weight"])


@pytest.mark.parametrize(
    ("p", "held"),
    [
        (1, ["head"]),
        (2, ["body.1", "head"]),
        (3, ["body.0", "body.1", "head"]),
        (9, ["body.0", "body.1", "head"]),
        ("all", ["body.0", "body.1", "head"]),
    ],
)
def test_p_counts_layers(federation: Federation, p: int | str, held: list[str]) -> None:
    """A weight and its bias are one; statistics are not mixed."""
    run = federation(toy_task(norm=True), FedALA, options={"p": p}).run()
    assert list(kept(run, 0, LOCAL)) == [
        f"{layer}.{name}" for layer in held for name in ("weight", "bias")
    ]


def test_evaluation_leaves_no_trace(federation: Federation) -> None:
    """Neither in the weights nor in what clients keep."""
    watched, alone = (
        federation(noisy(), FedALA, options={"eta": 20.0}, rounds=4, fraction=0.75)
        for _ in range(2)
    )
    for _ in range(4):
        watched.step()
        alone.step()
        for msg in evaluation_messages(watched.strategy):
            watched.client().handle(msg)
        assert watched.sha256 == alone.sha256
        for pid in range(4):
            for key in (LOCAL, WEIGHTS):
                same(kept(watched, pid, key), kept(alone, pid, key))


def test_the_samples_are_drawn_afresh(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s % of a client's own samples, each once, others in the next round; the same in every epoch
    of a round."""
    seen: list[list[torch.Tensor]] = []
    inner = FedALAClient.objective

    def objective(self: Any, model: Any, data: Any, *, hooks: bool = True) -> Any:
        terms = inner(self, model, data, hooks=hooks)
        if hooks:
            return terms
        seen.append([])
        return lambda x, y, index: seen[-1].append(index) or terms(x, y, index)

    monkeypatch.setattr(FedALAClient, "objective", objective)
    federation(
        toy_task(3, equal=True),
        FedALA,
        options={"s": 50, "threshold": 0.0, "max_epochs": 4},
        rounds=3,
        batch_size=4,
    ).run()
    # 6 of 12 samples, in batches of 4 and 2
    assert [len(parts) for parts in seen] == 3 * [2 * 4] + 3 * [2]
    drawn = [torch.cat(parts[:2]).tolist() for parts in seen]
    assert all(len(set(one)) == 6 and min(one) >= 0 and max(one) < 12 for one in drawn)
    assert all(
        torch.equal(torch.cat(parts[at : at + 2]), torch.cat(parts[:2]))
        for parts in seen
        for at in range(0, len(parts), 2)
    )
    assert len({frozenset(one) for one in drawn}) == 6


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_learning(federation: Federation, lost: float) -> None:
    """It cannot settle. What the client then sends is refused by name; an evaluation tells what it
    has found."""
    factor, plain = [1.0], toy_task(2)
    run = federation(
        replace(plain, criterion=lambda output, y: plain.criterion(output, y) * factor[0]),
        FedALA,
        rounds=2,
    )
    run.step()
    factor[0] = lost
    assert all(
        np.isnan(run.client().handle(msg).metrics["test.personal.loss"])
        for msg in evaluation_messages(run.strategy)
    )
    with pytest.raises(RunFailed, match="holds NaN or infinite values"):
        run.step()


class Counting(Plugin):
    """Counts the batches that it sees."""

    name = "counting"

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.seen = seen

    def losses(self, batch: Any) -> Any:
        self.seen.append(len(batch.y))
        return torch.zeros(len(batch.y))


def test_plugins_stay_out_of_the_learning(federation: Federation) -> None:
    """They see each training sample once in each round."""
    seen: list[int] = []
    run = federation(
        toy_task(3, equal=True), FedALA, plugins=lambda: [Counting(seen)], rounds=3
    ).run()
    assert kept(run, 0, WEIGHTS) and sum(seen) == 3 * 3 * 12


def test_nothing_of_it_travels(federation: Federation) -> None:
    """What a client packs is what FedAvg's would: weights of the same names and sizes, no
    extras."""
    packed = {}
    for cls in (FedALA, FedAvg):
        run = federation(toy_task(norm=True), cls, rounds=2)
        run.step()
        reply = run.client().handle(run.strategy.plan(2)[0])
        assert not reply.extras
        packed[cls] = [array.shape for array in wire.reply_arrays(reply)[0]]
    assert packed[FedALA] == packed[FedAvg]


@pytest.mark.parametrize(
    "options",
    [
        {"eta": -1},
        {"s": 0},
        {"s": 101},
        {"p": 0},
        {"p": "top"},
        {"p": 1.5},
        {"threshold": -0.1},
        {"max_epochs": 0},
    ],
)
def test_bad_options_are_named(federation: Federation, options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=rf"method\.{next(iter(options))}=.*{'or all' if 'p' in options else ''}"
    ):
        federation(toy_task(), FedALA, options=options)
