"""Measures whole commands, one question per process. Prints JSON.

python scripts/bench/commands.py start
    {"help": seconds of `python -m fedhet --help`, "first": seconds from `python -m fedhet` (the
    embedded digits, the default method) to the first line of its rounds.jsonl}
python scripts/bench/commands.py deployment stock|warm
    {"rounds": seconds of a deployment's rounds beyond their training}, with three SuperNodes on
    this machine (scripts/local_deployment.sh), as `flower-supernode` or as `python -m fedhet
    deploy node`. The first round is left out, because the server asks the nodes who they are in it
python scripts/bench/commands.py together OVERRIDES...
    {"wall": seconds of `python -m fedhet` with these overrides for many runs, "runs": the number of
    runs, "own": the sum of their own seconds (`seconds.total` in summary.json)}
python scripts/bench/commands.py after_another RUNS OVERRIDES...
    the same for RUNS commands, one after the other, with the seeds 0, 1, ...
python scripts/bench/commands.py report RUNS
    {"wall": seconds of `python -m fedhet report`} for RUNS runs of 20 rounds: seven methods, each
    with copies of one run under other seeds
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import answer

COMMAND = [sys.executable, "-m", "fedhet"]
DEPLOYMENT = Path(__file__).parents[1] / "local_deployment.sh"
REPORTED = "fedavg,fedprox,scaffold,fednova,fedbabu,ditto,fedsa"
SEED = re.compile(r"""(^\s*"?seed"?: |seed=)0\b""", re.MULTILINE)  # in a run's files
DEPLOYED = ["method=fedavg", "rounds=8", "partition.clients=3", "eval.clients=false"]


def start() -> dict[str, Any]:
    """Measure how long a command takes to begin."""
    began = time.perf_counter()
    subprocess.run([*COMMAND, "--help"], stdout=subprocess.DEVNULL, check=True)
    to_help = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "run", "rounds.jsonl")
        command = [*COMMAND, f"hydra.run.dir={lines.parent}"]
        began = time.perf_counter()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (lines.exists() and lines.stat().st_size):
            if run.poll() is not None:
                raise SystemExit(
                    f"python -m fedhet exited with code {run.returncode} before its first round"
                )
            time.sleep(0.005)
        to_first = time.perf_counter() - began
        run.terminate()
        run.wait()
    return {"help": to_help, "first": to_first}


def deployment(nodes: str) -> dict[str, Any]:
    """Measure the seconds of each round, without the seconds of its training."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        warm = ["--warm"] if nodes == "warm" else []
        subprocess.run(
            [DEPLOYMENT, *warm, *DEPLOYED, f"hydra.run.dir={run}"],
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    return {"rounds": [sum(row["seconds"].values()) - row["seconds"]["train"] for row in rows[1:]]}


def together(*overrides: str) -> dict[str, Any]:
    """Measure many runs in one command."""
    with tempfile.TemporaryDirectory() as folder:
        return _runs([[*overrides, f"hydra.sweep.dir={folder}"]], Path(folder))


def after_another(runs: int, *overrides: str) -> dict[str, Any]:
    """Measure many commands with one run each."""
    with tempfile.TemporaryDirectory() as folder:
        seeds = [[f"seed={seed}", f"hydra.run.dir={folder}/{seed}"] for seed in range(runs)]
        return _runs([[*overrides, *lines] for lines in seeds], Path(folder))


def report(runs: int) -> dict[str, Any]:
    """Measure the report of many runs."""
    with tempfile.TemporaryDirectory() as folder:
        lines = ["rounds=20", "client.lr=0.05", f"method={REPORTED}", "seed=0"]
        made = [*COMMAND, "-m", *lines, "figures=false", f"hydra.sweep.dir={folder}/made"]
        subprocess.run(made, check=True, capture_output=True)
        for file in Path(folder).glob("made/*/summary.json"):
            for seed in range(runs // (REPORTED.count(",") + 1)):
                copy = Path(folder, "runs", f"{file.parent.name}-{seed}")
                shutil.copytree(file.parent, copy)
                for name in ("summary.json", "config.yaml", "overrides.yaml"):
                    text = (copy / name).read_text()
                    (copy / name).write_text(SEED.sub(rf"\g<1>{seed}", text))
        began = time.perf_counter()
        command = [*COMMAND, "report", f"{folder}/runs"]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)
        return {"wall": time.perf_counter() - began}


def _runs(commands: list[list[str]], folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    for command in commands:
        subprocess.run([*COMMAND, *command], check=True, capture_output=True)
    wall = time.perf_counter() - began
    ends = [json.loads(file.read_text()) for file in folder.rglob("summary.json")]
    return {"wall": wall, "own": sum(end["seconds"]["total"] for end in ends), "runs": len(ends)}


if __name__ == "__main__":
    answer(start, deployment, together, after_another, report)
