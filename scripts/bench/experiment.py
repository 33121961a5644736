"""Many short runs from the shell. Prints JSON: {"wall": s, "own": s, "runs": n}.

    python scripts/bench/experiment.py processes|single [--workers N] [--runs N] [--first SEED]
        [--figures]

The runs are `python -m fedhet seed=...`: the digits, ten clients, twenty rounds. They draw their
figures with --figures only, as those of an experiment do not. `processes` is one command with
hydra/launcher=processes; `single` is one command after the other. `wall` is the time from the first
command to the end of the last, and `own` the sum of the runs' own seconds (`seconds.total` in
summary.json).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "fedhet"]


def main() -> None:
    """Measure one block of runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("how", choices=("processes", "single"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--figures", action="store_true")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.runs)
    with tempfile.TemporaryDirectory() as folder:
        commands = [[f"seed={seed}", f"hydra.run.dir={folder}/{seed}"] for seed in seeds]
        if args.how == "processes":
            launcher = ["hydra/launcher=processes", f"hydra.launcher.workers={args.workers}"]
            axis = f"seed=range({seeds.start},{seeds.stop})"
            commands = [["-m", *launcher, axis, f"hydra.sweep.dir={folder}"]]
        began = time.perf_counter()
        for command in commands:
            line = [*COMMAND, *command, f"figures={str(args.figures).lower()}"]
            subprocess.run(line, check=True, capture_output=True)
        wall = time.perf_counter() - began
        ends = [json.loads(file.read_text()) for file in Path(folder).glob("*/summary.json")]
    if [end["status"] for end in ends] != ["ok"] * args.runs:
        raise SystemExit("not all runs have ended well")
    figures = {
        "wall": wall,
        "own": sum(end["seconds"]["total"] for end in ends),
        "runs": args.runs,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
