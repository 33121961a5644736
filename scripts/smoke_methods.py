"""Does every method learn?

    python scripts/smoke_methods.py [--only fedavg fedlex ...] [--dataset digits mnist]

Every method runs with the settings of conf/experiment/smoke/<method>.yaml, on the embedded digits
and on MNIST. The script prints accuracy, rounds, seconds and bytes by payload kind. Its exit code
is 1 if for some method the loss does not fall from the first evaluation to the last, or the
accuracy stays below 0.3. Methods without a global model are judged by the means over the clients'
own tests. FedLEx with its literal equation runs too but is not judged: its mask shrinks the steps
so much that it hardly trains at a host's learning rate.

Then FedAvg, FedNorm and FedGMM are compared with independent measurements of the same setting
(docs/methods.md, "An independent check").

MNIST is looked for as in any run (data_dir, FEDHET_DATA_DIR) and in ../shared/data. Without it only
digits run, and a message says so.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.parquet
from rich.console import Console
from rich.table import Table

import fedhet
from fedhet import config
from fedhet.config import catalogue
from fedhet.config.targets import find_target
from fedhet.record import terminal

ROOT = Path(__file__).parents[1]
LEAST_ACCURACY = 0.3
SEEDS = range(4)
LITERAL = ("fedlex, literal", ["experiment=smoke/fedlex", "plugin.fedlex.rescale=none"])
# The setting of the independent loops: digits, MLP 64-64-10, 20 clients by Dirichlet(0.1) with at
# least 5 samples, SGD .1, batches of 32, 2 local epochs.
SETTING = [
    "partition.clients=20",
    "partition.alpha=.1",
    "partition.min_size=5",
    "partition.split=[1,0,0]",
    "model.hidden=[64]",
    "client.lr=.1",
    "client.epochs=2",
    "rounds=20",
    # The pixels are divided by 16 and not normalised further.
    "dataset.mean=[0]",
    "dataset.std=[1]",
]
# Their accuracy after 10 and 20 rounds, mean of 4 seeds, and its spread over the seeds.
REFERENCE = {
    "fedavg": (0.63, 0.82, 0.02),
    "fednorm": (0.63, 0.82, 0.02),
    "fedgmm": (0.93, 0.95, 0.006),
}
Row = dict[str, Any]


def run(overrides: list[str]) -> tuple[dict[str, Any], list[Row]]:
    """summary.json and the lines of rounds.jsonl.

    Without a global model, the means over the clients' own tests take the place of its scores.
    """
    view: str = find_target(config.compose(overrides).cfg.method).evaluates[0]
    evaluate_clients = str(view != "global").lower()
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        lines = [f"eval.clients={evaluate_clients}", f"hydra.run.dir={folder}/run"]
        done = fedhet.run([*overrides, *lines])
        rows = [json.loads(line) for line in (done.dir / "rounds.jsonl").read_text().splitlines()]
        if view != "global":
            use_clients_scores(rows, done.dir, view)
            done.summary["accuracy"]["last"] = rows[-1]["acc_global"]
    return done.summary, rows


def use_clients_scores(rows: list[Row], folder: Path, view: str) -> None:
    """Replace the scores of the global model in the rows by the means over the clients."""
    scores = pyarrow.parquet.read_table(folder / "clients").to_pandas()
    own = scores.query("split == 'test' and model == @view")
    means = own.groupby(["metric", "round"])["value"].mean()
    for row in rows:
        if row["acc_clients_mean"] is not None:
            row["acc_global"] = means["accuracy", row["round"]]
            row["loss_global"] = means["loss", row["round"]]


def judge(summary: dict[str, Any], rows: Sequence[Row]) -> str:
    """ "ok", or what is wrong."""
    losses = [row["loss_global"] for row in rows if row["acc_global"] is not None]
    if None in losses or not losses[-1] < losses[0]:
        return f"the loss does not fall: {losses[0]} to {losses[-1]}"
    if summary["accuracy"]["last"] < LEAST_ACCURACY:
        return f"accuracy below {LEAST_ACCURACY}"
    return "ok"


def smoke(datasets: list[str], methods: list[str]) -> bool:
    """Run the methods on the data sets, print a table, and return whether all are well."""
    table = Table("method", "data", "accuracy", "rounds", "seconds", "sent up", "sent down", "")
    runs = [(method, [f"experiment=smoke/{method}"]) for method in methods]
    if "fedlex" in methods:
        runs.append(LITERAL)
    good = True
    for dataset in datasets:
        for name, overrides in runs:
            try:
                summary, rows = run([*overrides, f"dataset={dataset}"])
            except fedhet.RunFailed as error:
                good = False
                table.add_row(name, dataset, "", "", "", "", "", error.reason)
                continue
            verdict = "not judged" if name == LITERAL[0] else judge(summary, rows)
            good &= verdict in ("ok", "not judged")
            table.add_row(name, dataset, *figures(summary), verdict)
    Console(width=200).print(table)
    return good


def figures(summary: dict[str, Any]) -> list[str]:
    """The cells of a run: accuracy, rounds, seconds, bytes up and down."""
    rounds = ", ".join(f"{phase['name']} {phase['rounds']}" for phase in summary["phases"])
    traffic = [
        ", ".join(f"{kind} {terminal.readable_size(n)}" for kind, n in kinds.items())
        for kinds in summary["bytes"].values()
    ]
    accuracy = summary["accuracy"]["last"]
    seconds = summary["seconds"]["total"]
    return [f"{accuracy:.3f}", rounds, f"{seconds:.1f}", *traffic]


def compare_with_reference(methods: list[str]) -> bool:
    """Print our accuracies beside the independent ones; return whether all are close."""
    table = Table("method", "rounds", "ours (4 seeds)", "independent", "three spreads", "")
    good = True
    for method, (after_10, after_20, spread) in REFERENCE.items():
        if method not in methods:
            continue
        curves = []
        for seed in SEEDS:
            _, rows = run([f"method={method}", *SETTING, f"seed={seed}"])
            curves.append([row["acc_global"] for row in rows if row["acc_global"] is not None])
        for rounds, expected in ((10, after_10), (20, after_20)):
            ours = mean(curve[rounds - 1] for curve in curves)
            close = abs(ours - expected) <= 3 * spread
            good &= close
            numbers = [f"{number:.3f}" for number in (ours, expected, 3 * spread)]
            table.add_row(method, str(rounds), *numbers, "ok" if close else "differs")
    Console(width=200).print(table)
    return good


def available(datasets: list[str]) -> list[str]:
    """The data sets without MNIST where its files are missing."""
    shared = ROOT.parent / "shared" / "data"
    if "FEDHET_DATA_DIR" not in os.environ and shared.is_dir():
        os.environ["FEDHET_DATA_DIR"] = str(shared)
    folders = (Path(os.environ.get("FEDHET_DATA_DIR", "data")), Path("data"))
    if "mnist" in datasets and not any((folder / "MNIST").is_dir() for folder in folders):
        print("MNIST was not found: only digits run", file=sys.stderr)
        return [name for name in datasets if name != "mnist"]
    return datasets


def main() -> int:
    """Run both parts and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = catalogue.built_in("method")
    parser.add_argument("--only", nargs="+", default=list(names), choices=names)
    parser.add_argument("--dataset", nargs="+", default=["digits", "mnist"])
    args = parser.parse_args()
    learns = smoke(available(args.dataset), args.only)
    agrees = compare_with_reference(args.only)
    return 0 if learns and agrees else 1


if __name__ == "__main__":
    sys.exit(main())
