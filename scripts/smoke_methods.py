"""Does every method learn? Each with the settings of conf/experiment/smoke/<method>.yaml, on the
embedded digits and on MNIST.

    python scripts/smoke_methods.py [--only fedavg fedlex ...] [--dataset digits mnist]

Prints accuracy, rounds, seconds and bytes by payload kind. Exits with 1 where the loss does not
fall from the first evaluation to the last, or the accuracy stays below 0.3. FedLEx with its
equation taken literally runs too and is printed, not judged: its mask shrinks the steps so much
that it hardly trains at a host's learning rate. Methods without a global model are judged by the
means over the clients' own tests. Then FedAvg, FedNorm and FedGMM are held against independent
measurements of the same setting (docs/methods.md, "An independent check"). MNIST is looked for as
in any run (data_dir, FEDHET_DATA_DIR) and in ../shared/data; without it only digits run, and that
is said."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
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
LEAST = 0.3
LITERAL = ("fedlex, literal", ["experiment=smoke/fedlex", "plugin.fedlex.rescale=none"])
# Accuracy after 10 and 20 rounds, and the spread over seeds, of loops written apart from any
# framework: digits, MLP 64-64-10, 20 clients by Dirichlet(0.1) with at least 5 samples, SGD .1,
# batch 32, 2 local epochs, mean of 4 seeds.
SETTING = [
    "partition.clients=20",
    "partition.alpha=.1",
    "partition.min_size=5",
    "partition.split=[1,0,0]",
    "model.hidden=[64]",
    "client.lr=.1",
    "client.epochs=2",
    "rounds=20",
    "dataset.mean=[0]",
    "dataset.std=[1]",
]  # pixels / 16, nothing else
REFERENCE = {
    "fedavg": (0.63, 0.82, 0.02),
    "fednorm": (0.63, 0.82, 0.02),
    "fedgmm": (0.93, 0.95, 0.006),
}


def run(overrides: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """summary.json and the lines of rounds.jsonl."""
    view = find_target(config.compose(overrides).cfg.method).evaluates[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        found = fedhet.run(
            [
                *overrides,
                f"eval.clients={str(view != 'global').lower()}",
                f"hydra.run.dir={folder}/run",
            ]
        )
        rows = [json.loads(line) for line in (found.dir / "rounds.jsonl").read_text().splitlines()]
        if view != "global":
            own = (
                pyarrow.parquet.read_table(found.dir / "clients")
                .to_pandas()
                .query("split == 'test' and model == @view")
            )
            means = own.groupby(["metric", "round"])["value"].mean()
            for row in (row for row in rows if row["acc_clients_mean"] is not None):
                row |= {
                    "acc_global": means["accuracy", row["round"]],
                    "loss_global": means["loss", row["round"]],
                }
            found.summary["accuracy"]["last"] = rows[-1]["acc_global"]
        return found.summary, rows


def judge(summary: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """ "ok", or what is wrong."""
    losses = [row["loss_global"] for row in rows if row["acc_global"] is not None]
    if None in losses or not losses[-1] < losses[0]:
        return f"the loss does not fall: {losses[0]} to {losses[-1]}"
    return "ok" if summary["accuracy"]["last"] >= LEAST else f"accuracy below {LEAST}"


def smoke(datasets: list[str], methods: list[str]) -> bool:
    table = Table("method", "data", "accuracy", "rounds", "seconds", "sent up", "sent down", "")
    good = True
    for dataset in datasets:
        chosen = [(method, [f"experiment=smoke/{method}"]) for method in methods]
        for name, overrides in [*chosen, *([LITERAL] if "fedlex" in methods else [])]:
            try:
                summary, rows = run([*overrides, f"dataset={dataset}"])
            except fedhet.RunFailed as error:
                good = False
                table.add_row(name, dataset, "", "", "", "", "", error.reason)
                continue
            verdict = "not judged" if name == LITERAL[0] else judge(summary, rows)
            good &= verdict in ("ok", "not judged")
            rounds = ", ".join(f"{phase['name']} {phase['rounds']}" for phase in summary["phases"])
            up, down = (
                ", ".join(f"{kind} {terminal.readable_size(n)}" for kind, n in kinds.items())
                for kinds in summary["bytes"].values()
            )
            accuracy, seconds = summary["accuracy"]["last"], summary["seconds"]["total"]
            table.add_row(
                name, dataset, f"{accuracy:.3f}", rounds, f"{seconds:.1f}", up, down, verdict
            )
    Console(width=200).print(table)
    return good


def check_reference(methods: list[str]) -> bool:
    table = Table("method", "rounds", "ours (4 seeds)", "independent", "three spreads", "")
    good = True
    for method in (m for m in REFERENCE if m in methods):
        curves = []
        for seed in range(4):
            _, rows = run([f"method={method}", *SETTING, f"seed={seed}"])
            curves.append([row["acc_global"] for row in rows if row["acc_global"] is not None])
        for rounds, expected in ((10, REFERENCE[method][0]), (20, REFERENCE[method][1])):
            ours, allowed = mean(curve[rounds - 1] for curve in curves), 3 * REFERENCE[method][2]
            close = abs(ours - expected) <= allowed
            good &= close
            table.add_row(
                method,
                str(rounds),
                f"{ours:.3f}",
                f"{expected:.3f}",
                f"{allowed:.3f}",
                "ok" if close else "differs",
            )
    Console(width=200).print(table)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(catalogue.choices("method")),
        choices=catalogue.choices("method"),
    )
    parser.add_argument("--dataset", nargs="+", default=["digits", "mnist"])
    args = parser.parse_args()
    shared = ROOT.parent / "shared" / "data"
    if "FEDHET_DATA_DIR" not in os.environ and shared.is_dir():
        os.environ["FEDHET_DATA_DIR"] = str(shared)
    datasets = args.dataset
    places = (Path(os.environ.get("FEDHET_DATA_DIR", "data")), Path("data"))
    if "mnist" in datasets and not any((place / "MNIST").is_dir() for place in places):
        print("MNIST is not here: digits only", file=sys.stderr)
        datasets = [name for name in datasets if name != "mnist"]
    return 0 if all([smoke(datasets, args.only), check_reference(args.only)]) else 1


if __name__ == "__main__":
    sys.exit(main())
