"""A node needs the class of a piece, not its file, and says which one it lacks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asking import answered
from flwr.app import ConfigRecord, Context, Message, RecordDict
from own.conftest import forget

from fedhet.core.errors import ConfigError
from fedhet.flower import apps
from fedhet.flower.apps import client_for, strategy_of
from fedhet.flower.transport import ASKS, RAISED, settings_records
from fedhet.runs.config import compose
from fedhet.runs.stores import MemoryStore


def context(**run_config: Any) -> Context:
    """What Flower gives to an app of the first of three nodes."""
    node = {"partition-id": 0, "num-partitions": 3}
    return Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=run_config)


def answer(records: Any) -> str:
    """What the node says to a message of the run, and to the question who it is."""

    def app(message: Message, context: Context) -> Message:
        return apps.answer(message, context, lambda: client_for(message, context, MemoryStore()))

    apps._read.cache_clear()
    replies = [
        answered(RecordDict({**records, **more}), context(), app)
        for more in ({}, {ASKS: ConfigRecord()})
    ]
    assert {reply.error.code for reply in replies} == {RAISED}
    (reason,) = {str(reply.error.reason) for reply in replies}
    return reason


def test_a_lacking_class_or_dependency_is_named(
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    conf = tmp_path / "conf" / "method"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text("_target_: lacking_pkg.Mine\n")
    (site / "lacking_pkg.py").write_text("class Mine: pass\n")
    with monkeypatch.context() as server:
        server.setenv("FEDHET_CONF", str(conf.parent))
        server.setenv("FEDHET_TRUST", "lacking_pkg")
        records = settings_records(compose(["method=mine"]))
    (site / "lacking_pkg.py").unlink()
    cause = answer(records)
    assert "its node cannot serve this run: ConfigError: method._target_=lacking_pkg.Mine" in cause
    assert "is not trusted" in cause and "FEDHET_TRUST" in cause
    assert caplog.records[0].exc_info is None
    monkeypatch.setenv("FEDHET_TRUST", "lacking_pkg")
    forget(monkeypatch, "lacking_pkg")
    assert "finds no package lacking_pkg on this machine" in answer(records)
    (site / "lacking_pkg.py").write_text("import not_installed\n")
    assert "ModuleNotFoundError; the log on that node" in answer(records)
    assert "No module named 'not_installed'" in caplog.text


@pytest.mark.parametrize("setting", ["FEDHET_CONF", "config-dir", "searchpath", "hydra.searchpath"])
def test_a_run_config_names_no_folder(tmp_path: Path, setting: str) -> None:
    """Only the key `overrides` is read, and it cannot name one."""
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "sent.yaml").write_text("_target_: fedhet.methods.fedavg.FedAvg\n")
    for overrides, problem in (
        ("method=sent", "unknown method 'sent'"),
        (f"hydra.searchpath=[file://{tmp_path}]", "run .*name folders"),
        (f"--config-dir={tmp_path} method=fedavg", "read"),
    ):
        with pytest.raises(ConfigError, match=problem):
            strategy_of(context(overrides=overrides, **{setting: str(tmp_path)}))


def test_a_node_that_has_the_class_serves_it(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = compose(["method=dynreg", "partition.clients=3"])
    message: Any = SimpleNamespace(content=RecordDict(settings_records(settings)))
    client: Any = client_for(message, context(), MemoryStore())
    assert type(client.client.method).__name__ == "DynReg"
