"""Short runs of any method with any plug-in, by their names in conf/."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from composing import composed

from fedhet.runs.config import Config

SETTINGS = [
    "rounds=2",
    "fraction=0.75",
    "client.epochs=2",
    "client.batch_size=5",
    "eval.every=2",
    "engine.workers=1",
    "device=cpu",
]
# Phases before the training and server-side training take long by default. A new method or plug-in
# that has such options gets a line here.
DENSITY = [
    f"plugin.feddisk.{key}=2" for key in ("made_max_rounds", "local_max_epochs", "clf_max_epochs")
]
GENERATOR = ["method.server_steps=2", "method.hidden=8", "method.noise_dim=4"]
SHORT = {
    "fedgen": GENERATOR,
    "fedlex": ["plugin.fedlex.e_exp=2"],
    "feddisk": DENSITY,
    "feddiskab": DENSITY,
}

# The methods whose refusals tests state one by one. A new one is taken at its word.
STATED = {
    *("ditto", "fedadagrad", "fedadam", "fedala", "fedavg", "fedavgm", "fedbabu"),
    *("fedbn", "feddisk", "feddiskab", "feddyn", "fedgen", "fedgmm", "fedlex"),
    *("fednorm", "fednova", "fedntd", "fedpcl", "fedproto", "fedprox", "fedrep"),
    *("fedrod", "fedsa", "fedsgd", "fedyogi", "local", "moon", "pooled"),
    *("scaffold", "sgdm"),
}


def slow(*cases: Any) -> list[Any]:
    """The cases, or tuples of values, as parameters of a test that are marked slow."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else [one]), marks=pytest.mark.slow)
        for one in cases
    ]


def slow_unless(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters of a test: all but some of them are marked slow."""
    return [one if one in fast else slow(one)[0] for one in values]


def shortened(method: str, plugin: str | None) -> Config:
    """The configuration of a short run."""
    short = {line for name in (method, plugin) for line in SHORT.get(str(name), [])}
    return composed(f"method={method}", f"plugin=[{plugin or ''}]", *SETTINGS, *sorted(short))
