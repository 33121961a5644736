"""What a method or plug-in needs of a model is checked before the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedhet.core.errors import ConfigError
from fedhet.core.task import Task
from fedhet.data.toy import toy_task

Launch = Callable[..., Any]


class Net(nn.Module):
    """A body and a head, of which some may be frozen."""

    def __init__(self, *frozen: str) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).relu()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


class Bodiless(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Identity(), nn.Linear(4, 2)


class Unnamed(nn.Sequential):
    """Has neither features nor a head."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


class Classifying(nn.Module):
    """Has features that no `head` reads, as torchvision's VGG has."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.classifier = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).relu())  # type: ignore[no-any-return]


BODY, HEAD = (lambda: Net("body")), (lambda: Net("head"))
BEFORE, FROZEN = "the layers before the head", "and all of them are frozen"
OWN = "in a phase of their own"


def of(model: Callable[[], nn.Module]) -> Task:
    return replace(toy_task(), model=model)


@pytest.mark.parametrize(
    ("lines", "model", "message"),
    [
        (["method=fedrep"], BODY, f"method=fedrep .*{BEFORE}.*{FROZEN}"),
        (["method=fedrep"], HEAD, f"method=fedrep .*the head.*{FROZEN}"),
        (["method=fedrep"], Bodiless, f"method=fedrep .*{BEFORE}.* none"),
        (["method=fedrep", "method.joint=true"], BODY, f"method=fedrep .*{BEFORE}.*{FROZEN}"),
        (["method=fedbabu"], BODY, f"method=fedbabu .*{BEFORE}.*{FROZEN}"),
        (["method=fedbabu", "method.finetune=head"], HEAD, f"fine-tunes .*the head.*{FROZEN}"),
        (["method=fedpcl"], BODY, f"method=fedpcl .*{BEFORE}.*{FROZEN}"),
        (["method=fedavg"], lambda: Net("body", "head"), f"{FROZEN}.* Net .*parameter"),
        (["method=fednorm"], Unnamed, "fednorm .* Unnamed .*features.*head"),
        (["method=fednorm"], Classifying, "fednorm .* Classifying .*head"),
        (["method=fedavg", "plugin=[moon]"], Classifying, "moon .* Classifying .*head"),
    ],
)
def test_a_model_without_the_part_is_refused(
    launch: Launch, tmp_path: Path, lines: list[str], model: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(*lines, "rounds=1", task=of(model))
    assert not [*tmp_path.glob("run-*")]  # no run has begun


@pytest.mark.parametrize(
    ("lines", "model"),
    [
        (["method=fedrep", "method.head_epochs=0"], HEAD),
        (["method=fedrep", "method.joint=true"], HEAD),
        (["method=fedbabu", "method.finetune_epochs=0", "method.finetune=head"], HEAD),
        (["method=fedavg"], Classifying),
    ],
)
def test_a_model_whose_part_is_not_trained_is_allowed(
    launch: Launch, lines: list[str], model: Callable[[], nn.Module]
) -> None:
    run = launch(*lines, "rounds=1", task=of(model))
    assert run.summary["status"] == "ok"


def test_fine_tuning_leaves_frozen_layers_of_the_head(federation: Callable[..., Any]) -> None:
    from fedhet.core.server.evaluation import evaluation_messages
    from fedhet.methods.fedbabu import FedBABU

    run = federation(of(lambda: Net("head")), FedBABU, rounds=1)
    before = {name: t.clone() for name, t in run.workspace.initial.items() if "head" in name}
    run.step()
    for msg in evaluation_messages(run.strategy):
        run.client().handle(msg)
        for name, t in run.workspace.read([*before]).items():
            assert torch.equal(t, before[name])
