"""Does every method learn?

    python scripts/smoke_methods.py [--only fedavg fedlex ...] [--dataset digits mnist]

Every method runs with the settings of conf/experiment/smoke/<method>.yaml, on the embedded digits
and on MNIST. The script prints accuracy, rounds, seconds and bytes by payload kind. Its exit code
is 1 if for some method the loss does not fall from the first evaluation to the last, or the
accuracy stays below 0.3. Methods without a global model are judged by the means over the clients'
own tests. FedLEx with its literal equation runs too but is not judged: its mask shrinks the steps
so much that it hardly trains at a host's learning rate.

Then FedAvg, FedNorm and FedGMM are compared with independent measurements of the same setting
(docs/methods.md, "An independent check"; docs/figures/independent.yaml has both).

MNIST is looked for as in any run (data_dir, FEDHET_DATA_DIR) and in ../shared/data. Without it only
digits run, and a message says so.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pyarrow.parquet
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# This checkout's fedhet, wherever the command is started.
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "figures")]

import tables  # noqa: E402
from measure import measure  # noqa: E402

import fedhet  # noqa: E402
from fedhet import config  # noqa: E402
from fedhet.config import catalogue  # noqa: E402
from fedhet.config.targets import find_target  # noqa: E402
from fedhet.record import terminal  # noqa: E402

LEAST_ACCURACY = 0.3
LITERAL = ("fedlex, literal", ["experiment=smoke/fedlex", "plugin.fedlex.rescale=none"])
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
    """Print our mean accuracies beside the independent ones; return whether all are close.

    Two means may differ by two standard errors of their difference, which our own seeds tell, and
    by what the independent one was rounded.
    """
    every = tables.tables(ROOT)["independent"]
    chosen = {f"method={method}" for method in methods}
    rows = {row: lines for row, lines in every.rows.items() if lines.split()[0] in chosen}
    if not rows:
        return True
    table = replace(every, rows=rows)
    shown = Table("run", "after", f"ours ({table.seeds} seeds)", "independent", "allowed", "")
    good = True
    ours = measure(table)
    for cell in table.cells:
        values = ours[cell.key]
        reference = table.reference[cell.row]
        printed = reference[cell.column]
        error = stdev(values) * math.sqrt(1 / len(values) + 1 / reference["seeds"])
        allowed = 2 * error + 0.5 * 10 ** -len(printed.partition(".")[2])
        close = abs(mean(values) - float(printed)) <= allowed
        good &= close
        verdict = "ok" if close else "differs"
        shown.add_row(
            cell.row, cell.column, f"{mean(values):.3f}", printed, f"{allowed:.3f}", verdict
        )
    Console(width=200).print(shown)
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
