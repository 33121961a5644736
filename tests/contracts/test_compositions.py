"""Every method alone and with every plug-in, as conf/ lists them.

A new file in conf/method or conf/plugin is tested without a new test.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import composed
from contracts.short import shortened
from omegaconf import OmegaConf

from fedhet import config, trees
from fedhet.cli.compatibility import compatibility
from fedhet.config import Config, catalogue
from fedhet.config.targets import find_target
from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError
from fedhet.flower import wire
from fedhet.job import Job, run_job
from fedhet.messages import Broadcast, Update
from fedhet.phases import locate
from fedhet.state import DiskStore
from fedhet.task import Task
from fedhet.trees import Tree

METHODS = catalogue.choices("method")
PLUGINS = catalogue.choices("plugin")


@cache
def listed() -> tuple[list[tuple[str, str, str | None]], str]:
    """The rows that `python -m fedhet --list` prints, and what was logged meanwhile.

    Every pair is built, so this is done once for all tests.
    """
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    log = logging.getLogger("fedhet")
    log.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(config, "compose", lambda lines: composed(*lines))
            return compatibility(), logged.getvalue()
    finally:
        log.removeHandler(handler)


def refusals() -> dict[tuple[str, str], str]:
    """(method, plug-in) -> why they cannot be combined."""
    rows, _ = listed()
    return {(method, plugin): reason for method, plugin, reason in rows if reason is not None}


def run(settings: Config, folder: Path, task: Task) -> Any:
    """Run without output on the terminal."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run_job(replace(settings, run_dir=str(folder)), task)


def digest(msg: Broadcast | Update) -> str:
    """A hash of every tensor of a message."""
    tensors: dict[str, Tree] = {"weights": msg.weights}
    for name, value in msg.extras.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = {"": value}
        elif isinstance(value, dict):
            tensors[name] = value
    return trees.sha256(tensors)


class Apart:
    """Serves every message as if by a new process.

    Clients share nothing but bytes on the wire and states on disk.
    """

    def __init__(self, settings: Config, task: Task, folder: Path) -> None:
        self.settings = settings
        self.task = task
        self.store = DiskStore(folder)
        self.strategy = Job(settings, task).strategy

    def answers(self, plan: list[Broadcast]) -> Iterator[Any]:
        for msg in plan:
            before = digest(msg)
            arrays, carried = wire.write_broadcast(msg)
            received = wire.read_broadcast([array.copy() for array in arrays], carried)
            reply = Job(self.settings, self.task).client(self.store).handle(received)
            assert isinstance(reply, Update), reply
            assert digest(received) == before == digest(msg), "a client changed what it was sent"
            yield wire.read_reply(msg, wire.reply_arrays(reply))

    def run(self) -> Apart:
        number = 0
        while locate(self.strategy.timetable, number + 1):
            number += 1
            self.strategy.settle(self.answers(self.strategy.plan(number)))
        return self


def pairs() -> Iterator[Any]:
    """Every method alone and with each plug-in.

    Two kinds of pairs run in the matrix only: those of a method that presets a plug-in or a server
    optimiser, since it runs other methods' classes, and every second one of the others. So each
    method and each plug-in still meets half of the other side.
    """
    for i, method in enumerate(METHODS):
        preset = OmegaConf.load(catalogue.CONF / "method" / f"{method}.yaml").get("defaults")
        yield pytest.param(method, None)
        for j, plugin in enumerate(PLUGINS):
            marks = [pytest.mark.matrix] if preset or (i + j) % 2 else []
            yield pytest.param(method, plugin, marks=marks)


@pytest.mark.parametrize(("method", "plugin"), list(pairs()))
def test_runs(
    method: str, plugin: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds on toy data are finite and repeatable.

    The bytes are the same when nothing but messages and states passes between rounds.
    """
    monkeypatch.setattr("fedhet.record.figures.draw", lambda *args: [])
    settings = shortened(method, plugin)
    task = toy_task()
    if plugin and (method, plugin) in refusals():
        with pytest.raises(ConfigError, match="refuses"):
            run(settings, tmp_path / "refused", task)
        return
    done = run(settings, tmp_path / "run", task)
    assert done.summary["status"] == "ok"
    assert done.summary["failures"] == []
    assert done.summary["phases"][-1] == {"name": "train", "rounds": 2}
    assert trees.first_nonfinite(done.weights) is None
    fresh = Job(settings, task).strategy
    if "global" in fresh.evaluates:
        assert math.isfinite(done.summary["loss"])
    else:
        assert done.summary["loss"] is None
    initial = fresh.site.initial
    moved = any(not torch.equal(initial[name], t) for name, t in done.weights.items())
    assert moved is bool(fresh.site.shared)
    assert trees.sha256(fresh.weights) != done.summary["weights_sha256"]

    apart = Apart(settings, task, tmp_path / "state").run()
    assert trees.sha256(apart.strategy.weights) == done.summary["weights_sha256"]
    for pid, version in apart.strategy.versions.items():
        state = apart.store.load(pid, version)
        assert state and trees.first_nonfinite(state) is None


def test_every_pair_is_listed_and_nothing_is_logged() -> None:
    """FedDiskAb's warning belongs to a run."""
    rows, logged = listed()
    every = {(method, plugin) for method in METHODS for plugin in PLUGINS}
    assert {(method, plugin) for method, plugin, _ in rows} == every
    assert logged == ""


@pytest.mark.parametrize(
    ("group", "name"),
    [(g, name) for g in ("method", "plugin", "server_opt") for name in catalogue.choices(g)],
)
def test_yaml_keys_are_the_constructors_options(group: str, name: str) -> None:
    """The yaml shows every option with the constructor's default, and nothing else.

    All options are keyword-only.
    """
    node = OmegaConf.load(catalogue.CONF / group / f"{name}.yaml")
    node = node.get(group, node)  # a file that also presets other groups' settings
    if node._target_ is None:
        return
    options = OmegaConf.to_container(node)
    assert isinstance(options, dict)
    options.pop("_target_")
    options.pop("defaults", None)
    parameters = dict(inspect.signature(find_target(node)).parameters)
    parameters.pop("setting", None)
    assert set(options) == set(parameters)
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    if group != "server_opt":  # one class serves several of its files, with defaults of their own
        assert options == {key: parameter.default for key, parameter in parameters.items()}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_named_as_its_file_or_defined_by_a_server_optimiser(name: str) -> None:
    settings = shortened(name, None)
    cls = find_target(settings.cfg.method)
    assert cls.name == name or settings.choices["server_opt"] == name
    assert cls.client_cls is not None
    plugins = Job(settings, toy_task()).plugins()
    assert [plugin.name for plugin in plugins] == list(settings.plugins)


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_is_named_as_its_file_and_reports_its_settings(name: str) -> None:
    """A server and a client with other settings notice it only if the digest sees every option."""
    settings = shortened("fedavg", name)
    plugin = Job(settings, toy_task()).plugins()[0]
    assert plugin.name == name
    assert set(plugin.settings) == {key for key in settings.cfg.plugin[name] if key != "_target_"}
