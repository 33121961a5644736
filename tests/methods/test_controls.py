"""SCAFFOLD's server and clients keep one invariant between them, at partial participation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold
from fedhet.plugin import Plugin

CLIENTS = 6


def controls(run: Any) -> list[dict[str, Tensor]]:
    """c_i of every client, from what the clients keep; zero where a client has not taken part."""
    out = []
    for pid in range(CLIENTS):
        kept = run.store.load(pid, run.strategy.versions.get(pid, 0)) or {}
        out.append(
            {
                name: kept.get(f"scaffold.c_i/{name}", torch.zeros_like(t)).double()
                for name, t in run.model.items()
            }
        )
    return out


@pytest.mark.parametrize(
    "plugins", [list, lambda: [FedNormPlugin(temperature=0.005)]], ids=["alone", "fednorm"]
)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
def test_c_is_the_mean_of_all_controls(
    federation: Callable[..., Any], plugins: Callable[[], list[Plugin]], norm: bool
) -> None:
    """Under lambda_j = R w_j of client j's last participation where FedNorm sets the weights, else
    lambda = 1.

    The rate decays: the server recovers each control with the rate of the step that made it.
    """
    run = federation(
        toy_task(CLIENTS, norm=norm),
        Scaffold,
        plugins=plugins,
        rounds=8,
        fraction=0.5,
        epochs=2,
        lr_decay=0.7,
    )
    share = torch.ones(CLIENTS, dtype=torch.float64)
    for _ in range(7):
        run.step()
        for plugin in run.strategy.plugins:
            found = plugin.report
            share[found["pids"]] = found["weights"] * len(found["pids"])
    sent = run.strategy.plan(8)[0].extras["scaffold.c"]
    trained = [name for name, _ in run.site.model.named_parameters()]
    assert list(sent) == trained  # controls are for parameters, never for buffers
    assert len(run.strategy.versions) == CLIENTS  # all have taken part, each in some rounds only
    assert bool(run.strategy.plugins) == (float(share.std()) > 1e-3)
    own = controls(run)
    for name in sent:
        expected = sum(s * c[name] for s, c in zip(share, own, strict=True)) / share.sum()
        torch.testing.assert_close(sent[name].double(), expected, rtol=1e-5, atol=1e-7)
    assert max(float(t.abs().max()) for t in sent.values()) > 1e-3


@pytest.mark.parametrize(
    ("key", "value"),
    [("momentum", 0.9), ("weight_decay", 0.1), ("clip", 1.0), ("optimizer", "adam")],
)
def test_other_than_plain_sgd_is_refused(
    federation: Callable[..., Any], key: str, value: Any
) -> None:
    from fedhet.messages import LocalSettings

    with pytest.raises(ConfigError, match=rf"client\.{key}={value}.*plain SGD"):
        run = federation(toy_task(), Scaffold)
        run.strategy.setting.local = LocalSettings(lr=0.1, **{key: value})
        Scaffold(run.strategy.setting)


@pytest.mark.parametrize(
    "options", [{"lr_g": 0}, {"lr_g": float("nan")}, {"control_weights": "mean"}]
)
def test_bad_options_are_named(federation: Callable[..., Any], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{next(iter(options))}="):
        federation(toy_task(), Scaffold, options=options)
