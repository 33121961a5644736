"""Every method alone and with every plug-in, as conf/ lists them.

A new file in conf/method or conf/plugin is tested without a new test.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import composed
from contracts.short import STATED, shortened
from omegaconf import OmegaConf

from fedhet.core import trees
from fedhet.core.errors import ConfigError
from fedhet.data.toy import toy_task
from fedhet.runs import config
from fedhet.runs.cli import help as cli_help
from fedhet.runs.config import Config, catalogue
from fedhet.runs.config.instantiation import find_target
from fedhet.runs.job import Job
from fedhet.testing import Apart, check_choice, run_quietly

METHODS = catalogue.choices("method")
PLUGINS = catalogue.choices("plugin")
# Method -> the plug-ins that it refuses, each with its default options.
REFUSED = {
    "feddiskab": {"feddisk"},
    "feddyn": {"fednorm"},
    "fedpcl": {"drift", "fedlex", "fednorm", "fedntd", "fedprox", "moon"},
    "fedproto": {"drift", "fedlex", "fednorm", "fedntd", "fedprox", "moon"},
    "fedsa": {"fednorm"},
    "local": {"drift", "fedlex", "fednorm", "fedntd", "fedprox", "moon"},
    "pooled": set(PLUGINS),
    "fedsgd": {"drift", "fedntd", "fedprox"},
    "scaffold": {"fedlex"},
}
HOSTS = {"fedavg", "fedala", "fedsgd"}  # of these each plug-in meets one, or is refused


@cache
def listed() -> tuple[list[tuple[str, str, str | None]], str]:
    """What `refusal` says of each pair, and what was logged meanwhile.

    Every pair is built, so this is done once for all tests.
    """
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    log = logging.getLogger("fedhet")
    log.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(config, "compose", lambda lines: composed(*lines))
            pairs = itertools.product(METHODS, PLUGINS)
            rows = [(*pair, cli_help.refusal(*pair)) for pair in pairs]
            return rows, logged.getvalue()
    finally:
        log.removeHandler(handler)


def refusals() -> dict[tuple[str, str], str]:
    """(method, plug-in) -> why they cannot be combined."""
    rows, _ = listed()
    return {(method, plugin): reason for method, plugin, reason in rows if reason is not None}


def pairs() -> Iterator[Any]:
    """Every method alone and with each plug-in.

    Two kinds of pairs run in the matrix only: those of a method that presets a plug-in or a server
    optimiser, since it runs other methods' classes, and every second one of the others. So each
    method and each plug-in still meets half of the other side; those of a few hosts are not slow.
    """
    for i, method in enumerate(METHODS):
        preset = OmegaConf.load(catalogue.CONF / "method" / f"{method}.yaml").get("defaults")
        yield pytest.param(method, None)
        for j, plugin in enumerate(PLUGINS):
            marks = [] if method in HOSTS else [pytest.mark.slow]
            if preset or (i + j) % 2:
                marks = [pytest.mark.matrix]
            yield pytest.param(method, plugin, marks=marks)


@pytest.fixture(scope="module")
def refused() -> dict[tuple[str, str], str]:
    """(method, plug-in) -> why they cannot be combined."""
    return refusals()


@pytest.mark.parametrize(("method", "plugin"), list(pairs()))
def test_runs(
    method: str, plugin: str | None, refused: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    """Two rounds on toy data are finite and repeatable.

    The bytes are the same when nothing but messages and states passes between rounds.
    """
    settings = shortened(method, plugin)
    task = toy_task()
    if plugin and (method, plugin) in refused:
        with pytest.raises(ConfigError, match="refuses"):
            run_quietly(settings, tmp_path / "refused", task)
        return
    done = run_quietly(settings, tmp_path / "run", task)
    assert done.summary["status"] == "ok"
    assert done.summary["failures"] == []
    assert done.summary["phases"][-1] == {"name": "train", "rounds": 2}
    assert trees.first_nonfinite(done.weights) is None
    fresh = Job(settings, task).strategy
    if "global" in fresh.evaluates:
        assert math.isfinite(done.summary["loss"])
    else:
        assert done.summary["loss"] is None
    initial = fresh.workspace.initial
    moved = any(not torch.equal(initial[name], t) for name, t in done.weights.items())
    assert moved is bool(fresh.workspace.shared)
    changed = trees.sha256(fresh.weights) != done.summary["weights_sha256"]
    assert changed is (moved or len(fresh.weights) > 1)

    apart = Apart(settings, task, tmp_path / "state").run()
    assert trees.sha256(apart.strategy.weights) == done.summary["weights_sha256"]
    apart.check_states()


def test_what_does_not_compose(refused: dict[tuple[str, str], str]) -> None:
    stated = {(method, plugin) for method in REFUSED for plugin in REFUSED[method]}
    assert {(method, plugin) for method, plugin in refused if method in STATED} == stated


@pytest.mark.usefixtures("refused")
def test_every_pair_is_listed_and_nothing_is_logged() -> None:
    """`--list` says of each pair what building it says. FedDiskAb's warning belongs to a run."""
    rows, logged = listed()
    assert cli_help.compatibility() == rows
    assert logged == ""


@pytest.mark.parametrize("group", ["method", "plugin", "server_opt", "merge"])
def test_the_file_and_the_class_say_the_same(group: str) -> None:
    offenders = []
    for name in catalogue.choices(group):
        try:
            check_choice(group, name)
        except AssertionError as error:
            offenders.append(f"{name}: {error}")
    assert not offenders


def test_a_method_is_named_as_its_file_or_defined_by_a_server_optimiser(
    methods: dict[str, Config],
) -> None:
    offenders = []
    for name, settings in methods.items():
        cls = find_target(settings.cfg.method)
        plugins = [plugin.name for plugin in Job(settings, toy_task()).plugins]
        if not (
            (cls.name == name or settings.choices["server_opt"] == name)
            and plugins == list(settings.plugins)
        ):
            offenders.append(name)
    assert not offenders
