"""Every method alone and with every plug-in, found in conf/: a new yaml is tested without writing a
test."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import composed
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

METHODS, PLUGINS = catalogue.choices("method"), catalogue.choices("plugin")
SETTINGS = [
    "rounds=2",
    "fraction=0.75",
    "client.epochs=2",
    "client.batch_size=5",
    "eval.every=2",
    "engine.workers=1",
    "device=cpu",
]


# The one place where long warm-ups are shortened.
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


@cache
def listed() -> tuple[list[tuple[str, str, str | None]], str]:
    """What `python -m fedhet --list` prints, once for all tests: it builds every pair. And what the
    log heard meanwhile."""
    heard = io.StringIO()
    handler, log = logging.StreamHandler(heard), logging.getLogger("fedhet")
    log.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(config, "compose", lambda lines: composed(*lines))
            return compatibility(), heard.getvalue()
    finally:
        log.removeHandler(handler)


def refusals() -> dict[tuple[str, str], str]:
    """(method, plug-in) -> why not."""
    return {
        (method, plugin): reason for method, plugin, reason in listed()[0] if reason is not None
    }


def shortened(method: str, plugin: str | None) -> Config:
    short = {line for name in (method, plugin) for line in SHORT.get(str(name), [])}
    return composed(f"method={method}", f"plugin=[{plugin or ''}]", *SETTINGS, *sorted(short))


def run(settings: Config, folder: Path, task: Task) -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run_job(replace(settings, run_dir=str(folder)), task)


def flat(msg: Broadcast | Update) -> dict[str, Tree]:
    """Every tensor of a message."""
    extras = {
        name: {"": value} if isinstance(value, torch.Tensor) else value
        for name, value in msg.extras.items()
    }
    return {
        "weights": msg.weights or {},
        **{name: value for name, value in extras.items() if isinstance(value, dict)},
    }


class Apart:
    """As if every message were served by a process of its own: nothing is shared but bytes on the
    wire and states on disk."""

    def __init__(self, settings: Config, task: Task, folder: Path) -> None:
        self.settings, self.task, self.store = settings, task, DiskStore(folder)
        self.strategy = Job(settings, task).strategy

    def answers(self, plan: list[Broadcast]) -> Iterator[Any]:
        for msg in plan:
            before = trees.sha256(flat(msg))
            arrays, carried = wire.write_broadcast(msg)
            received = wire.read_broadcast([array.copy() for array in arrays], carried)
            reply = Job(self.settings, self.task).client(self.store).handle(received)
            assert isinstance(reply, Update), reply
            assert trees.sha256(flat(received)) == before == trees.sha256(flat(msg)), (
                "a client changed what it was sent"
            )
            yield wire.read_reply(msg, wire.reply_arrays(reply))

    def run(self) -> Apart:
        number = 0
        while locate(self.strategy.timetable, number + 1):
            number += 1
            self.strategy.settle(self.answers(self.strategy.plan(number)))
        return self


def pairs() -> Iterator[Any]:
    """In the matrix: pairs of a method that only presets a plug-in or a server optimiser, which run
    other methods' classes, and every second one of the others, so that each method and each plug-in
    still meets half of the other side."""
    for i, method in enumerate(METHODS):
        preset = OmegaConf.load(catalogue.CONF / "method" / f"{method}.yaml").get("defaults")
        yield pytest.param(method, None)
        for j, plugin in enumerate(PLUGINS):
            yield pytest.param(
                method, plugin, marks=[pytest.mark.matrix] if preset or (i + j) % 2 else []
            )


@pytest.mark.parametrize(("method", "plugin"), list(pairs()))
def test_runs(
    method: str, plugin: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds on toy data: finite, repeatable, and the same bytes when nothing but messages and
    states passes between rounds."""
    monkeypatch.setattr("fedhet.record.figures.draw", lambda *args: [])
    settings, task = shortened(method, plugin), toy_task()
    if plugin and (method, plugin) in refusals():
        with pytest.raises(ConfigError, match="refuses"):
            run(settings, tmp_path / "refused", task)
        return
    done = run(settings, tmp_path / "run", task)
    assert done.summary["status"] == "ok" and done.summary["failures"] == []
    fresh = Job(settings, task).strategy
    assert trees.first_nonfinite(done.weights) is None
    assert (
        torch.isfinite(torch.tensor(done.summary["loss"]))
        if "global" in fresh.evaluates
        else done.summary["loss"] is None
    )
    assert done.summary["phases"][-1] == {"name": "train", "rounds": 2}
    moved = any(
        not torch.equal(fresh.site.initial[name], tensor) for name, tensor in done.weights.items()
    )
    assert (
        moved is bool(fresh.site.shared)
        and trees.sha256(fresh.weights) != done.summary["weights_sha256"]
    )

    apart = Apart(settings, task, tmp_path / "state").run()
    assert trees.sha256(apart.strategy.weights) == done.summary["weights_sha256"]
    for pid, version in apart.strategy.versions.items():
        kept = apart.store.load(pid, version)
        assert kept and trees.first_nonfinite(kept) is None


def test_all_that_is_listed_is_built_and_nothing_else_is_said() -> None:
    """FedDiskAb's warning belongs to a run."""
    rows, heard = listed()
    assert {(method, plugin) for method, plugin, _ in rows} == {
        (m, p) for m in METHODS for p in PLUGINS
    }
    assert heard == ""


@pytest.mark.parametrize(
    ("group", "name"),
    [(g, name) for g in ("method", "plugin", "server_opt") for name in catalogue.choices(g)],
)
def test_yaml_keys_are_the_constructors(group: str, name: str) -> None:
    """The yaml shows every option, with the constructor's default, and nothing else; all are
    keyword-only."""
    node = OmegaConf.load(catalogue.CONF / group / f"{name}.yaml")
    node = node.get(group, node)  # a file that also presets other groups' settings
    if node._target_ is None:
        return
    options = {
        key: value
        for key, value in OmegaConf.to_container(node).items()
        if key not in ("_target_", "defaults")
    }
    parameters = dict(inspect.signature(find_target(node)).parameters)
    parameters.pop("setting", None)
    assert set(options) == set(parameters)
    assert all(
        parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values()
    )
    if group != "server_opt":  # one class serves several of its files, with defaults of their own
        assert options == {key: parameter.default for key, parameter in parameters.items()}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_named_as_its_file_or_defined_by_a_server_optimiser(name: str) -> None:
    settings = shortened(name, None)
    cls = find_target(settings.cfg.method)
    assert cls.name == name or settings.choices["server_opt"] == name
    assert cls.client_cls is not None and all(
        Job(settings, toy_task()).plugins()[i].name == p for i, p in enumerate(settings.plugins)
    )


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_is_named_as_its_file_and_tells_its_settings(name: str) -> None:
    """The digest must see every option, else a server and a client that differ would not notice."""
    settings = shortened("fedavg", name)
    plugin = Job(settings, toy_task()).plugins()[0]
    assert plugin.name == name
    assert set(plugin.settings) == {key for key in settings.cfg.plugin[name] if key != "_target_"}
