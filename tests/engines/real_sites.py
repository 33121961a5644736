"""A SuperLink and SuperNodes as processes on this machine, for tests that kill and restart them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from ports import free_ports

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SECONDS = 300  # on a busy machine; a quiet one needs a tenth
TAG = "FEDHET_TEST_SITES"  # a variable that all processes of a deployment inherit


def wait_for(ready: Callable[[], Any], what: str) -> Any:
    """Wait until `ready` returns something true, and return it."""
    deadline = time.monotonic() + SECONDS
    while not (found := ready()):
        assert time.monotonic() < deadline, f"waited {SECONDS} s for {what}"
        time.sleep(0.2)
    return found


class Sites:
    """A SuperLink that keeps its state in a file, and SuperNodes; all are ended with the block.

    Args:
        home: a folder for logs, databases and clients' states.
        nodes: the number of SuperNodes.
        tls: the options of the SuperLink, and those of a SuperNode; without TLS "--insecure".
        code: what sites that are `warm` execute.
        connection: the lines of Flower's config.toml that name how to reach the SuperLink.
        variables: further variables for the processes.

    Attributes:
        through: for a node's number, the port of a proxy to the SuperLink, in place of its own.
        configs: the node config of each SuperNode; None: partition-id and num-partitions.
        warm: start SuperNodes as `python -m fedhet deploy node`.
    """

    def __init__(
        self,
        home: Path,
        nodes: int = 2,
        *,
        tls: tuple[list[str], list[str]] = (["--insecure"], ["--insecure"]),
        connection: str = "insecure = true",
        variables: Mapping[str, str] | None = None,
        configs: Sequence[str] | None = None,
        warm: bool = False,
        code: str = "any",
    ) -> None:
        self.home = home
        self.count = nodes
        self.configs = configs
        self.node_command = ["flower-supernode"]
        self.link_options, self.node_options = tls
        self.port, *self.node_ports = free_ports(1 + nodes)
        self.environment = {
            **os.environ,
            **(variables or {}),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
            TAG: str(home),
        }
        address = f'address = "127.0.0.1:{self.port}"'
        config = f'[superlink]\ndefault = "here"\n[superlink.here]\n{address}\n{connection}\n'
        (home / "config.toml").write_text(config)
        self.link: subprocess.Popen[bytes]
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.through: dict[int, int] = {}
        if warm:
            self.node_command = [sys.executable, "-m", "fedhet", "deploy", "node", "--code", code]
            path = self.environment.get("PYTHONPATH", "")
            self.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), path])

    def __enter__(self) -> Sites:
        self.start_link()
        for number in range(self.count):
            self.start_node(number)
        self.wait_online(self.count)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes():
            process.kill()

    # ---- processes
    def start(self, log: str, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        with (self.home / log).open("ab") as file:
            return subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                env={**self.environment, **variables},
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def start_link(self, *options: str) -> None:
        self.link = self.start(
            "link.log",
            "flower-superlink",
            *self.link_options,
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--database", str(self.home / "state.db")),
            "--disable-runtime-dependency-installation",
            *options,
        )
        wait_for(lambda: self.listening(self.port), "the SuperLink")

    def start_node(self, number: int, *options: str) -> None:
        config = f"partition-id={number} num-partitions={self.count}"
        if self.configs is not None:
            config = self.configs[number]
        self.nodes[number] = self.start(
            f"node{number}.log",
            *self.node_command,
            *(options or self.node_options),
            *("--superlink", f"127.0.0.1:{self.through.get(number, self.port)}"),
            *("--host", "127.0.0.1", "--port", str(self.node_ports[number])),
            *("--node-config", config),
            FEDHET_STATE_DIR=str(self.home / f"states{number}"),
        )

    @staticmethod
    def listening(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def processes(self, part: str = "", number: int | None = None) -> list[psutil.Process]:
        """The processes of the deployment, or of one node, whose command line has `part`."""
        found = []
        for process in psutil.process_iter():
            try:
                variables = process.environ()
                line = " ".join(process.cmdline())
            except psutil.Error:  # ended meanwhile, or another user's
                continue
            own = number is None or variables.get("FEDHET_STATE_DIR", "").endswith(
                f"states{number}"
            )
            if variables.get(TAG) == str(self.home) and own and part in line:
                found.append(process)
        return found

    def kill(self, part: str = "", number: int | None = None) -> None:
        killed = self.processes(part, number)
        assert killed
        for process in killed:
            process.kill()
        wait_for(lambda: not self.processes(part, number), "their end")

    # ---- Flower's commands
    def flwr(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments, "--format", "json"],
            env=self.environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            return dict(json.loads(done.stdout))
        except ValueError:
            return {"error": done.stdout + done.stderr}

    def wait_online(self, count: int) -> None:
        def online() -> bool:
            nodes = self.flwr("supernode", "ls", "here").get("nodes", [])
            return sum(node["status"] == "online" for node in nodes) >= count

        wait_for(online, f"{count} nodes")

    def submit(self, *overrides: str, resume: str = "") -> str:
        """Submit a run, and return its id."""
        file = self.home / "run.toml"
        lines = {"overrides": " ".join(overrides), "resume": resume}
        file.write_text("".join(f"{key} = {json.dumps(text)}\n" for key, text in lines.items()))
        answer = self.flwr("run", str(ROOT), "here", "--run-config", str(file))
        assert "run-id" in answer, answer
        return str(answer["run-id"])

    def log(self, run: str) -> str:
        """The log of the run's server app."""
        command = [str(BIN / "flwr"), "log", run, "here", "--show"]
        return subprocess.run(
            command, env=self.environment, cwd=self.home, capture_output=True, text=True, check=True
        ).stdout

    def status(self, run: str) -> str:
        runs = self.flwr("ls", "here").get("runs", [])
        return next((str(one["status"]) for one in runs if str(one["run-id"]) == run), "unknown")

    def wait_end(self, run: str) -> str:
        def ended() -> str:
            status = self.status(run)
            return status if status.startswith("finished") else ""

        return str(wait_for(ended, "the end of the run"))


def rounds(folder: Path) -> list[dict[str, Any]]:
    """The steps that the run in the folder has recorded."""
    path = folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))
