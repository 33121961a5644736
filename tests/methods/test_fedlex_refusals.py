"""FedLEx: bad deviations, bad options, and methods that cannot be masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from maths.cases import named_case

from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.messages import Broadcast, Upload
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedlex import FedLExPlugin
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.scaffold import Scaffold

Make = Callable[..., Any]
Change = Callable[[Upload], Any]

D = "fedlex.D"


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
    "negative": (lambda u: u.extras[D]["head.bias"][1:].fill_(-1e-9), r"head.bias.*-1e-09.*>= 0"),
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
    "no tree": (lambda u: u.extras.update({D: torch.zeros(3)}), "tree of 4 tensors"),
}


def test_a_bad_deviation(federation: Make) -> None:

    def plugins() -> list[FedLExPlugin]:
        return [FedLExPlugin(e_exp=2)]

    for name, (change, reason) in BAD.items():
        with named_case(name):
            failure = rf"client 2 .*'fedlex.explore', step 1: .*{reason}"
            with pytest.raises(RunFailed, match=failure):
                federation(toy_task(), FedAvg, plugins=plugins).step(damaged(2, change))
            run = federation(toy_task(), FedAvg, plugins=plugins, on_failure="skip", rounds=2)
            run.step(damaged(2, change))
            (failed,) = run.current.failures
            assert (failed.pid, failed.phase) == (2, "fedlex.explore")
            run.step()
            assert run.current.recorded["fedlex"]["pids"].tolist() == [3, 1, 0]


def test_a_diverged_exploration_names_its_client(federation: Make) -> None:
    failure = r"client 3 .*'fedlex.explore', step 1: .*tensor '.*diverged"
    with pytest.raises(RunFailed, match=failure):
        federation(toy_task(), FedAvg, plugins=lambda: [FedLExPlugin(e_exp=2)], lr=1e30).step()


def test_bad_options_are_named() -> None:
    cases = [
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
    ]
    for option, reason in cases:
        with (
            named_case(option, reason),
            pytest.raises(ConfigError, match=rf"plugin\.fedlex\.{next(iter(option))}=.*{reason}"),
        ):
            FedLExPlugin(**option)


def test_refusals(federation: Make) -> None:
    refusal = r"method=scaffold .*'fedlex': .*changes .*local steps"
    with pytest.raises(ConfigError, match=refusal):
        federation(toy_task(), Scaffold, plugins=lambda: [FedLExPlugin()])
    with pytest.raises(ConfigError, match=r"method=fedsgd .*'fedlex': .*acts .*local"):
        federation(toy_task(), FedSGD, plugins=lambda: [FedLExPlugin(apply_to="update")])
    federation(toy_task(), FedSGD, plugins=lambda: [FedLExPlugin()])
