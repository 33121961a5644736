"""All benchmarks, the table of goals, and whether they are met.

    python scripts/bench [--check] [--only W1 ...] [--reps N] [--json PATH]

cells.py has the cells and their goals. Each system runs in processes of its own, in alternation,
with one thread; a system that is not installed is skipped. --check exits with code 1 where a goal
is missed. The other scripts also run alone, and say what they measure."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cells import CELLS
from harness import plain, show


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with code 1 where a goal is missed"
    )
    parser.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS), help="these cells")
    parser.add_argument("--reps", type=int, default=3, help="repetitions of every system")
    parser.add_argument("--json", type=Path, help="write all figures here, after each cell")
    args = parser.parse_args()
    written, missed = {}, []
    for name in args.only:
        print(f"== {name}: {CELLS[name].__doc__}")
        found = CELLS[name](args.reps)
        show(found)
        missed += [f"{name}: {goal.what}" for goal in found.goals if goal.verdict == "MISSED"]
        written[name] = plain(found)
        if args.json:
            args.json.write_text(json.dumps(written, indent=1) + "\n")
    if missed:
        print("missed:", *missed, sep="\n  ")
    return int(args.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
