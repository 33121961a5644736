"""FedGen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    latents,
    mean,
    same,
    task,
)
from methods.plugs import Fixed
from torch import Tensor, nn

from fedhet.data.toy import ToyModel, toy_task
from fedhet.engines.vectorized import obstacle
from fedhet.errors import ConfigError, RunFailed
from fedhet.maths.fedgen import diversity
from fedhet.messages import Broadcast
from fedhet.methods import fedgen
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedgen import COUNTS, GENERATOR, FedGen, Generator, Source
from fedhet.site import Site
from fedhet.task import ClientData, Samples

__all__ = ["case"]
SMALL = {"noise_dim": 3, "hidden": 6, "server_steps": 3, "server_batch_size": 8}
V = (0.1, 0.4, 0.2, 0.2, 0.1)


# ---- the client's round, by hand


def generated(g: Weights, noise: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Linear, batch norm with its running statistics, ReLU, linear."""
    h = np.concatenate([noise, np.eye(2)[y]], 1) @ g["layers.0.weight"].T + g["layers.0.bias"]
    h = (h - g["layers.1.running_mean"]) / np.sqrt(g["layers.1.running_var"] + 1e-5) * g[
        "layers.1.weight"
    ] + g["layers.1.bias"]
    return np.maximum(h, 0) @ g["layers.3.weight"].T + g["layers.3.bias"]


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def backward(w: Weights, x: np.ndarray, error: np.ndarray) -> Weights:
    """The gradient of a loss whose derivative by the logits is `error`."""
    h = latents(w, x)
    back = (error @ w["head.weight"]) * (h > 0)
    return {
        "body.weight": back.T @ x,
        "body.bias": back.sum(0),
        "head.weight": error.T @ h,
        "head.bias": error.sum(0),
    }


def trained(x: Weights, pid: int, g: Weights, source: Source | None, lam: float) -> Weights:
    inputs, y = DATA[pid]
    w, n = x, len(y)
    for _ in range(EPOCHS):
        total = gradient(w, inputs, y)
        if source is not None:
            drawn = source.labels(n).numpy()
            z = generated(g, source.noise(n).numpy(), drawn)
            fake = lam * (softmax(z @ w["head.weight"].T + w["head.bias"]) - np.eye(2)[drawn]) / n
            total |= {
                "head.weight": total["head.weight"] + fake.T @ z,
                "head.bias": total["head.bias"] + fake.sum(0),
            }
        w = each(lambda a, b: a - LR * b, w, total)
    return w


def test_round_by_hand(case: Callable[..., Case]) -> None:
    """Zhu et al., algorithm 1: from round 2 on the local loss has lam decay^(t - 1) E CE(h(G(eps,
    y')), y') more; then the mean."""
    running = case(FedGen, options={**SMALL, "lam": 0.8, "decay": 0.5, "noise": "uniform"})
    g: Weights = {}
    law = np.zeros(2)
    shown: dict[int, np.ndarray] = {}
    for step, (x, cohort, found) in enumerate(running.rounds(), start=1):
        strategy = running.run.strategy
        expected = []
        for k in cohort:
            source = (
                Source(
                    running.run.site,
                    "train",
                    step,
                    k,
                    law=torch.from_numpy(law).float(),
                    noise="uniform",
                    like=strategy._generator,
                )
                if step > 1
                else None
            )
            expected.append(trained(x, k, g, source, 0.8 * 0.5 ** (step - 1)))
        same(found, mean(expected, [SIZES[k] for k in cohort]))
        shown |= {k: np.bincount(DATA[k][1], minlength=2) for k in cohort}
        law, g = (
            sum(shown.values()),
            {name: t.numpy().copy() for name, t in strategy.weights["generator"].items()},
        )  # type: ignore[assignment]


def test_the_divergence_term_by_hand(federation: Callable[..., Any]) -> None:
    """kl KL(h(G(eps, y)) || h(f(x))) of the sample's own label, whose derivative by the logits of
    f(x) is p - target."""
    one = replace(
        task(),
        clients=[
            ClientData(Samples(torch.from_numpy(DATA[0][0][:1]), torch.from_numpy(DATA[0][1][:1])))
        ],
        sizes=[1],
    )
    run = federation(
        one, FedGen, options={**SMALL, "lam": 0.0, "kl": 0.7}, lr=LR, epochs=1, rounds=2
    )
    run.step()
    x = {name: t.numpy().copy() for name, t in run.model.items()}
    g = {name: t.numpy().copy() for name, t in run.strategy.weights["generator"].items()}
    run.step()
    source = Source(
        run.site, "train", 2, 0, law=torch.ones(2), noise="normal", like=run.strategy._generator
    )
    inputs, y = DATA[0][0][:1], DATA[0][1][:1]
    p = softmax(latents(x, inputs) @ x["head.weight"].T + x["head.bias"])
    target = softmax(generated(g, source.noise(1).numpy(), y) @ x["head.weight"].T + x["head.bias"])
    expected = each(
        lambda a, b: a - LR * b, x, backward(x, inputs, p - np.eye(2)[y] + 0.7 * (p - target))
    )
    same({name: t.numpy() for name, t in run.model.items()}, expected)


