"""How large fedhet is: its code, what a step and a run enter of it, and circles of imports.

    python scripts/size [--root ../another/checkout] [--check]

A step is taken without configuration, engine and records; a run is one without overrides. `--check`
compares all statements with budget.json; who raises the number there says why in the changelog.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from entered import MEASURED, entered
from source import circles, graph, modules, over_budget, packages


def measure(root: Path) -> dict[str, Any]:
    """Measure the checkout at `root`."""
    sys.path.insert(0, str(root))  # its fedhet is what the processes import
    with ProcessPoolExecutor(2, max_tasks_per_child=1) as pool:  # none finds what another cached
        started = {what: pool.submit(entered, what, root / "fedhet") for what in MEASURED}
        trees = modules(root / "fedhet")
        return {
            "packages": packages(root),
            "entered": {what: future.result() for what, future in started.items()},
            "circles": {"all": circles(graph(trees)), "executed": circles(graph(trees, True))},
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="a checkout")
    parser.add_argument("--check", action="store_true", help="compares with budget.json")
    options = parser.parse_args()
    if options.check:
        budget = json.loads(Path(__file__).with_name("budget.json").read_text())
        sys.exit("\n".join(over_budget(packages(options.root.resolve()), budget)) or None)
    found = measure(options.root.resolve())
    columns = ("files", "functions", "statements")
    print(f"{'':22}", *(f"{column:>10}" for column in columns))
    for name, row in {**found["packages"], **found["entered"]}.items():
        print(f"{name:22}", *(f"{row[column]:10,}" for column in columns if column in row))
    for kind, groups in found["circles"].items():
        lines = ["  " + " ".join(group) for group in groups]
        print(f"circles of {kind} imports:", *(lines or ["  none"]), sep="\n")
