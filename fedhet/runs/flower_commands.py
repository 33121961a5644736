"""Calls Flower's commands: their path, their environment, and their output."""

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
BIN = Path(sys.executable).parent  # the folder of Flower's programs in this environment


def flower_environment(home: Path) -> dict[str, str]:
    """Return the variables for Flower's commands and processes; `home` has Flower's own files."""
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(home.absolute()),
        **direct_loopback(),  # Flower's programs on one machine connect to each other
        # Flower starts its helpers by name.
        "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)]),
    }


def flwr(
    home: Path,
    *arguments: str,
    cwd: Path | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Call the command `flwr` and return its output.

    Args:
        home: the folder with the config.toml that names the connection.
        arguments: the arguments of `flwr`.
        cwd: the working folder; None: the folder of this process.
        variables: environment variables in addition to those that this process has.

    Raises:
        RunFailed: the command fails, or takes too long.
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
        raise RunFailed(f"`{command}` did not complete: {clean(str(error))}") from error
    if done.returncode:
        output = done.stdout + done.stderr
        try:
            reason = str(json.loads(output)["error-message"])
        except (ValueError, KeyError, TypeError):
            reason = output
        raise RunFailed(f"`{command}` failed: {printed(reason)}")
    return done.stdout


def listed(home: Path, key: str, *arguments: str, **how: Any) -> list[dict[str, str]]:
    """Return the list under `key` in a command's JSON, with every value as clean text."""
    text = flwr(home, *arguments, "--format", "json", **how)
    try:
        rows = json.loads(text)[key]
        return [{name: clean(str(value)) for name, value in row.items()} for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFailed(f"`flwr {arguments[0]}` did not print {key}: {printed(text)}") from error
