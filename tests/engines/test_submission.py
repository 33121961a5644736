"""What `flwr run` is started with, and what is told where it does not accept the run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from foreground import in_place_of_flwr

from fedhet.core.errors import RunFailed
from fedhet.deploy import folders
from fedhet.engines import flwr
from fedhet.runs import flower_commands

CODE = """
import os, pathlib, sys
log = pathlib.Path(os.environ["FLWR_HOME"], "local-superlink", "superlink.log")
log.parent.mkdir()
log.write_text("first\\n" + "more\\n" * 20 + "\\033[93mWARN\\033[0m : the port is taken\\n")
print("╭─ Error ─────╮\\n│ Failed to start local SuperLink. See logs at │\\n│", log, "│\\n╰─────╯")
sys.exit(1)
"""


def test_its_programs_ask_no_proxy_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "lab")
    monkeypatch.delenv("NO_PROXY", raising=False)
    server = folders.ServerFolder(
        folder=tmp_path, server="host:1", state=tmp_path, listen="10.0.0.5"
    )
    direct = "lab,127.0.0.1,localhost,::1"
    for environment, hosts in (
        (flwr._environment(tmp_path, tmp_path), direct),
        (flower_commands.flower_environment(tmp_path), direct),
        (folders.environment(server), f"{direct},10.0.0.5"),
    ):
        assert (environment["no_proxy"], environment["NO_PROXY"]) == (hosts, hosts)


def test_a_run_that_is_not_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log that Flower names is removed with its folder, so that its end is in the message."""
    in_place_of_flwr(tmp_path, monkeypatch)
    environment = {"FLWR_HOME": str(tmp_path)}
    with pytest.raises(RunFailed) as raised:
        flwr._submit([sys.executable, "-c", CODE], environment, lambda: None, lambda: None)
    reason = raised.value.reason
    assert reason.startswith("`flwr run` did not accept the run (exit code 1): Error Failed to")
    assert reason.endswith("the end of superlink.log: " + "more " * 4 + "WARN : the port is taken")
    assert not re.search(r"[─-▟\n\x1b]|\\n|\\x", reason)
