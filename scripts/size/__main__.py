"""Print how much code fedhet has, by package.

    python scripts/size [--root ../another/checkout] [--check]

`--check` compares the number of statements with budget.json. If you raise a number there, give the
reason in the changelog.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from source import over_budget, packages

COLUMNS = ("files", "functions", "statements")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[2], help="the checkout to count"
    )
    parser.add_argument("--check", action="store_true", help="compare with budget.json")
    options = parser.parse_args()
    counted = packages(options.root)
    if options.check:
        budget = json.loads(Path(__file__).with_name("budget.json").read_text())
        sys.exit("\n".join(over_budget(counted, budget)) or None)
    print(f"{'':22}", *(f"{column:>10}" for column in COLUMNS))
    for name, row in counted.items():
        print(f"{name:22}", *(f"{row[column]:10,}" for column in COLUMNS))
