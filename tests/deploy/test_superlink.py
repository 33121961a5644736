"""What the operator's commands ask of a SuperLink, and `python -m fedhet.deploy`."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from fedhet.core.errors import RunFailed
from fedhet.deploy import superlink


def test_the_nodes_that_flower_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are unregistered are left out; others have the time of their status."""
    rows = [
        {"node-id": 1, "status": "online", "online-at": "now", "created-at": "then"},
        {"node-id": 2, "status": "offline", "offline-at": "later", "created-at": "then"},
        {"node-id": 3, "status": "registered", "created-at": "then"},
        {"node-id": 4, "status": "unregistered", "created-at": "then"},
    ]
    asked = []

    def flwr(home: Path, *arguments: str) -> str:
        asked.append((home, *arguments))
        return json.dumps({"nodes": rows})

    monkeypatch.setattr(superlink, "flwr", flwr)
    assert superlink.nodes(tmp_path) == [
        superlink.Node("1", "online", "now"),
        superlink.Node("2", "offline", "later"),
        superlink.Node("3", "registered", "then"),
    ]
    assert asked == [(tmp_path, "supernode", "ls", superlink.CONNECTION, "--format", "json")]
    monkeypatch.setattr(superlink, "flwr", lambda home, *arguments: "{}")
    with pytest.raises(RunFailed, match="nodes"):
        superlink.nodes(tmp_path)


def test_it_is_a_module_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["deploy", "check", "--help"])
    monkeypatch.delitem(sys.modules, "fedhet.deploy.__main__", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fedhet.deploy", run_name="__main__")
    assert ended.value.code == 0
    assert "deploy check" in capsys.readouterr().out
