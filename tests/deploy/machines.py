"""Machines as network namespaces: each has a network of its own, and one wire to a switch.

Only root can make them, and none of this machine's own interfaces is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from engines.real_sites import BIN, ROOT, wait_for

SUBNET = "10.77.0"


def ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def require_namespaces() -> None:
    """Skip the test where there are none."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2's `ip`")
    probe = f"fedhet-probe-{os.getpid()}"
    try:
        ip("netns", "add", probe)
        ip("netns", "delete", probe)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made: {error.stderr.strip()}")


class Machines:
    """Namespaces that reach each other through a switch, in a namespace of its own.

    Args:
        names: of the machines, at most 8 characters each.
    """

    def __init__(self, *names: str) -> None:
        self._prefix = f"fedhet{os.getpid()}"
        self.addresses = {name: f"{SUBNET}.{n}" for n, name in enumerate(names, 1)}
        self._switch = f"{self._prefix}-switch"
        self.started: list[subprocess.Popen[bytes]] = []

    def namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def __enter__(self) -> Machines:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        for name, address in self.addresses.items():
            space = self.namespace(name)
            ip("netns", "add", space)
            pair = ["type", "veth", "peer", "name", name, "netns", self._switch]
            ip("-n", space, "link", "add", "wire", *pair)
            ip("-n", space, "address", "add", f"{address}/24", "dev", "wire")
            for link in ("lo", "wire"):
                ip("-n", space, "link", "set", link, "up")
            ip("-n", self._switch, "link", "set", name, "master", "bridge", "up")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.addresses:
            self.kill(name)
            ip("netns", "delete", self.namespace(name))
        ip("netns", "delete", self._switch)

    def _command(self, name: str, *arguments: str) -> list[str]:
        return [
            "ip",
            "netns",
            "exec",
            self.namespace(name),
            str(BIN / arguments[0]),
            *arguments[1:],
        ]

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        own = {"PATH": path, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
        return {
            **os.environ,
            **own,
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "COLUMNS": "200",
            **variables,
        }

    # ---- commands
    def call(self, name: str, *arguments: str, **variables: str) -> tuple[int, str]:
        """Run a program of the environment on a machine: its exit code and what it prints."""
        done = subprocess.run(
            self._command(name, *arguments),
            cwd=ROOT,
            env=self._environment(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def deploy(self, name: str, *arguments: object) -> tuple[int, str]:
        """`python -m fedhet deploy ...` on a machine."""
        python = Path(sys.executable).name
        return self.call(name, python, "-m", "fedhet", "deploy", *map(str, arguments))

    def start(self, name: str, folder: Path) -> subprocess.Popen[bytes]:
        """`deploy run`, as systemd starts it."""
        python = Path(sys.executable).name
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                self._command(name, python, "-m", "fedhet", "deploy", "run", str(folder)),
                cwd=ROOT,
                env=self._environment({}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def kill(self, name: str, part: str = "") -> None:
        """Kill the processes on a machine whose command line has `part`."""

        def found() -> list[int]:
            pids = map(int, ip("netns", "pids", self.namespace(name)).split())
            return [pid for pid in pids if part in _command_line(pid)]

        def none_left() -> bool:
            for pid in found():
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(pid, 9)
            for process in self.started:
                process.poll()  # so that no zombie is left
            return not found()

        wait_for(none_left, f"the end of {part or 'everything'} on {name}")


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # ended meanwhile
        return ""
