"""A client checks what it receives as strictly as a server: it neither reads nor writes elsewhere,
calls nothing but a phase's method, and trains for no longer than any training needs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import packed_message
from contracts.hostile import Federation, Header

from fedhet.core.client.client import FedClient
from fedhet.core.client.context import ClientContext
from fedhet.core.errors import Rejected
from fedhet.core.kernel import Client, Message, Plugin, Result, State, serves
from fedhet.core.messages import Broadcast, Failure, LocalSettings
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.scaffold import Scaffold
from fedhet.runs import stores


def forged(msg: Broadcast, change: Callable[[Header], Any]) -> tuple[list[Any], dict[str, Any]]:
    arrays, config = packed_message(msg)
    header = json.loads(config["fedhet"])
    del header["digest"]
    change(header)
    return arrays, config | {"fedhet": json.dumps({**header, "digest": wire.seal(header)})}


def set_local(name: str, value: Any) -> Callable[[Header], Any]:
    return lambda header: header["local"].update({name: value})


def set_field(name: str, value: Any) -> Callable[[Header], Any]:
    return lambda header: header.update({name: value})


BAD_HEADERS: list[Callable[[Header], Any]] = [
    set_field("round", "../../x"),
    set_field("round", 0),
    set_field("round", True),
    set_field("step", 1.0),
    set_field("version", "../../etc/passwd"),
    set_field("version", -1),
    set_field("pid", -1),
    set_field("run_id", "../" * 10 + "ab"),
    set_field("run_id", "A" * 32),
    set_field("run_id", "a" * 32 + "\n"),
    set_field("run_id", ""),
    set_field("run_id", 7),
    lambda header: header.pop("run_id"),
    set_field("pid", 10**30),
    set_field("phase", ["train"]),
    set_field("slot", None),
    set_field("trains", 1),
    set_field("plugins", {"a": 1}),
    set_field("plugins", []),
    set_field("local", None),
    lambda header: header["local"].pop("lr"),
    set_local("more", 1),
    set_local("epochs", 10**9),
    set_local("epochs", -1),
    set_local("epochs", True),
    set_local("epochs", None),
    set_local("steps", 10**12),
    set_local("batch_size", 0),
    set_local("lr", float("nan")),
    set_local("lr", -1.0),
    set_local("lr", "1"),
    set_local("clip", "1"),
    set_local("optimizer", "lbfgs"),
    lambda header: header.pop("parts"),
    lambda header: header.pop("scalars"),
]


def test_a_bad_header_is_refused(federation: Federation) -> None:
    msg = federation(toy_task(), Scaffold).strategy.plan(1).messages[0]
    offenders = []
    for i, change in enumerate(BAD_HEADERS):
        with suppress(Rejected):
            wire.read_broadcast(*forged(msg, change))
            offenders.append(i)
    assert not offenders


def test_every_setting_of_local_training_is_read(federation: Federation) -> None:
    """The check of the settings keeps up with the settings."""
    msg = federation(toy_task(), Scaffold).strategy.plan(1).messages[0]
    for local in (
        LocalSettings(lr=0.1),
        LocalSettings(0.1, 2, 8, 0.5, 1e-4, 1.0, "adam", 7),
    ):
        msg.local = local
        received = wire.read_broadcast(*packed_message(msg)).local
        assert asdict(received) == asdict(local)


@pytest.mark.parametrize("pid", [4, 1])
def test_a_message_for_another_node(federation: Federation, pid: int) -> None:
    """The toy task has four clients; this node hosts 0 and 2."""
    run = federation(toy_task(), Scaffold)
    msg = run.strategy.plan(1).messages[0]
    place = {"partition-id": 0, "num-partitions": 2}
    client = FedClient(run.workspace, Scaffold(), [], run.store, place)
    msg.pid = pid
    reply = client.handle(msg)
    assert isinstance(reply, Failure) and f"the message is for client {pid}" in reply.cause


@pytest.mark.parametrize(
    "phase",
    [
        *(
            "fit",
            "handle",
            "receive",
            "assess",
            "__init__",
            "_training_set",
            "workspace",
            "",
            "a.b",
        ),
        *("views", "terms", "personal_module", "options", "half", "method", "scaffold.train"),
    ],
)
def test_a_message_calls_only_phases(federation: Federation, phase: str) -> None:
    run = federation(toy_task(), Scaffold)
    msg = run.strategy.plan(1).messages[0]
    msg.phase = phase
    reply = run.client().handle(msg)
    assert isinstance(reply, Failure) and "is not served here" in reply.cause


def test_what_serves_a_phase(federation: Federation) -> None:
    """Of a client half or a plug-in what is marked, and `train` of a half; nothing by a name."""

    class Mine(Client):
        explore: Any = None

        @serves
        def measure(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
            return Result(), state

        def _helper(self, msg: Message, state: State, ctx: ClientContext) -> Any: ...

    @dataclass(frozen=True, kw_only=True)
    class Explores(Plugin):
        name = "explores"

        @serves
        def explore(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
            return Result(), state

    @dataclass(frozen=True, kw_only=True)
    class Has(FedAvg):
        client = Mine

    run = federation(toy_task(), Has, plugins=lambda: [Explores()])
    msg = run.strategy.plan(1).messages[0]
    served = []
    names = ["train", "measure", "explore", "views", "terms", "_helper", "options", "name", "data"]
    for phase in [*names, *(f"explores.{name}" for name in names), "fedavg.train", "method.train"]:
        reply = run.client().handle(replace(msg, phase=phase))
        if isinstance(reply, Failure):
            assert "is not served here" in reply.cause
        else:
            served.append(phase)
    assert served == ["train", "measure", "explores.explore"]


# ---- what lies on the client's disk


def test_a_damaged_state_is_noticed(tmp_path: Path) -> None:
    store = stores.DiskStore(tmp_path)
    store.save(3, 1, {"a": torch.ones(8)}, keep=[0])
    (file,) = (tmp_path / "3").iterdir()
    content = bytearray(file.read_bytes())
    for at in (0, 40, len(content) - 1):
        damaged = bytes(content[:at]) + bytes([content[at] ^ 1]) + bytes(content[at + 1 :])
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"):
            store.load(3, 1)
    file.write_bytes(content[:-3])
    with pytest.raises(ValueError, match="damaged"):
        store.load(3, 1)
    file.write_bytes(content)
    kept = store.load(3, 1)
    assert kept is not None and torch.equal(kept["a"], torch.ones(8))


def test_each_run_has_states_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation
) -> None:
    """Two runs at once on one site do not mix."""
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path))
    runs = [federation(toy_task(), Scaffold, rounds=4, seed=seed) for seed in (0, 1)]
    alone = [federation(toy_task(), Scaffold, rounds=4, seed=seed) for seed in (0, 1)]
    for run in runs:
        run.store = stores.store_at_site
    for _ in range(2):
        for run in (*runs, *alone):
            run.step()
    assert [run.sha256 for run in runs] == [run.sha256 for run in alone]
    assert {path.name for path in (tmp_path / "fedhet-state").iterdir()} == {
        run.strategy.run_id for run in runs
    }


def test_states_are_kept_in_a_folder_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have created it in the shared temporary directory, or a link there."""
    monkeypatch.delenv("FEDHET_STATE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / f"fedhet-{os.getuid()}"
    home = stores.state_folder("1")
    assert home.parent == own / "fedhet-state"
    assert home.parent.stat().st_mode & 0o777 == 0o700
    home.parent.chmod(0o750)
    with pytest.raises(ValueError, match="mode 0750"):
        stores.state_folder("2")
    home.parent.chmod(0o700)
    own.chmod(0o777)
    with pytest.raises(ValueError, match="mode 0777"):
        stores.state_folder("2")
    own.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"folder .*user"):
        stores.state_folder("2")
    own.unlink()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "fedhet-12345").mkdir()
    with pytest.raises(ValueError, match="uid 12345"):
        stores.state_folder("3")
