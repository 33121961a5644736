"""FedLEx: bad deviations, bad options, and methods that cannot be masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError, RunFailed
from fedhet.messages import Broadcast, Update
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedlex import D, FedLExPlugin
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.scaffold import Scaffold

Make = Callable[..., Any]
Change = Callable[[Update], Any]


def damaged(pid: int, change: Change) -> Callable[[list[Broadcast], list[Any]], list[Any]]:
    """Change the deviation that one client sends."""

    def alter(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        for reply in replies:
            if reply.pid == pid and D in reply.extras:
                change(reply)
        return replies

    return alter


BAD: dict[str, tuple[Change, str]] = {
    "nan": (lambda u: u.extras[D]["head.bias"].fill_(float("nan")), "head.bias.*NaN or infinite"),
    "negative": (lambda u: u.extras[D]["head.bias"][1:].fill_(-1e-9), r"head.bias.*negative.*>= 0"),
    "dtype": (
        lambda u: u.extras[D].update({"head.bias": torch.zeros(2, dtype=torch.float64)}),
        r"head.bias.*float64.*expected.*float32",
    ),
    "shape": (
        lambda u: u.extras[D].update({"head.bias": torch.zeros(3)}),
        r"head.bias.*\(3,\); expected.*\(2,\)",
    ),
    "lacking": (lambda u: u.extras[D].pop("head.bias"), "missing.*head.bias"),
    "none": (lambda u: u.extras.pop(D), f"'{D}' is missing"),
    "no tree": (lambda u: u.extras.update({D: torch.zeros(3)}), "a tree of 4 tensors is expected"),
}


@pytest.mark.parametrize(("change", "reason"), BAD.values(), ids=BAD)
def test_a_bad_deviation(federation: Make, change: Change, reason: str) -> None:
    def plugins() -> list[FedLExPlugin]:
        return [FedLExPlugin(e_exp=2)]

    failure = rf"client 2 failed in phase 'fedlex.explore', step 1: .*{reason}"
    with pytest.raises(RunFailed, match=failure):
        federation(toy_task(), FedAvg, plugins=plugins).step(damaged(2, change))
    run = federation(toy_task(), FedAvg, plugins=plugins, on_failure="skip", rounds=2)
    run.step(damaged(2, change))
    assert [(f.pid, f.phase) for f in run.strategy.current.failures] == [(2, "fedlex.explore")]
    run.step()
    assert run.strategy.reports()["fedlex"]["pids"].tolist() == [3, 1, 0]


def test_a_diverged_exploration_names_its_client(federation: Make) -> None:
    failure = r"client 3 failed in phase 'fedlex.explore', step 1: ValueError: .*tensor '.*diverged"
    with pytest.raises(RunFailed, match=failure):
        federation(toy_task(), FedAvg, plugins=lambda: [FedLExPlugin(e_exp=2)], lr=1e30).step()


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"c_exp": 0}, ">= 1"),
        ({"c_exp": 1.5}, "<= 1"),
        ({"c_exp": 0.0}, "> 0"),
        ({"c_exp": True}, "whole number"),
        ({"e_exp": 0}, ">= 1"),
        ({"patience": 0}, "null"),
        ({"scope": "layer"}, "tensor, model"),
        ({"order": "x"}, "normalise_then_mean"),
        ({"minmax": "x"}, "explorer, all"),
        ({"empty": "x"}, "previous"),
        ({"refresh": "x"}, "participants"),
        ({"apply_to": "x"}, "gradient, update"),
        ({"rescale": "x"}, "mean1"),
        ({"g_min": 1.0}, "< 1"),
    ],
    ids=str,
)
def test_bad_options_are_named(option: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"plugin\.fedlex\.{next(iter(option))}=.*{reason}"):
        FedLExPlugin(**option)


def test_refusals(federation: Make) -> None:
    refusal = "method=scaffold refuses plugin 'fedlex': it changes the steps"
    with pytest.raises(ConfigError, match=refusal):
        federation(toy_task(), Scaffold, plugins=lambda: [FedLExPlugin()])
    with pytest.raises(
        ConfigError, match="method=fedsgd refuses plugin 'fedlex': it acts on local"
    ):
        federation(toy_task(), FedSGD, plugins=lambda: [FedLExPlugin(apply_to="update")])
    federation(toy_task(), FedSGD, plugins=lambda: [FedLExPlugin()])
