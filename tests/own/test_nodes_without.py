"""A node composes a run with the pieces of its own machine, and says which one it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.common import Context, RecordDict
from own.conftest import forget

from fedhet.core.errors import ConfigError
from fedhet.core.messages import Broadcast, Failure, LocalSettings
from fedhet.flower import wire
from fedhet.flower.apps import client_for, strategy_of
from fedhet.stores import MemoryStore

MESSAGE = Broadcast(
    phase="train",
    step=1,
    round=1,
    local=LocalSettings(lr=0.1),
    pid=0,
)


def context(overrides: str, **run_config: Any) -> Context:
    """What Flower gives to an app of the first of three nodes."""
    node = {"partition-id": 0, "num-partitions": 3}
    config = {"overrides": overrides, **run_config}
    return Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=config)


def answer(overrides: str, **run_config: Any) -> Failure:
    """The node's answer to a message of the run; its properties are known in any case."""
    client = client_for(context(overrides, **run_config), MemoryStore())
    properties = client.get_properties({})
    problem = properties.pop("problem")
    assert properties == {"partition-id": 0, "num-partitions": 3}
    replies = [client.fit(*wire.write_broadcast(MESSAGE))]
    _, examples, metrics = client.evaluate(*wire.write_broadcast(MESSAGE))
    replies.append(([], examples, metrics))
    one, other = (wire.read_reply(MESSAGE, reply) for reply in replies)
    assert isinstance(one, Failure) and one == other
    assert (one.pid, one.phase, one.step) == (0, "train", 1)
    assert one.cause == problem
    return one


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
    cause = answer(line).cause
    assert f"cannot serve this run: {piece}" in cause
    assert "FEDHET_CONF" in cause and "FEDHET_TRUST" in cause
    assert cause in caplog.messages
    assert caplog.records[0].exc_info is None
    with pytest.raises(ConfigError, match=f"{piece}.*FEDHET_CONF"):
        strategy_of(context(line))


def test_a_lacking_class_or_dependency_is_named_too(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "conf" / "method"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text("_target_: lacking_pkg.Mine\n")
    monkeypatch.setenv("FEDHET_CONF", str(conf.parent))
    assert "lacking_pkg.Mine is not trusted" in answer("method=mine").cause
    monkeypatch.setenv("FEDHET_TRUST", "lacking_pkg")
    assert "finds no package lacking_pkg on this machine" in answer("method=mine seed=1").cause
    forget(monkeypatch, "lacking_pkg")
    (site / "lacking_pkg.py").write_text("import not_installed\n")
    assert "No module named 'not_installed'" in answer("method=mine seed=2").cause


@pytest.mark.parametrize("setting", ["FEDHET_CONF", "config-dir", "searchpath", "hydra.searchpath"])
def test_a_run_config_names_no_folder(tmp_path: Path, setting: str) -> None:
    """Only the key `overrides` is read, and it cannot name one."""
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "sent.yaml").write_text("_target_: fedhet.methods.fedavg.FedAvg\n")
    found = answer("method=sent", **{setting: str(tmp_path)})
    assert "unknown method 'sent'" in found.cause
    refused = answer(f"hydra.searchpath=[file://{tmp_path}] method=fedavg")
    assert "a run cannot name one" in refused.cause
    with pytest.raises(ConfigError, match="a run cannot name one"):
        strategy_of(context(f"hydra.searchpath=[file://{tmp_path}]"))
    assert "cannot read" in answer(f"--config-dir={tmp_path} method=fedavg").cause


@pytest.mark.usefixtures("installed")
def test_a_node_that_has_the_piece_serves_it() -> None:
    client = client_for(context("method=dynreg partition.clients=3"), MemoryStore())
    assert type(client.method).__name__ == "DynReg"
