"""What tests of trackers share: short runs, one that is killed, what a tracker must know."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LINES = [
    "method=fedavg",
    "plugin=[fedlex]",
    "plugin.fedlex.c_exp=2",
    "plugin.fedlex.e_exp=1",
    "model=logistic",
    "partition.clients=3",
    "client.epochs=1",
    "rounds=3",
    "checkpoint.every=0",
]

# Ends the process as SIGKILL does, between a step of the tracker and its checkpoint.
KILLED = """
import os, sys
from fedhet.__main__ import main
from fedhet.runs.trackers.tracker import Tracking

step_ended = Tracking.step_ended

def stepped(self, loop, row):
    step_ended(self, loop, row)
    if loop.round == 3:
        os._exit(9)

Tracking.step_ended = stepped
main(sys.argv[1:])
"""

Steps = dict[int, dict[str, float]]


def killed(folder: Path, *lines: str) -> None:
    """Run in a process of its own, which is killed in the third step."""
    command = [sys.executable, "-c", KILLED, *LINES, *lines, f"hydra.run.dir={folder}"]
    # W&B's own process, which the tests before have started, is not to be shared.
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 9, process.stderr
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 3


def expected(folder: Path) -> Steps:
    """The numbers in rounds.jsonl by step; null is NaN."""
    found: Steps = {}
    for number, line in enumerate((folder / "rounds.jsonl").read_text().splitlines(), 1):
        found[number] = dict(leaves(json.loads(line), ""))
    assert found
    return found


def leaves(node: Any, path: str) -> Any:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{path}/{key.replace('.', '/')}" if path else key)
    elif isinstance(node, list):
        yield path, float(len(node))
    elif node is None:
        yield path, math.nan
    elif not isinstance(node, str):
        yield path.replace(".", "/"), float(node)


def check(found: Steps, folder: Path, tolerance: float = 0.0) -> None:
    """Compare every value with rounds.jsonl; what is null there is NaN or absent."""
    wanted = expected(folder)
    assert list(found) == list(wanted)
    for number, values in wanted.items():
        names = {name for name, value in values.items() if not math.isnan(value)}
        assert len(names) > 15
        assert names <= set(found[number]) <= set(values), number
        for name in found[number]:
            close = math.isclose(found[number][name], values[name], rel_tol=tolerance)
            assert close or (math.isnan(found[number][name]) and math.isnan(values[name])), name
