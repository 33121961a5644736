"""An existing Ray cluster: whether it can be reached, and what travels to its nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedhet.config.catalogue import CONF
from fedhet.config.targets import trusted
from fedhet.core.errors import ConfigError
from fedhet.engines.guard import TemporaryFolder

REACH_SECONDS = 8.0  # how long a cluster may take to answer
PROBE = Path(__file__).with_name("cluster_probe.py")
TOKEN_REFUSED = "InvalidAuthToken"  # in what Ray writes to stderr, until it gives up
NO_NODE = "No node info found"  # what Ray says where it finds no process of the cluster


def reach(address: str, setting: str = "engine.address") -> list[dict[str, float]]:
    """Return the resources of each node of the cluster at `<host>:<port>` or "auto".

    Args:
        address: where the cluster is.
        setting: what names it, for messages.

    Raises:
        ConfigError: this process cannot use the cluster; the message says why.
    """
    if not re.fullmatch(r"auto|[^/]+:\d+", address):
        raise ConfigError(
            f"{setting}={address}: it must be auto, or <host>:<port> with the port of"
            " `ray start --head` (6379 by default)"
        )
    # -P: the probe must not import ray.py, which is beside it, in place of Ray.
    command = [sys.executable, "-P", str(PROBE), address]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=REACH_SECONDS, check=False
        )
        output, log = process.stdout, process.stderr
    except subprocess.TimeoutExpired as error:
        output, log = "", (error.stderr or b"").decode(errors="replace")
    answer = _answer(output)
    if "nodes" in answer:
        nodes: list[dict[str, float]] = answer["nodes"]
        return nodes
    raise ConfigError(f"{setting}={address}: {_reason(answer.get('reason', ''), log)}")


def _answer(output: str) -> dict[str, Any]:
    """The probe's line; empty if it was killed before."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    answer: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return answer


def _reason(reason: str, log: str) -> str:
    """Why the cluster cannot be used, in one line."""
    if TOKEN_REFUSED in log:
        if os.environ.get("RAY_AUTH_MODE") == "token":
            return "the cluster does not accept the token of this machine; copy that of its head"
        return (
            "the cluster asks for a token; set RAY_AUTH_MODE=token, and copy the token of its head"
            " (~/.ray/auth_token) to this machine"
        )
    if "RAY_AUTH_TOKEN" in reason:  # Ray's own words fill a screen
        return f"RAY_AUTH_MODE=token, but this machine has no token: {reason.partition('. ')[0]}"
    if NO_NODE in reason:
        return "this machine is not a node of the cluster; `ray start --address=...` makes it one"
    if reason:
        words = reason.strip().splitlines()[-1] if "Traceback" in reason else reason
        return " ".join(words.split())
    return f"no Ray cluster has answered there within {REACH_SECONDS:g} s"


# ---- what travels to the nodes
@contextmanager
def runtime_env() -> Iterator[dict[str, Any]]:
    """Ray's description of what each node gets: the code of this process, and its settings.

    fedhet itself is always sent, because equal bytes take equal code. A trusted package is sent
    unless it is installed as the dependencies are, which every node must have anyway. The code is
    the `working_dir` of the clients' processes, because Ray would otherwise prefer what lies in
    the folder of the same name as ours on their machine. It must exist until Ray has read it.
    """
    with TemporaryFolder("fedhet-ray-") as folder:
        for name in {name.partition(".")[0] for name in trusted()}:
            _copy_code(name, Path(folder))
        inside = Path(folder, "fedhet", "conf")
        if not inside.exists():  # it lies beside the package in a clone
            shutil.copytree(CONF, inside)
        variables = {name: value for name, value in os.environ.items() if name[:7] == "FEDHET_"}
        yield {"working_dir": folder, "env_vars": variables}


def _copy_code(package: str, folder: Path) -> None:
    """Copy the folder or file of a package, if it must be sent."""
    spec = find_spec(package)
    if spec is None:
        return  # the run has no need of it, or its own error says that it is missing
    locations = list(spec.submodule_search_locations or ())
    source = Path(locations[0] if locations else spec.origin or "")
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    if package != "fedhet" and any(source.is_relative_to(where) for where in installed):
        return
    if source.is_dir():
        caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / source.name, ignore=caches)
    else:
        shutil.copy(source, folder)
