"""How far a round of W1 is from its physical floor: the floor and the in-process engine in
alternation, one worker each.

    python scripts/bench/overhead.py [--rounds 10] [--reps 3] [--json PATH]

workloads.py says what W1 is, floor.py what the floor does. The first round of each repetition is
not counted. Times are noisy: read the ratios. Also prints the memory of the same samples in 1,000
parts, beyond what the imports take."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness import Found, alternate, ratio, show


def main() -> None:
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
    gib = alternate({"memory": ["memory.py", "clients", "1000", "60", "10"]}, 1)["memory"].value(
        "gib"
    )
    show(Found([], systems, [f"60,000 samples in 1,000 parts: {gib:.2f} GiB beyond the imports"]))
    if args.json:
        median, best = (
            {name: getattr(system, kind) for name, system in systems.items()}
            for kind in ("median", "best")
        )
        ratios = {
            f"ratio_{kind}": ratio(times["fedhet"], times["floor"])
            for kind, times in (("median", median), ("best", best))
        }
        args.json.write_text(
            json.dumps({"median": median, "best": best, **ratios, "memory_gib": gib}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
