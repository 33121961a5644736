"""A node composes a run with the pieces of its own machine, and says which one it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asking import answered
from flwr.app import ConfigRecord, Context, Message, RecordDict
from own.conftest import forget

from fedhet.core.errors import ConfigError
from fedhet.flower import apps
from fedhet.flower.apps import client_for, strategy_of
from fedhet.flower.grid import ASKS, RAISED
from fedhet.runs.stores import MemoryStore


def context(overrides: str, **run_config: Any) -> Context:
    """What Flower gives to an app of the first of three nodes."""
    node = {"partition-id": 0, "num-partitions": 3}
    config = {"overrides": overrides, **run_config}
    return Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=config)


def answer(overrides: str, **run_config: Any) -> str:
    """What the node says to a message of the run, and to the question who it is."""

    def app(message: Message, context: Context) -> Message:
        return apps.answer(message, context, lambda: client_for(context, MemoryStore()))

    given = context(overrides, **run_config)
    replies = [
        answered(RecordDict(records), given, app) for records in ({}, {ASKS: ConfigRecord()})
    ]
    assert {reply.error.code for reply in replies} == {RAISED}
    (reason,) = {str(reply.error.reason) for reply in replies}
    return reason


@pytest.mark.parametrize(
    ("line", "piece"),
    [
        ("method=dynreg method.alpha=.1", "unknown method 'dynreg'"),
        ("plugin=[mine]", "unknown plugin 'mine'"),
        ("model=mine", "unknown model 'mine'"),
    ],
)
def test_a_lacking_piece_is_named_with_the_way_to_install_it(
    caplog: pytest.LogCaptureFixture, line: str, piece: str
) -> None:
    cause = answer(line)
    assert f"its node cannot serve this run: ConfigError: {piece}" in cause
    assert "FEDHET_CONF" in cause and "FEDHET_TRUST" in cause
    assert piece in caplog.messages[0]
    assert caplog.records[0].exc_info is None
    with pytest.raises(ConfigError, match=f"{piece}.*FEDHET_CONF"):
        strategy_of(context(line))


def test_a_lacking_class_or_dependency_is_named_too(
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    conf = tmp_path / "conf" / "method"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text("_target_: lacking_pkg.Mine\n")
    monkeypatch.setenv("FEDHET_CONF", str(conf.parent))
    assert "lacking_pkg.Mine " in answer("method=mine")
    monkeypatch.setenv("FEDHET_TRUST", "lacking_pkg")
    assert "package lacking_pkg " in answer("method=mine seed=1")
    forget(monkeypatch, "lacking_pkg")
    (site / "lacking_pkg.py").write_text("import not_installed\n")
    assert "ModuleNotFoundError" in answer("method=mine seed=2")
    assert "No module named 'not_installed'" in caplog.text


@pytest.mark.parametrize("setting", ["FEDHET_CONF", "config-dir", "searchpath", "hydra.searchpath"])
def test_a_run_config_names_no_folder(tmp_path: Path, setting: str) -> None:
    """Only the key `overrides` is read, and it cannot name one."""
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "sent.yaml").write_text("_target_: fedhet.methods.fedavg.FedAvg\n")
    found = answer("method=sent", **{setting: str(tmp_path)})
    assert "unknown method 'sent'" in found
    refused = answer(f"hydra.searchpath=[file://{tmp_path}] method=fedavg")
    assert "--config-dir" in refused and "FEDHET_CONF" in refused
    with pytest.raises(ConfigError, match=r"--config-dir.*FEDHET_CONF"):
        strategy_of(context(f"hydra.searchpath=[file://{tmp_path}]"))
    assert "cannot read" in answer(f"--config-dir={tmp_path} method=fedavg")


@pytest.mark.usefixtures("installed")
def test_a_node_that_has_the_piece_serves_it() -> None:
    client = client_for(context("method=dynreg partition.clients=3"), MemoryStore())
    assert type(client.method).__name__ == "DynReg"
