"""What the operator's commands ask of a SuperLink."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from engines.real_sites import wait_for
from ports import free_ports

from fedhet.core.errors import RunFailed
from fedhet.deploy import superlink
from fedhet.runs import flower_commands


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

    monkeypatch.setattr(flower_commands, "flwr", flwr)
    assert superlink.nodes(tmp_path) == [
        superlink.Node("1", "online", "now"),
        superlink.Node("2", "offline", "later"),
        superlink.Node("3", "registered", "then"),
    ]
    assert asked == [(tmp_path, "supernode", "ls", superlink.CONNECTION, "--format", "json")]
    monkeypatch.setattr(flower_commands, "flwr", lambda home, *arguments: "{}")
    with pytest.raises(RunFailed, match="nodes"):
        superlink.nodes(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's way to find processes")
def test_a_killed_superlink_leaves_no_process(tmp_path: Path) -> None:
    """Also while nobody has waited for it: Flower's own processes then take it for alive."""
    (port,) = free_ports(1)
    options = ["--insecure", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "fedhet", "deploy", "link", str(tmp_path), *options]
    variables = {**os.environ, **flower_commands.flower_environment(tmp_path)}
    with subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL) as link:
        process = psutil.Process(link.pid)

        def helper() -> list[psutil.Process]:
            with suppress(psutil.Error):  # one has ended meanwhile
                every = process.children()
                return [one for one in every if "flower-superexec" in " ".join(one.cmdline())]
            return []

        wait_for(helper, "the SuperLink's helper")
        children = process.children(recursive=True)
        process.kill()
        _, left = psutil.wait_procs(children, timeout=5)
        for child in left:
            child.kill()
        assert not left