# ---- the server's generator


@pytest.mark.parametrize("shares", ["labels", "samples"])
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_the_first_step_of_the_generator(
    federation: Callable[..., Any], shares: str, eta: float
) -> None:
    """Adam's first step is lr against the sign of the gradient of CE(sum_k a_k^y h_k(z), y) + eta
    diversity; the heads are the clients'."""
    options = {**SMALL, "server_steps": 1, "server_lr": 0.01, "eta": eta, "ensemble": shares}
    run = federation(
        toy_task(5), FedGen, options=options, plugins=lambda: [Fixed(V)], lr=0.5, epochs=3
    )
    made = Generator(3, 2, 6, 3)
    before = {name: t.clone() for name, t in run.strategy.weights["generator"].items()}
    made.load_state_dict(before)
    heads: dict[int, nn.Linear] = {}

    def listen(plan: list[Any], replies: list[Any]) -> list[Any]:
        for reply in replies:
            heads[reply.pid] = nn.Linear(3, 2)
            heads[reply.pid].load_state_dict(
                {name: reply.weights[f"head.{name}"] for name in ("weight", "bias")}
            )
        return replies

    run.step(alter=listen)
    counts = {pid: torch.bincount(run.site.task.clients[pid].train.y, minlength=2) for pid in heads}
    source = Source(
        run.site, "train", 1, -1, law=sum(counts.values()).float(), noise="normal", like=made
    )  # type: ignore[union-attr]
    y, noise = source.labels(8), source.noise(8)
    z = made(noise, y)
    answer = torch.stack(
        [
            sum(
                (float(counts[k][c] / sum(counts.values())[c]) if shares == "labels" else V[k])
                * heads[k](z[b])
                for k in heads
            )
            for b, c in enumerate(y.tolist())
        ]
    )
    loss = nn.functional.cross_entropy(answer, y) + eta * diversity(z, noise)
    loss.backward()
    after, checked = run.strategy.weights["generator"], 0
    for name, p in made.named_parameters():
        clear = p.grad.abs() > 1e-4
        checked += int(clear.sum())
        torch.testing.assert_close(
            (after[name] - before[name])[clear], -0.01 * p.grad[clear].sign(), rtol=1e-2, atol=1e-5
        )
    assert checked > 30
    assert run.strategy.reports()["fedgen"]["generator_loss"] == pytest.approx(
        float((loss - eta * diversity(z, noise)).detach()), rel=1e-5
    )


def one_label_each() -> Any:
    """Clients 0 and 1 have label 0, clients 2 and 3 label 1; a third class that nobody has."""
    task = toy_task(4, equal=True)
    clients = [
        ClientData(Samples(c.train.x, torch.full_like(c.train.y, int(pid > 1))))
        for pid, c in enumerate(task.clients)
    ]

    class Three(ToyModel):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

    return replace(task, model=Three, clients=clients, test=None, classes=3)


