"""How far a round of W1 is from the floor: both in alternation, with one worker each.

    python scripts/bench/overhead.py [--rounds 10] [--reps 3] [--json PATH]

workloads.py defines W1, floor.py the floor. The first round of each repetition is not timed. Times
are noisy, so read the ratios. The script also prints the memory that the same samples in 1,000
parts take beyond the imports.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness import Result, alternate, ratio, show


def main() -> None:
    """Measure, print, and write the JSON file if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    systems = alternate(
        {
            "floor": ["floor.py", "W1", "--rounds", str(args.rounds)],
            "fedhet": ["fedhet_system.py", "W1", f"rounds={args.rounds + 1}"],
        },
        args.reps,
    )
    memory = alternate({"memory": ["memory.py", "clients", "1000", "60", "10"]}, 1)["memory"]
    gib = memory.value("gib")
    note = f"60,000 samples in 1,000 parts: {gib:.2f} GiB beyond the imports"
    show(Result([], systems, [note]))
    if args.json:
        figures: dict[str, object] = {"memory_gib": gib}
        for kind in ("median", "best"):
            seconds = {name: getattr(system, kind) for name, system in systems.items()}
            figures[kind] = seconds
            figures[f"ratio_{kind}"] = ratio(seconds["fedhet"], seconds["floor"])
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
