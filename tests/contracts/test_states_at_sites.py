"""Checkpoints of a run whose clients keep their states themselves, as in a deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedhet
from fedhet.core.server.loop import Loop
from fedhet.data.toy import toy_task
from fedhet.engines.local_transport import LocalTransport
from fedhet.runs import config
from fedhet.runs.checkpoint import Checkpoints
from fedhet.runs.stores import MemoryStore
from fedhet.testing import run_quietly

LINES = ["method=scaffold", "fraction=.75", "client.lr=.1", "rounds=5", "checkpoint.every=0"]


def test_sites_keep_what_the_kept_checkpoints_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint has no states then; the messages say which versions are still needed."""
    stores = []

    def at_sites(transport: LocalTransport, make: Any, store: MemoryStore) -> None:
        transport._make = make
        transport.store = None  # type: ignore[assignment]
        stores.append(store)

    write = Checkpoints._write

    def sometimes(self: Checkpoints, loop: Loop) -> None:
        if loop.round in (2, 5):  # so that clients train twice in between
            write(self, loop)

    monkeypatch.setattr(Checkpoints, "_write", sometimes)
    monkeypatch.setattr(LocalTransport, "__init__", at_sites)
    settings = config.compose(LINES)
    run = run_quietly(settings, tmp_path / "run", toy_task())
    home = run.dir / "checkpoints"
    assert sorted(path.name for path in home.iterdir()) == ["000002", "000005"]
    (store,) = stores
    old = 0
    for name in ("000002", "000005"):
        states = json.loads((home / name / "manifest.json").read_text().partition("\n")[2])[
            "states"
        ]
        assert states
        for pid, versions in states.items():
            for version, stated in versions.items():
                assert stated is None
                assert store.load(int(pid), int(version)), (pid, version)
                old += int(version) < 3
    assert old
    resumed = config.compose([f"resume={run.dir}", "rounds=6"])
    with pytest.raises(fedhet.ConfigError, match=r"states .*clients"):
        run_quietly(resumed, run.dir, toy_task())
