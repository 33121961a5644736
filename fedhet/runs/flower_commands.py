"""Flower's commands: where they are, their environment, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedhet.core.errors import RunFailed, clean, printed
from fedhet.runs.process import direct_loopback

SECONDS = 120  # for one command
BIN = Path(sys.executable).parent  # where this environment has Flower's programs


def flower_environment(home: Path) -> dict[str, str]:
    """The variables for Flower's commands and processes, whose own files are in `home`."""
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(home.absolute()),
        **direct_loopback(),  # Flower's programs of one machine talk to each other
        # Flower starts its helpers by name.
        "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)]),
    }


def flwr(
    home: Path,
    *arguments: str,
    cwd: Path | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Call one of Flower's commands and return what it prints.

    Args:
        home: the folder with the config.toml that names the connection.
        arguments: those of `flwr`.
        cwd: the folder in which it works, if it is another one than that of this process.
        variables: of its environment, beside those of this process.

    Raises:
        RunFailed: it fails, or takes too long.
    """
    command = " ".join(["flwr", *arguments])
    try:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments],
            env={
                **os.environ,
                **flower_environment(home),
                **variables,
                "COLUMNS": "999",
            },  # unwrapped
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunFailed(f"`{command}` was not completed: {clean(str(error))}") from error
    if done.returncode:
        output = done.stdout + done.stderr
        try:
            reason = str(json.loads(output)["error-message"])
        except (ValueError, KeyError, TypeError):
            reason = output
        raise RunFailed(f"`{command}` failed: {printed(reason)}")
    return done.stdout


def listed(home: Path, key: str, *arguments: str, **how: Any) -> list[dict[str, str]]:
    """The list under `key` in a command's JSON; every value in it is made a clean text."""
    text = flwr(home, *arguments, "--format", "json", **how)
    try:
        rows = json.loads(text)[key]
        return [{name: clean(str(value)) for name, value in row.items()} for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFailed(f"`flwr {arguments[0]}` has not printed {key}: {printed(text)}") from error
