"""Long runs with everything going wrong at once. Prints JSON.

docs/promises_measured.md has the figures.

python scripts/soak simulation [--rounds 200 --clients 100]
    each fault is drawn for a tenth of the messages; the run must end with the weights of one in
    which the same clients are absent
python scripts/soak attack [--replies 10000 --only feddisk]
    one of six clients sends whatever it likes, in every phase of every method
python scripts/soak deployment [--nodes 20 --rounds 10]
    SuperNodes on this machine, two of which are killed and started again
"""

from __future__ import annotations

import argparse
import json

import attack
import deployment
import simulation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    simulated = kinds.add_parser("simulation")
    simulated.add_argument("--rounds", type=int, default=200)
    simulated.add_argument("--clients", type=int, default=100)
    attacked = kinds.add_parser("attack")
    attacked.add_argument("--replies", type=int, default=10_000)
    attacked.add_argument("--only", default="", help="the methods with this in their names")
    deployed = kinds.add_parser("deployment")
    deployed.add_argument("--nodes", type=int, default=20)
    deployed.add_argument("--rounds", dest="steps", type=int, default=10)
    options = vars(parser.parse_args())
    soaks = {"simulation": simulation, "attack": attack, "deployment": deployment}
    print(json.dumps(soaks[options.pop("kind")].soak(**options), indent=2))


if __name__ == "__main__":
    main()
