"""How long a command takes to begin. Prints JSON: {"help": s, "first": s}.

    python scripts/bench/start.py

`help` is `python -m fedhet --help` to its end. `first` is from `python -m fedhet` (the embedded
digits, the default method) until the first line of its rounds.jsonl, one round and its evaluation;
the run is then stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "fedhet"]


def to_help() -> float:
    began = time.perf_counter()
    subprocess.run([*COMMAND, "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def to_first_round() -> float:
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "run", "rounds.jsonl")
        command = [*COMMAND, f"hydra.run.dir={lines.parent}"]
        began = time.perf_counter()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (lines.exists() and lines.stat().st_size):
            if run.poll() is not None:
                raise SystemExit(
                    f"python -m fedhet ended with exit code {run.returncode} before its first round"
                )
            time.sleep(0.005)
        spent = time.perf_counter() - began
        run.terminate()
        run.wait()
    return spent


if __name__ == "__main__":
    print(json.dumps({"help": to_help(), "first": to_first_round()}))