def test_the_generator_learns_what_the_heads_call_each_label(
    federation: Callable[..., Any],
) -> None:
    run = federation(
        one_label_each(),
        FedGen,
        options={**SMALL, "server_steps": 200, "server_lr": 0.01},
        lr=0.3,
        rounds=2,
        epochs=3,
    )
    heads: list[Any] = []
    run.step()
    run.step(alter=lambda plan, replies: heads.extend(replies) or replies)
    made = Generator.of(run.strategy.weights["generator"], 3)
    y = torch.arange(2).repeat(50)
    z = made(torch.randn(100, 3, generator=torch.Generator().manual_seed(1)), y)
    for label, owners in ((0, heads[:2]), (1, heads[2:])):  # a_k^y is 0 for the others
        assert {k.pid // 2 for k in owners} == {label}
        logits = sum(
            nn.functional.linear(z[y == label], k.weights["head.weight"], k.weights["head.bias"])
            for k in owners
        )
        assert (logits.argmax(1) == label).float().mean() > 0.9  # type: ignore[attr-defined]
    assert run.strategy.reports()["fedgen"]["generator_loss"] < 0.2


def test_labels_are_drawn_that_somebody_has(
    federation: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server: those of the round's participants, by the law of all clients heard so far. The
    clients: by that law."""
    laws: list[tuple[int, list[float]]] = []

    class Spy(Source):
        def __init__(
            self, site: Site, phase: str, step: int, pid: int, *, law: Tensor, **other: Any
        ) -> None:
            laws.append((pid, law.tolist()))
            super().__init__(site, phase, step, pid, law=law, **other)

    monkeypatch.setattr(fedgen, "Source", Spy)
    run = federation(one_label_each(), FedGen, options=SMALL, fraction=0.25, rounds=6)
    known = np.zeros(3)
    seen = set()
    for _ in range(6):
        laws.clear()
        (msg,) = run.step()
        for pid, law in laws[:-1]:
            assert pid == msg.pid and law == known.tolist()
        known[msg.pid // 2] += 12 * (msg.pid not in seen)
        seen.add(msg.pid)
        assert laws[-1] == (-1, (known * (np.arange(3) == msg.pid // 2)).tolist())
    assert len(seen) > 2
    source = Source(
        run.site,
        "train",
        1,
        0,
        law=torch.tensor([3.0, 0.0, 1.0]),
        noise="normal",
        like=run.strategy._generator,
    )
    drawn = source.labels(4000).bincount(minlength=3) / 4000
    assert drawn[1] == 0 and drawn[0] == pytest.approx(0.75, abs=0.03)


# ---- what it shares with FedAvg


@pytest.mark.parametrize("norm", [False, True])
def test_without_its_terms_it_is_fedavg(federation: Callable[..., Any], norm: bool) -> None:
    """lam = kl = 0: the same bits, and no generator travels; with lam > 0 the first round is still
    FedAvg's."""
    how = {"rounds": 3, "fraction": 0.75, "epochs": 2, "local": {"momentum": 0.5}}
    plain = federation(toy_task(norm=norm), FedAvg, **how)
    off = federation(toy_task(norm=norm), FedGen, options={**SMALL, "lam": 0.0}, **how)
    on = federation(toy_task(norm=norm), FedGen, options=SMALL, **how)
    for step in (1, 2, 3):
        for run in (plain, off, on):
            plan = run.step()
            assert (GENERATOR in plan[0].extras) is (run is on and step > 1)
        assert all(torch.equal(t, off.model[name]) for name, t in plain.model.items())
        assert all(torch.equal(t, on.model[name]) for name, t in plain.model.items()) is (step == 1)


def test_a_received_generator_draws_nothing() -> None:
    """Its layers are not initialised, so dropout's numbers are those of FedAvg."""
    tree = Generator(3, 2, 6, 4).state_dict()
    before = torch.get_rng_state()
    made = Generator.of(tree, 2)
    assert (
        torch.equal(before, torch.get_rng_state())
        and not made.training
        and not any(p.requires_grad for p in made.parameters())
    )
    assert all(torch.equal(t, made.state_dict()[name]) for name, t in tree.items())


def test_engines_agree_and_the_generator_is_recorded(launch: Callable[..., Any]) -> None:
    from safetensors.torch import load_file

    lines = [
        "method=fedgen",
        "rounds=2",
        "eval.every=2",
        *(f"method.{key}={value}" for key, value in SMALL.items()),
    ]
    runs = [launch(*lines, *more, task=toy_task()) for more in ([], ["engine.workers=2"])]
    assert len({run.summary["weights_sha256"] for run in runs}) == 1
    up, down = (runs[0].summary["bytes"][way] for way in ("up", "down"))
    tree = load_file(runs[0].dir / "generator.safetensors")
    # once to each of four clients
    assert down[GENERATOR] == 4 * sum(t.numel() * t.element_size() for t in tree.values())
    assert (
        set(up) == {"model", COUNTS} and up["model"] == down["model"] and up[COUNTS] == 2 * 4 * 16
    )


def test_it_is_trained_one_by_one_and_eagerly(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(), FedGen, options=SMALL)
    assert "FedGenClient has its own train" in str(obstacle(run.client(), run.strategy.local))
    client = run.client()
    client.activate([])
    assert not client._plain_loss(True)


# ---- refusals


@pytest.mark.parametrize(
    "counts",
    [
        None,
        torch.tensor([12.0, 0.0]),
        torch.tensor([12]),
        torch.tensor([13, -1]),
        torch.tensor([3, 3]),
    ],
)
def test_bad_counts_are_the_clients_failure(federation: Callable[..., Any], counts: Any) -> None:
    def lie(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        replies[-1].extras[COUNTS] = counts
        return replies

    with pytest.raises(
        RunFailed, match=r"client 0 failed.*fedgen.counts.*2 whole numbers >= 0 with sum 12"
    ):
        federation(toy_task(), FedGen, options=SMALL).step(alter=lie)


def test_a_generator_that_diverges_stops_the_run(federation: Callable[..., Any]) -> None:
    with pytest.raises(RunFailed, match=r"loss of the generator is (nan|inf).*server_lr"):
        federation(toy_task(), FedGen, options={**SMALL, "server_lr": 1e30}).step()


class NoFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)


@pytest.mark.parametrize(
    "changes",
    [{"model": lambda: nn.Sequential(nn.Linear(4, 2))}, {"model": NoFeatures}, {"classes": 0}],
    ids=["no head", "no features", "no classes"],
)
def test_what_it_needs_is_said(federation: Callable[..., Any], changes: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"method=fedgen .*features\(x\).*`head`; this is \w+ with \d classes"
    ):
        federation(replace(toy_task(), **changes), FedGen)


@pytest.mark.parametrize(
    "options",
    [
        {"lam": -1},
        {"kl": -1},
        {"decay": 0},
        {"decay": 1.1},
        {"eta": -1},
        {"ensemble": "mean"},
        {"noise": "no"},
        {"noise_dim": 0},
        {"hidden": 0},
        {"server_steps": -1},
        {"server_lr": 0},
        {"server_batch_size": 1},
    ],
    ids=str,
)
def test_bad_options_are_named(federation: Callable[..., Any], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}="):
        federation(toy_task(), FedGen, options=options)
