"""Clients that train as one have the result of one after another, up to rounding.

Every method and plug-in is found in conf/: a new one is tested without a new test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from contracts.short import SHORT, slow
from contracts.test_compositions import METHODS, PLUGINS, refusals
from fused.fusing import LINES, Launch, apart, digits, groups, mlp
from torch import Tensor, nn

from fedhet.core import targets
from fedhet.core.client.context import ClientContext
from fedhet.core.kernel import Client, Message, Result, State, serves
from fedhet.core.task import ClientData, Task
from fedhet.data.federation import CropFlip
from fedhet.models import MLP

CLOSE = 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_every_method(launch: Launch, method: str) -> None:
    """Clients of unequal sizes, last batches that are smaller, and groups that are not full."""
    lines = [f"method={method}", *LINES, *SHORT.get(method, [])]
    alone = launch(*lines, task=digits())
    with groups() as counted:
        together = launch(*lines, "engine.fused=3", task=digits())
    assert apart(alone.weights, together.weights) < CLOSE
    assert together.summary["bytes"] == alone.summary["bytes"]
    assert max(n for _, n in counted) == 3


def difference(launch: Launch, lines: list[str], task: Callable[[], Task] = digits) -> float:
    """Between the weights of clients that train as one and of one after another, relative."""
    lines = [*LINES, *lines]
    alone, fused = (launch(*lines, f"engine.fused={k}", task=task()) for k in ("off", 3))
    return apart(alone.weights, fused.weights)


def moved(launch: Launch, lines: list[str], network: Callable[[], nn.Module]) -> float:
    """How far the weights move where those at the start are 1e-7 off, one client after another."""

    def perturbed() -> nn.Module:
        model = network()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 1e-7)
        return model

    runs = [launch(*LINES, *lines, task=digits(start)) for start in (network, perturbed)]
    return apart(runs[0].weights, runs[1].weights)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("method", METHODS)
def test_every_pair(launch: Launch, method: str, plugin: str) -> None:
    if (method, plugin) in refusals():
        return
    short = {line for name in (method, plugin) for line in SHORT.get(name, [])}
    lines = [f"method={method}", f"plugin=[{plugin}]", *sorted(short)]
    assert difference(launch, lines) < CLOSE


LOCAL = ["client.momentum=0.5", "client.weight_decay=0.01", "client.clip=0.3"]
ADAM = ["client=adam", "client.lr=0.01"]


@pytest.mark.parametrize(
    "lines",
    [
        ["method=fedavg", *LOCAL],
        ["method=fedavg", "client.clip=30"],  # no gradient is as long
        ["method=fedrep", "method.head_epochs=0"],
        ["method=fedbabu", "method.finetune_epochs=0"],
        ["method=fedavg", *ADAM, LOCAL[1]],
        ["method=fedgen", *SHORT["fedgen"], *ADAM, LOCAL[2]],  # takes steps by size of batch
        ["method=scaffold", *LOCAL[1:], "client.steps=7", "method.control=gradient"],
        *slow(
            ["method=fednova", "client.momentum=0.9"],
            ["method=fedlex", "plugin.fedlex.patience=2", "plugin.fedlex.e_exp=3", *ADAM],
            ["method=fedprox", *ADAM, "eval.finetune_epochs=2"],
            ["method=fedpcl", *ADAM],
            ["method=feddisk", *SHORT["feddisk"], *ADAM],
            ["method=ditto", "server_opt=fedavgm", *LOCAL],
        ),
    ],
    ids=" ".join,
)
def test_settings(launch: Launch, caplog: pytest.LogCaptureFixture, lines: list[str]) -> None:
    assert difference(launch, lines) < CLOSE
    assert "one client after another" not in caplog.text


def test_a_client_that_takes_no_step(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method may ask for no epochs; the others train as one."""

    @serves
    def idle(
        client: Client, msg: Message, state: State, ctx: ClientContext
    ) -> tuple[Result, State]:
        epochs = 0 if msg.pid == 1 else None
        return Result(ctx.fit(msg.weights, epochs=epochs).params), state

    monkeypatch.setattr(Client, "train", idle)
    with groups() as counted:
        assert difference(launch, ["method=fedavg", "fraction=1"]) < CLOSE
    assert counted["steps", 2] > 0


def test_adam_with_clipping_and_weight_decay_is_chaotic(launch: Launch) -> None:
    """It divides small numbers by small numbers: a start that is 1e-7 off ends 2e-5 away.

    So other orders of summing may end as far away, and have.
    """
    lines = ["method=fedavg", *ADAM, *LOCAL[1:]]
    assert difference(launch, lines) < 10 * moved(launch, lines, mlp)


class Convolutions(nn.Module):
    """A network that is no stack of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, 10)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@pytest.mark.parametrize("method", ["fedavg", *slow("fedgen", "fedala", "ditto", "fedntd")])
def test_convolutions(launch: Launch, method: str) -> None:
    lines = [f"method={method}", *SHORT.get(method, [])]
    assert difference(launch, lines, lambda: digits(Convolutions)) < CLOSE


@pytest.mark.parametrize("method", ["fedavg", *slow("fedgmm", "fedsgd", "fedprox")])
def test_augmentation_draws_the_numbers_of_one_after_another(launch: Launch, method: str) -> None:
    task = partial(digits, augment=CropFlip((0.0,)))
    assert difference(launch, [f"method={method}"], task) < CLOSE
    lines = [*LINES, f"method={method}"]
    augmented, plain = (launch(*lines, task=one()) for one in (task, digits))
    assert apart(augmented.weights, plain.weights) > 1e-3


@pytest.mark.parametrize("method", ["fedavg", *slow("scaffold", "fedprox", "fedala")])
def test_numbers_as_targets(launch: Launch, method: str) -> None:
    def task() -> Task:
        made = digits(lambda: MLP(shape=(1, 8, 8), classes=1, hidden=[16]))
        clients = [ClientData((c.train.x, c.train.y[:, None].float() / 9)) for c in made.clients]
        target = targets.make("number", 1)
        return replace(made, clients=clients, test=None, target="number", criterion=target.losses)

    assert difference(launch, [f"method={method}", "client.lr=0.05"], task) < CLOSE
