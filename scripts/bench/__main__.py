"""Runs the benchmarks and compares them with their goals.

    python scripts/bench [--check] [--only W1 ...] [--reps N] [--json PATH]

cells.py and method_cells.py define the cells (parts) and their goals. Systems run in separate
processes, in alternation, with one thread each. A system that is not installed is skipped. With
--check the exit code is 1 if a goal is missed. You can also run the other scripts alone; their
docstrings describe their measurements.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cells import CELLS


def main() -> int:
    """Run the cells that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument(
        "--only", nargs="+", choices=CELLS, default=list(CELLS), help="run only these cells"
    )
    parser.add_argument("--reps", type=int, default=3, help="repetitions of every system")
    parser.add_argument("--json", type=Path, help="write all figures here, after each cell")
    args = parser.parse_args()
    results = {}
    for name in args.only:
        print(f"== {name}: {CELLS[name].about}")
        results[name] = CELLS[name].run(args.reps)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    missed = [
        f"{name}: {goal['what']}"
        for name, result in results.items()
        for goal in result["goals"]
        if goal["verdict"] == "MISSED"
    ]
    if missed:
        print("missed:", *missed, sep="\n  ")
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
