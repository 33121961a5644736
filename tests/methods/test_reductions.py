"""Special cases that must be another method, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhet import streams
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold
from fedhet.task import ClientData, Task

Launch = Callable[..., Any]
COMMON = [
    "seed=1",
    "rounds=3",
    "fraction=0.75",
    "client.epochs=2",
    "client.batch_size=5",
    "client.lr=0.1",
    "eval.every=3",
    "eval.clients=false",
]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["method=fedprox", "plugin.fedprox.mu=0"], ["method=fedavg"]),
        (["method=fedavgm", "server_opt.beta=0"], ["method=fedavg"]),
        (["method=fednorm"], ["method=fedavg", "plugin=[fednorm]"]),
        (["method=fedprox"], ["method=fedavg", "plugin=[fedprox]"]),
        (["method=fedavgm"], ["method=fedavg", "server_opt=fedavgm"]),
        (["method=fedadam"], ["method=fedavg", "server_opt=fedadam"]),
        (["method=fedyogi"], ["method=fedavg", "server_opt=fedyogi"]),
        (["method=fedadagrad"], ["method=fedavg", "server_opt=fedadagrad"]),
        (["method=scaffold", "plugin=[fedprox]", "plugin.fedprox.mu=0"], ["method=scaffold"]),
    ],
    ids=lambda lines: "+".join(lines),
)
def test_same_bytes(launch: Launch, one: list[str], other: list[str]) -> None:
    found, expected = (
        launch(*COMMON, *lines, task=toy_task()).summary["weights_sha256"] for lines in (one, other)
    )
    assert found == expected


def test_no_two_methods_are_the_same(launch: Launch) -> None:
    """So that the equalities above are not those of a setting that nothing reads."""
    runs = [
        ["method=fedavg"],
        ["method=fedprox"],
        ["method=fednorm"],
        ["method=scaffold"],
        ["method=fedavgm"],
        ["method=fedadam"],
        ["method=fedyogi"],
        ["method=fedadagrad"],
        ["method=fednorm", "plugin=[fedprox]"],
        ["method=scaffold", "plugin=[fednorm]"],
        ["method=fedavg", "seed=2"],
        ["method=fedavg", "client.lr=0.2"],
    ]
    hashes = [launch(*COMMON, *lines, task=toy_task()).summary["weights_sha256"] for lines in runs]
    assert len(set(hashes)) == len(runs)


@pytest.mark.parametrize(
    "local", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=["plain", "momentum"]
)
def test_one_client_is_plain_sgd(launch: Launch, local: dict[str, float]) -> None:
    """A loop of torch.optim.SGD over the same batches, a fresh one in each round, with the rate
    decayed per round."""
    rounds, epochs, size, lr, decay = 3, 2, 5, 0.1, 0.8
    task = toy_task(1)
    run = launch(
        "method=fedavg",
        f"rounds={rounds}",
        f"client.epochs={epochs}",
        f"client.batch_size={size}",
        f"client.lr={lr}",
        f"client.lr_decay={decay}",
        *(f"client.{key}={value}" for key, value in local.items()),
        "eval.clients=false",
        task=task,
    )
    with torch.random.fork_rng():
        torch.manual_seed(streams.integer(0, "init"))
        model = task.model()
    x, y = task.clients[0].train.x, task.clients[0].train.y
    for step in range(1, rounds + 1):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr * decay ** (step - 1), **local)
        draws = torch.Generator().manual_seed(streams.integer(0, "batches", "train", step, 0))
        for _ in range(epochs):
            for batch in torch.randperm(len(y), generator=draws).split(size):
                optimizer.zero_grad()
                functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    expected = model.state_dict()
    assert list(run.weights) and all(
        torch.equal(run.weights[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_first_round_of_scaffold_is_fedavg_where_clients_are_equal(
    federation: Launch, fraction: float
) -> None:
    """All controls are zero, and 1/R is n_k / sum n."""
    scaffold, fedavg = (
        federation(toy_task(equal=True), cls, rounds=2, fraction=fraction)
        for cls in (Scaffold, FedAvg)
    )
    scaffold.step()
    fedavg.step()
    assert scaffold.sha256 == fedavg.sha256
    scaffold.step()
    fedavg.step()
    assert scaffold.sha256 != fedavg.sha256


def test_scaffold_with_one_client_is_sgd(federation: Launch) -> None:
    """c = c_1, so the correction is nothing but rounding."""
    scaffold, fedavg = (federation(toy_task(1), cls, rounds=4).run() for cls in (Scaffold, FedAvg))
    for name, expected in fedavg.model.items():
        torch.testing.assert_close(scaffold.model[name], expected, rtol=1e-5, atol=1e-6)


class Inputs(nn.Module):
    """A linear model, whose features are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def features(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def identical_latents() -> Task:
    """Clients that differ in size, samples and labels, but whose inputs all have the mean (1/4,
    1/2, 3/4), exactly."""
    clients = []
    for pid in range(4):
        g = torch.Generator().manual_seed(pid)
        # dyadic: their sums round nowhere
        half = torch.randint(-16, 17, (4 + 3 * pid, 3), generator=g) / 64
        x = torch.cat([half, -half]) + torch.tensor([0.25, 0.5, 0.75])
        clients.append(ClientData((x, torch.randint(0, 2, (len(x),), generator=g))))  # type: ignore[arg-type]
    return Task(
        Inputs,
        lambda output, y: functional.cross_entropy(output, y, reduction="none"),
        clients,
        None,
        2,
    )


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
def test_identical_latents_leave_the_host_as_it_is(federation: Launch, cls: type) -> None:
    """Within one float32 ulp after a round."""
    normed = federation(identical_latents(), cls, plugins=lambda: [FedNormPlugin()])
    host = federation(identical_latents(), cls)
    normed.step()
    host.step()
    for name, expected in host.model.items():
        ulps = (normed.model[name].view(torch.int32) - expected.view(torch.int32)).abs()
        assert int(ulps.max()) <= 1, name


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
def test_fednorm_does_nothing_with_one_or_two_participants(federation: Launch, cls: type) -> None:
    for clients in (1, 2):
        normed = federation(
            toy_task(clients), cls, plugins=lambda: [FedNormPlugin(temperature=0.01)]
        )
        host = federation(toy_task(clients), cls)
        normed.step()
        host.step()
        for name, expected in host.model.items():
            assert (
                int((normed.model[name].view(torch.int32) - expected.view(torch.int32)).abs().max())
                <= 1
            ), name
