"""privacy.min_count in whole runs: it reaches the clients of every engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import packed_message

import fedhet
from fedhet.core.errors import ConfigError
from fedhet.core.limits import FLOOR
from fedhet.core.messages import Broadcast, Reply, Upload
from fedhet.flower import wire
from fedhet.testing import sha256, sha256_apart

CANARY = "canary-9d04b1"
# Most clients have fewer than five samples of most classes.
RUN = ["partition.clients=12", "partition.alpha=.1", "rounds=1", "client.epochs=1"]
FEDGEN = [f"method.{name}=4" for name in ("noise_dim", "hidden", "server_steps")]
FEDDISK = ["plugin.feddisk.made_max_rounds=1", "plugin.feddisk.local_max_epochs=1"]
FEDNORM = ["partition.min_size=2", "partition.clients=25"]
METHODS = {
    "fedpcl": [],
    "fedproto": [],
    "fedgmm": [],
    "fednorm": FEDNORM,
    "fedgen": FEDGEN,
    "feddisk": FEDDISK,
}
SMALL = ["method=fedpcl", "partition.clients=4", "rounds=1", "client.epochs=1"]


@pytest.fixture(scope="module")
def five() -> str:
    """The bytes of the small run, whose number of samples is the default, 5."""
    return sha256(*SMALL)


def test_the_number_reaches_the_clients_of_every_engine(five: str) -> None:
    assert sha256(*SMALL, "engine.workers=2") == sha256_apart(*SMALL) == five
    assert sha256(*SMALL, "privacy.min_count=0") != five


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_equal_bytes_with_and_without_shared_memory(method: str) -> None:
    run = [f"method={method}", *RUN, *METHODS[method]]
    default = sha256(*run)
    assert default == sha256(*run, "engine.workers=2") == sha256_apart(*run)
    assert default != sha256(*run, "privacy.min_count=0")


def test_a_machine_s_floor_reaches_its_clients(five: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twelve = sha256(*SMALL, "privacy.min_count=12")
    assert five != twelve
    monkeypatch.setenv(FLOOR, "12")
    assert sha256(*SMALL) == sha256_apart(*SMALL, "privacy.min_count=0") == twelve
    monkeypatch.setenv(FLOOR, "3")
    assert sha256(*SMALL, "privacy.min_count=12") == twelve


# ---- secrets
def test_the_environment_is_in_no_message_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """tests/config/test_sent_runs.py shows that no setting refers to it."""
    monkeypatch.setenv("FEDHET_CANARY", CANARY)
    messages: list[Any] = []
    handle = fedhet.core.client.client.FedClient.handle

    def look(self: Any, msg: Broadcast) -> Reply:
        reply = handle(self, msg)
        assert isinstance(reply, Upload)
        messages.extend([packed_message(msg), wire.reply_arrays(msg, reply)])
        return reply

    monkeypatch.setattr(fedhet.core.client.client.FedClient, "handle", look)
    folder = tmp_path / "run"
    lines = ["method=fedpcl", "rounds=1", "partition.clients=3", f"hydra.run.dir={folder}"]
    with pytest.raises(ConfigError, match=r"oc\.env:FEDHET_CANARY.*value itself"):
        fedhet.run([*lines, "data_dir='${oc.env:FEDHET_CANARY}'"])
    assert not folder.exists()
    run = fedhet.run([*lines, "tracker=tensorboard", "data_dir=visible-5a10"])
    written = capfd.readouterr()
    assert CANARY not in written.out + written.err
    # Three clients collect, train, evaluate, and send their personal models.
    assert len(messages) == 2 * 3 * 4
    assert CANARY not in str(messages)
    holding = {
        path.name
        for path in Path(run.dir).rglob("*")
        if path.is_file() and CANARY.encode() in path.read_bytes()
    }
    assert not holding
    assert "visible-5a10" in (run.dir / "config.yaml").read_text()


@pytest.mark.matrix
def test_the_environment_is_in_no_log_and_no_file_under_flwr(
    launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The nodes and the server app have the variable too. A setting may not refer to it there."""
    monkeypatch.setenv("FEDHET_CANARY", CANARY)
    lines = ["method=fedavg", "rounds=1", "partition.clients=3", "engine=flwr", "engine.workers=2"]
    with pytest.raises(ConfigError, match=r"oc\.env:FEDHET_CANARY.*value itself"):
        launch(*lines, "data_dir='${oc.env:FEDHET_CANARY}'")
    run = launch(*lines, "data_dir=visible-5a10")
    written = capfd.readouterr()
    assert "fedhet: run folder" in written.err
    files = [path.read_bytes() for path in Path(run.dir).rglob("*") if path.is_file()]
    assert any(b"visible-5a10" in content for content in files)
    for content in (*files, written.out.encode(), written.err.encode()):
        assert CANARY.encode() not in content
