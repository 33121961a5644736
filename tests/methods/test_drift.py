"""The plug-in that measures client drift."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedhet.core.errors import ConfigError
from fedhet.core.groups import LocalSettings
from fedhet.core.kernel import Message, Step, Update
from fedhet.data.toy import toy_task
from fedhet.methods.drift import DriftPlugin
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedsgd import FedSGD

OLD = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([[2.0]])}
SENT = {
    4: {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])},
    1: {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([[0.0]])},
}


def measured(new: dict[str, torch.Tensor], sample: int = 0) -> dict[str, Any]:
    local = LocalSettings(lr=0.1)
    workspace: Any = SimpleNamespace(seed=3)
    step = Step(workspace=workspace, phase="train", number=1, round=1, local=local)
    updates = [
        Update(pid, 1, 1.0, w, w, {}, {}, Message("train", 1, 1, pid, local, OLD))
        for pid, w in SENT.items()
    ]
    merged = DriftPlugin(sample=sample).after(step, {}, OLD, new, updates)
    assert merged.weights is new and merged.state == {} and not merged.slots
    return dict(merged.metrics)


def test_the_measures_by_hand() -> None:
    """Two models, (3, 0, 4) and (1, 0, 0), their mean (2, 0, 2), and the merged (0, 0, 2)."""
    recorded = measured({"a": torch.zeros(2), "b": torch.tensor([[2.0]])})
    assert recorded["pids"].tolist() == [4, 1]
    assert recorded["similarity"].tolist() == pytest.approx([0.8, 0.0])
    assert recorded["distance"].tolist() == pytest.approx([13**0.5, 5**0.5])
    # Both lie sqrt(5) from their mean, whose norm is sqrt(8).
    assert recorded["dispersion"] == pytest.approx((5 / 8) ** 0.5)
    # The changes are (2, 0, 2) and (0, 0, -2): the clients' variances are 1, 0 and 4.
    assert recorded["change_variance"] == pytest.approx(5 / 3)


def test_a_sample_holds_the_same_parameters_of_all() -> None:
    new = {"a": torch.tensor([7.0, 8.0]), "b": torch.tensor([[9.0]])}
    recorded = measured(new, sample=2)
    columns = {7.0: [3.0, 1.0], 8.0: [0.0, 0.0], 9.0: [4.0, 0.0]}  # of each entry of `new`
    assert len(set(recorded["merged"].tolist())) == 2
    for entry, column in zip(
        recorded["merged"].tolist(), recorded["clients"].T.tolist(), strict=True
    ):
        assert column == columns[entry]
    assert torch.equal(measured(new, sample=2)["merged"], recorded["merged"])
    assert len(measured(new, sample=100)["merged"]) == 3  # there are no more


def test_it_changes_nothing(federation: Callable[..., Any]) -> None:
    task = toy_task(norm=True)
    plain = federation(task, FedAvg, rounds=2).run()
    watched = federation(task, FedAvg, rounds=2, plugins=lambda: [DriftPlugin(sample=4)]).run()
    assert watched.sha256 == plain.sha256


def test_gradients_are_refused(federation: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"compares .*models .*clients send none"):
        federation(toy_task(), FedSGD, plugins=lambda: [DriftPlugin()])
