"""Write docs/leaderboard.md from the cells in docs/leaderboard/.

python scripts/leaderboard.py FOLDER     take over the finished cells of an experiment first
python scripts/leaderboard.py            write the page from the cells that are there
python scripts/leaderboard.py --check    say whether the page is up to date

The cells come from `python -m fedhet experiment=leaderboard` and `experiment=leaderboard_personal`,
in as many parts as one likes. A cell that is taken over again replaces its earlier row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # this checkout, wherever it is started

from leaderboard_tables import global_costs, joined, overall, personal_costs, ranked  # noqa: E402
from pages import AsWritten, check_experiment, filled, finished, write_or_check  # noqa: E402

from fedhet.experiment import cells as experiment_cells  # noqa: E402
from fedhet.experiment import definition  # noqa: E402
from fedhet.experiment.code import Code  # noqa: E402
from fedhet.record.deciding import own_models, own_score, validation_score  # noqa: E402
from fedhet.report import statistics  # noqa: E402

PAGE = "docs/leaderboard.md"
KEY = ["kind", "method", "setting", "seed", "tuned"]
Values = dict[str, Any]


@dataclass(frozen=True)
class Board:
    """A comparison on the page.

    Attributes:
        cells: the file of its cells.
        block: the comment with which its part of the page begins.
        heading: the heading of a dataset, but for its name.
        score: the column of the file that is compared.
        entries: from the folder of a run and its summary.json, the columns that only it has.
        costs: the second table of a dataset, from its runs and trials.
    """

    cells: str
    block: str
    heading: str
    score: str
    entries: Callable[[Path, Values], Values]
    costs: Callable[[pd.DataFrame, pd.DataFrame], Iterator[str]]


# ---- from a folder to the CSV file
def rows(folder: Path, record: Values, board: Board) -> Iterator[Values]:
    """The finished cells of an experiment folder, whose experiment.json is `record`."""
    for cell, home, code, summary in finished(folder, record):
        lines = (home / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [json.loads(line) for line in lines]
        ended = summary["status"] == "ok"
        metric = record["report"]["metric"]
        sent = [sum(kinds.values()) for kinds in summary.get("bytes", {}).values()]
        yield {
            "kind": cell["kind"],
            **cell["axes"],
            "tuned": json.dumps(cell["tuned"], sort_keys=True),
            "diverged": not ended,
            "validation": validation_score(summary, steps, metric) if ended else None,
            **board.entries(home, summary),
            "megabytes": round(sum(sent) / 1e6, 3),
            "seconds": round(summary.get("seconds", {}).get("train", 0.0), 3),
            "sha256": str(summary.get("weights_sha256"))[:16],
            "code": Code.text(code),
        }


def _of_global_model(home: Path, summary: Values) -> Values:
    accuracy = summary.get("accuracy") or {}
    last = accuracy.get("last")
    return {
        "diverged": summary["status"] != "ok" or summary.get("loss") is None,
        # A run that has diverged before its first evaluation has no score, which counts as 0.
        "accuracy": 0.0 if summary["status"] != "ok" and last is None else last,
        "best_val": accuracy.get("best_val"),
        "clients_mean": summary.get("acc_clients_mean"),
        "personal": (summary.get("personal") or {}).get("last"),
        "worst_decile": summary.get("acc_clients_worst_decile"),
        **{
            f"rounds_to_{target['accuracy']:g}": target["rounds"]
            for target in summary.get("targets", [])
        },
    }


def _of_own_models(home: Path, summary: Values) -> Values:
    models = own_models(summary, "personal") or "global"
    has_global = "global" in summary.get("models", ())
    # A run that has diverged before its first evaluation has no score, which counts as 0.
    score = own_score(summary, "personal")
    return {
        "models": models,
        "score": 0.0 if score is None else score,
        "global": summary.get("acc_clients_mean") if has_global else None,
        "worst_decile": _worst_decile(home, models),
        "evaluation": round(summary.get("seconds", {}).get("evaluate", 0.0), 3),
    }


def _worst_decile(home: Path, models: str) -> float:
    """The mean accuracy of the worst tenth of the clients, at least one; 0 without an evaluation.

    It is that of these models on the clients' test data at the last evaluation.
    """
    files = sorted((home / "clients").glob("*.parquet"))
    if not files:
        return 0.0
    last = pd.read_parquet(files[-1])
    wanted = (last["split"] == "test") & (last["model"] == models) & (last["metric"] == "accuracy")
    scores = last.loc[wanted, "value"].sort_values()
    return float(scores.iloc[: max(1, len(scores) // 10)].mean())


def take_over(folder: Path, record: Values, root: Path) -> None:
    """Add the folder's cells to the CSV file of its board.

    A run replaces the earlier one of its place, also if its trials have chosen another value; and
    earlier trials go of values that are no longer tried.

    Args:
        folder: the folder.
        record: its experiment.json.
        root: where docs/ is.
    """
    board = BOARDS[record["experiment"]]
    path = root / board.cells
    found = pd.DataFrame(rows(folder, record, board))
    if found.empty:
        raise SystemExit(f"{folder}: none of its cells has ended")
    if path.exists():
        earlier = pd.read_csv(path)
        again = set(found.loc[found["kind"] == "run", KEY[:-1]].itertuples(index=False, name=None))
        trials = [cell for cell in record["cells"] if cell["kind"] == "trial"]
        tried = {(*_place(cell), json.dumps(cell["tuned"], sort_keys=True)) for cell in trials}
        places = set(map(_place, trials))
        stays = [
            key[:-1] not in again if key[0] == "run" else key in tried or key[:-1] not in places
            for key in earlier[KEY].itertuples(index=False, name=None)
        ]
        found = pd.concat([earlier[stays], found], ignore_index=True)
    found = found.drop_duplicates(KEY, keep="last").sort_values(KEY, kind="stable")
    path.parent.mkdir(exist_ok=True)
    found.round(6).to_csv(path, index=False)


def _place(cell: Values) -> tuple[str, str, str, int]:
    axes = cell["axes"]
    return cell["kind"], axes["method"], axes["setting"], axes["seed"]


# ---- from the CSV files to the page
BOARDS = {
    "leaderboard": Board(
        "docs/leaderboard/cells.csv",
        "<!-- leaderboard -->",
        "##",
        "accuracy",
        _of_global_model,
        global_costs,
    ),
    "leaderboard_personal": Board(
        "docs/leaderboard/personal.csv",
        "<!-- leaderboard: personal -->",
        "###",
        "score",
        _of_own_models,
        personal_costs,
    ),
}


def page(root: Path) -> str:
    """The page as it should be."""
    text = (root / PAGE).read_text(encoding="utf-8")
    for name, board in BOARDS.items():
        lines = "\n".join(_blocks(name, board, pd.read_csv(root / board.cells)))
        text = filled(text, board.block, lines, "<!-- end leaderboard -->")
    return text


def _blocks(name: str, board: Board, cells: pd.DataFrame) -> Iterator[str]:
    experiment = definition.read([f"experiment={name}"])
    assert experiment is not None
    settings = [str(value.label) for value in experiment.axes["setting"]]
    runs = cells[cells["kind"] == "run"]
    if runs["setting"].nunique() >= statistics.FEWEST_CONDITIONS:
        yield f"{board.heading} All settings\n"
        yield from overall(runs, board.score)
    for dataset in dict.fromkeys(label.partition(",")[0] for label in settings):
        own = runs[runs["setting"].str.startswith(f"{dataset},")]
        yield f"{board.heading} {dataset}\n"
        if own.empty:
            yield "Not run yet.\n"
            continue
        tried = cells[(cells["kind"] == "trial") & cells["setting"].isin(own["setting"])]
        order = [label for label in settings if label in set(own["setting"])]
        yield from ranked(own, order, board.score)
        yield from board.costs(own, tried)
        yield f"{len(own)} runs and {len(tried)} trials; {joined(sorted(set(own['code'])))}.\n"
    every = len(experiment_cells.runs(experiment)) + len(experiment_cells.trials(experiment))
    yield f"{len(cells)} of {every} cells have been run."


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Write the page, or compare it with --check; return 1 if it is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=AsWritten)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    for folder in options.folders:
        record = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
        if record["experiment"] not in BOARDS:
            raise SystemExit(f"{folder} holds the experiment {record['experiment']}, of no board")
        check_experiment(folder, record, record["experiment"])
        take_over(folder, record, root)
    return write_or_check(root, PAGE, page(root), "leaderboard.py", check=options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
