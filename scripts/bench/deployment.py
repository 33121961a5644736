"""Seconds of a deployment's rounds beyond their training. Prints JSON: {"rounds": [seconds]}.

    python scripts/bench/deployment.py stock|warm

Three SuperNodes on this machine (scripts/local_deployment.sh), as `flower-supernode` or as
`python -m fedhet deploy node`; the first round, in which the nodes say who they are, is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "local_deployment.sh"
RUN = ["method=fedavg", "rounds=8", "partition.clients=3", "eval.clients=false"]


def beyond_training(options: list[str]) -> list[float]:
    """Run a deployment and return the seconds of each round without those of the training."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        subprocess.run(
            [str(SCRIPT), *options, *RUN, f"hydra.run.dir={run}"],
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    return [sum(row["seconds"].values()) - row["seconds"]["train"] for row in rows[1:]]


if __name__ == "__main__":
    print(json.dumps({"rounds": beyond_training({"stock": [], "warm": ["--warm"]}[sys.argv[1]])}))
