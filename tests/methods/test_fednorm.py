"""FedNorm; tests/methods/test_scaffold.py has its rounds on SCAFFOLD."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from methods.by_hand import DATA, SIZES, Case, Weights, latents, local_sgd, mean, same
from methods.readouts import step_and_replies
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from fedhet.core.task import ClientData, Task
from fedhet.data.storage import read_tensors
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNorm, FedNormPlugin
from fedhet.methods.scaffold import Scaffold

Federation = Callable[..., Any]


def similarities(models: Sequence[Weights], cohort: Sequence[int]) -> np.ndarray:
    """Equations 3 and 4: the cosines of the mean latents, which travel in float32."""
    z = [
        latents(w, DATA[k][0]).mean(0).astype(np.float32).astype(float)
        for w, k in zip(models, cohort, strict=True)
    ]
    s = np.ones((len(z), len(z)))
    for r in range(len(z)):
        for p in range(len(z)):
            if r != p:
                s[r, p] = z[r] @ z[p] / np.sqrt(z[r] @ z[r] * (z[p] @ z[p]))
    return s


@pytest.mark.parametrize("z_when", ["after_training", "before_training"])
@pytest.mark.parametrize("temperature", [0.5, 0.05])
def test_by_hand(case: Callable[..., Case], z_when: str, temperature: float) -> None:
    """Kundalwal et al., algorithm 1 with equations 3, 4, 7 and 8; nu is FedAvg's n_k."""
    running = case(FedNorm, plugins=lambda: [FedNormPlugin(temperature=temperature, z_when=z_when)])
    for x, cohort, new in running.rounds():
        sizes = [SIZES[k] for k in cohort]
        local = [local_sgd(x, k) for k in cohort]
        s = similarities(local if z_when == "after_training" else [x] * len(cohort), cohort)
        e = [np.exp(sum(row) / temperature) for row in s]
        factors = [sum(e[q] for q in range(len(e)) if q != r) / sum(e) for r in range(len(e))]
        weights = [factor * n for factor, n in zip(factors, sizes, strict=True)]
        assert max(weights) / sum(weights) != pytest.approx(max(sizes) / sum(sizes), rel=1e-3)
        same(new, mean(local, weights))
        recorded = running.run.current.recorded["fednorm"]
        np.testing.assert_allclose(recorded["similarity"], s, rtol=1e-10)
        np.testing.assert_allclose(recorded["factors"], factors, rtol=1e-10)
        np.testing.assert_allclose(
            recorded["weights"], np.array(weights) / sum(weights), rtol=1e-10
        )
        assert recorded["pids"].tolist() == cohort
        assert recorded["weight_max"] == float(recorded["weights"].max())


@pytest.mark.parametrize(("clients", "idle"), [(2, 1), (3, 0)])
def test_rounds_in_which_it_does_nothing_are_recorded(
    launch: Callable[..., Any], clients: int, idle: int
) -> None:
    """So that the report of an experiment says it."""
    run = launch("method=fednorm", "rounds=1", "eval.clients=false", task=toy_task(clients))
    assert ("fednorm.idle" in run.rounds) == bool(idle)


