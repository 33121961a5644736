"""FedGen's generator: how the server trains it, and what is drawn for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.plugs import Fixed
from methods.readouts import step_and_replies
from methods.small_generator import SERVER, SMALL, source
from torch import Tensor, nn

from fedhet.core import streams
from fedhet.core.task import ClientData, Samples, Task
from fedhet.core.trees import AnyTree
from fedhet.data.toy import ToyModel, toy_task
from fedhet.methods import fedgen
from fedhet.methods.fedgen import (
    PARAMETERS,
    FedGen,
    NoiseSource,
    diversity,
    generate,
    new_generator,
)

V = (0.1, 0.4, 0.2, 0.2, 0.1)  # aggregation weights of five clients


@pytest.mark.parametrize("shares", ["labels", "samples"])
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_the_first_step_of_the_generator(
    federation: Callable[..., Any], shares: str, eta: float
) -> None:
    """Adam's first step is lr against the sign of the gradient.

    The loss is CE(sum_k a_k^y h_k(z), y) + eta diversity, with the heads of the clients.
    """
    options = {**SMALL, "server_steps": 1, "server_lr": 0.01, "eta": eta, "ensemble": shares}
    run = federation(
        toy_task(5), FedGen, options=options, plugins=lambda: [Fixed(V)], lr=0.5, epochs=3
    )
    before = {name: t.clone() for name, t in run.strategy.weights["generator"].items()}
    generator = {name: t.clone().requires_grad_(name in PARAMETERS) for name, t in before.items()}
    _, replies = step_and_replies(run)
    heads = {}
    counts = {}
    for reply in replies:
        heads[reply.pid] = nn.Linear(3, 2)
        heads[reply.pid].load_state_dict(
            {name: reply.weights[f"head.{name}"] for name in ("weight", "bias")}
        )
        labels = run.workspace.task.clients[reply.pid].train.y
        counts[reply.pid] = torch.bincount(labels, minlength=2)
    total = torch.stack(list(counts.values())).sum(0)
    draws = source(run, generator, 1, SERVER, law=total.float())
    y = draws.labels(8)
    noise = draws.noise(8)
    z = generate(generator, noise, y, training=True)

    def share(k: int, c: int) -> float:
        return float(counts[k][c] / total[c]) if shares == "labels" else V[k]

    answers = [
        torch.stack([share(k, c) * heads[k](z[b]) for k in heads]).sum(0)
        for b, c in enumerate(y.tolist())
    ]
    cross_entropy = nn.functional.cross_entropy(torch.stack(answers), y)
    (cross_entropy + eta * diversity(z, noise)).backward()
    after = run.strategy.weights["generator"]
    checked = 0
    for name in PARAMETERS:
        p = generator[name]
        clear = p.grad.abs() > 1e-4
        checked += int(clear.sum())
        moved = (after[name] - before[name])[clear]
        torch.testing.assert_close(moved, -0.01 * p.grad[clear].sign(), rtol=1e-2, atol=1e-5)
    assert checked > 30
    recorded = run.current.recorded["fedgen"]["generator_loss"]
    assert recorded == pytest.approx(float(cross_entropy.detach()), rel=1e-5)


def test_every_parameter_of_the_generator_has_a_gradient() -> None:
    """Batch norm subtracts the mean, so a bias before it would have none."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        generator = new_generator(3, 2, 6, 4)
        parameters = {name: generator[name].requires_grad_() for name in PARAMETERS}
        y = torch.arange(2).repeat(8)
        logits = nn.Linear(4, 2)(generate(generator, torch.randn(16, 3), y, training=True))
    nn.functional.cross_entropy(logits, y).backward()
    largest = {name: float(p.grad.abs().max()) for name, p in parameters.items()}
    assert min(largest.values()) > 1e-4, largest
    statistics = {"running_mean", "running_var", "num_batches_tracked"}  # all the rest is trained
    assert set(generator) - set(parameters) == {f"layers.1.{name}" for name in statistics}


class ThreeClasses(ToyModel):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)


