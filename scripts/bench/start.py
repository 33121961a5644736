"""How long a command takes to begin. Prints JSON: {"help": seconds, "first": seconds}.

    python scripts/bench/start.py

`help` is the whole of `python -m fedhet --help`. `first` is the time from `python -m fedhet` (the
embedded digits, the default method) to the first line of its rounds.jsonl, that is, one round and
its evaluation; the run is then stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "fedhet"]


def time_to_help() -> float:
    """Seconds of the command that prints the help text."""
    began = time.perf_counter()
    subprocess.run([*COMMAND, "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def time_to_first_round() -> float:
    """Seconds until the first round is recorded."""
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
        seconds = time.perf_counter() - began
        run.terminate()
        run.wait()
    return seconds


if __name__ == "__main__":
    print(json.dumps({"help": time_to_help(), "first": time_to_first_round()}))