def test_the_record(launch: Callable[..., Any]) -> None:
    """rounds.jsonl has the largest weight, arrays/ the rest, by participant."""
    run = launch(
        "method=fednorm", "rounds=2", "fraction=0.75", "eval.clients=false", task=toy_task()
    )
    rows = [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
    for row in rows:
        arrays = load_file(run.dir / "arrays" / f"fednorm-{row['step']}.safetensors")
        assert {name: tuple(t.shape) for name, t in arrays.items()} == {
            "similarity": (3, 3),
            "factors": (3,),
            "weights": (3,),
            "pids": (3,),
        }
        sizes = torch.tensor([12.0 + 4 * pid for pid in arrays["pids"].tolist()])
        products = arrays["factors"] * sizes  # Lambda_r n_r
        torch.testing.assert_close(arrays["weights"], products / products.sum())
        assert row["fednorm.weight_max"] == float(arrays["weights"].max())


@pytest.mark.parametrize(("clients", "times"), [(2, 1), (3, 0)])
def test_two_participants_are_logged_once(
    federation: Federation, caplog: pytest.LogCaptureFixture, clients: int, times: int
) -> None:
    """Between two participants FedNorm does nothing, in any round."""
    with caplog.at_level(logging.WARNING, "fedhet"):  # the level that a run shows
        federation(toy_task(clients), FedNorm, plugins=lambda: [FedNormPlugin()], rounds=3).run()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("fednorm: with two participants" in text for text in lines) == times


@pytest.mark.parametrize("z_when", ["after_training", "before_training"])
def test_latents_are_those_of_evaluation(federation: Federation, z_when: str) -> None:
    """They use running statistics, and neither dropout nor augmentation.

    The weights are the very ones that the client sends, or has received.
    """

    def model() -> nn.Module:
        toy = toy_task(norm=True).model()
        toy.body.append(nn.Dropout(0.5))  # type: ignore[union-attr, operator]
        return toy

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
    msg = running.strategy.plan(1).messages[0]
    update = running.client().handle(msg)
    evaluated = model().eval()
    evaluated.load_state_dict(update.weights if z_when == "after_training" else msg.weights)
    x = toy.clients[msg.pid].train.x
    expected = evaluated.features(2 * x).detach().double().mean(0)  # type: ignore[operator]
    torch.testing.assert_close(update.extras["fednorm.z"].double(), expected, rtol=1e-5, atol=1e-6)


class Inputs(nn.Module):
    """A linear model, whose features are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def features(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_a_client_that_takes_no_step_has_no_latents_of_the_last_epoch(
    federation: Federation,
) -> None:
    """A plug-in may ask for no epochs."""
    plugins = lambda: [FedNorm.requires(z_when="last_epoch")]  # noqa: E731
    _, replies = step_and_replies(federation(toy_task(), FedNorm, plugins=plugins, epochs=0))
    assert [len(reply.extras["fednorm.z"]) for reply in replies] == [0] * 4


@pytest.mark.parametrize("fused", [0, 3])
@pytest.mark.parametrize("epochs", [1, 3])
def test_latents_of_the_last_epoch_are_those_of_its_beginning_with_one_batch(
    launch: Callable[..., Any], epochs: int, fused: int
) -> None:
    """One batch sees the model as it was before its step, which one epoch less leaves behind.

    The last epoch must therefore be told from the earlier ones.
    """

    def similarity(*lines: str) -> Any:
        common = ["plugin=[fednorm]", "rounds=1", "client.batch_size=1000", "privacy.min_count=0"]
        run = launch("method=fedavg", *common, *lines, task=toy_task(3))
        return read_tensors(run.dir / "arrays" / "fednorm-1.safetensors")["similarity"]

    target = "plugin.fednorm.z_when=last_epoch"
    where = f"engine.fused={fused or 'off'}"
    before = ["plugin.fednorm.z_when=before_training"] if epochs == 1 else []
    expected = similarity(*before, f"client.epochs={max(1, epochs - 1)}")
    found = similarity(target, f"client.epochs={epochs}", where)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    other = similarity(f"client.epochs={epochs}")  # after the training
    assert float((other - expected).abs().max()) > 1e-4


def identical_latents() -> Task:
    """Clients that differ in size and labels, but whose inputs all have the mean (.25, .5, .75).

    The means are equal exactly, because the inputs are dyadic fractions, whose sums do not round.
    """
    clients = []
    for pid in range(4):
        draws = torch.Generator().manual_seed(pid)
        half = torch.randint(-16, 17, (4 + 3 * pid, 3), generator=draws) / 64
        x = torch.cat([half, -half]) + torch.tensor([0.25, 0.5, 0.75])
        y = torch.randint(0, 2, (len(x),), generator=draws)
        clients.append(ClientData((x, y)))  # type: ignore[arg-type]

    def criterion(output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output, y, reduction="none")

    return Task(Inputs, criterion, clients, None, 2)


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest difference of two float32 tensors in units in the last place."""
    return int((a.view(torch.int32) - b.view(torch.int32)).abs().max())


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
def test_identical_latents_leave_the_host_as_it_is(federation: Federation, cls: type) -> None:
    """Within one float32 ulp after a round."""
    normed = federation(identical_latents(), cls, plugins=lambda: [FedNormPlugin()])
    host = federation(identical_latents(), cls)
    normed.step()
    host.step()
    for name, expected in host.model.items():
        assert ulps(normed.model[name], expected) <= 1, name


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
def test_it_does_nothing_with_one_or_two_participants(federation: Federation, cls: type) -> None:
    for clients in (1, 2):
        normed = federation(
            toy_task(clients), cls, plugins=lambda: [FedNormPlugin(temperature=0.01)]
        )
        host = federation(toy_task(clients), cls)
        normed.step()
        host.step()
        for name, expected in host.model.items():
            assert ulps(normed.model[name], expected) <= 1, name