def one_label_each() -> Task:
    """Clients 0 and 1 have label 0, clients 2 and 3 label 1; no client has the third class."""
    task = toy_task(4, equal=True)
    clients = [
        ClientData(Samples(c.train.x, torch.full_like(c.train.y, int(pid > 1))))
        for pid, c in enumerate(task.clients)
    ]
    return replace(task, model=ThreeClasses, clients=clients, test=None, classes=3)


def test_the_generator_learns_what_the_heads_take_for_each_label(
    federation: Callable[..., Any],
) -> None:
    options = {**SMALL, "server_steps": 200, "server_lr": 0.01}
    run = federation(one_label_each(), FedGen, options=options, lr=0.3, rounds=2, epochs=3)
    run.step()
    _, replies = step_and_replies(run)
    y = torch.arange(2).repeat(50)
    noise = torch.randn(100, 3, generator=torch.Generator().manual_seed(1))
    z = generate(run.strategy.weights["generator"], noise, y)
    for label, owners in ((0, replies[:2]), (1, replies[2:])):  # a_k^y is 0 for the others
        assert {update.pid // 2 for update in owners} == {label}
        heads = [(k.weights["head.weight"], k.weights["head.bias"]) for k in owners]
        outputs = [nn.functional.linear(z[y == label], *weights) for weights in heads]
        answers = torch.stack(outputs).sum(0).argmax(1)
        assert (answers == label).float().mean() > 0.9
    assert run.current.recorded["fedgen"]["generator_loss"] < 0.2


def test_drawn_labels_exist(
    federation: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients draw by the law of all clients that have recorded so far.

    So does the server, but only labels of the round's participants.
    """
    laws: list[tuple[int, list[float]]] = []  # (seed of the stream, law) of each source

    class Recording(NoiseSource):
        def __init__(self, g: AnyTree, stream: torch.Generator, *, law: Tensor, noise: str) -> None:
            laws.append((stream.initial_seed(), law.tolist()))
            super().__init__(g, stream, law=law, noise=noise)

    def seed(step: int, pid: int) -> int:
        return streams.integer(run.workspace.seed, "fedgen", "train", step, pid)

    monkeypatch.setattr(fedgen, "NoiseSource", Recording)
    run = federation(one_label_each(), FedGen, options=SMALL, fraction=0.25, rounds=6)
    known = np.zeros(3)
    seen = set()
    for step in range(1, 7):
        laws.clear()
        (msg,) = run.step()
        assert laws[:-1] == ([(seed(step, msg.pid), known.tolist())] if step > 1 else [])
        known[msg.pid // 2] += 12 * (msg.pid not in seen)
        seen.add(msg.pid)
        present = np.arange(3) == msg.pid // 2
        assert laws[-1] == (seed(step, SERVER), (known * present).tolist())
    assert len(seen) > 2
    draws = source(run, run.strategy.weights["generator"], 1, 0, law=torch.tensor([3.0, 0.0, 1.0]))
    frequencies = draws.labels(4000).bincount(minlength=3) / 4000
    assert frequencies[1] == 0
    assert frequencies[0] == pytest.approx(0.75, abs=0.03)


def test_a_received_generator_draws_nothing() -> None:
    """Its layers are not initialised, so the numbers for dropout are those of FedAvg.

    It is evaluated by the running statistics, which stay as they are.
    """
    tree = new_generator(3, 2, 6, 4)
    module = nn.Sequential(
        nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)
    ).eval()
    module.load_state_dict({name.removeprefix("layers."): t for name, t in tree.items()})
    noise, y = torch.randn(7, 3), torch.arange(7) % 2
    before, copies = torch.get_rng_state(), {name: t.clone() for name, t in tree.items()}
    z = generate(tree, noise, y)
    assert torch.equal(before, torch.get_rng_state())
    assert not z.requires_grad
    assert all(torch.equal(t, copies[name]) for name, t in tree.items())
    inputs = torch.cat([noise, nn.functional.one_hot(y, 2).float()], 1)
    assert torch.equal(z, module(inputs).detach())
