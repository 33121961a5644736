"""Write docs/leaderboard.md from docs/leaderboard/cells.csv.

python scripts/leaderboard.py FOLDER     take over the finished cells of an experiment first
python scripts/leaderboard.py            write the page from the cells that are there
python scripts/leaderboard.py --check    say whether the page is up to date

The cells come from `python -m fedhet experiment=leaderboard`, in as many parts as one likes. A cell
that is taken over again replaces its earlier row.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedhet.experiment import cells as experiment_cells
from fedhet.experiment import definition
from fedhet.experiment.code import Code
from fedhet.report import statistics
from fedhet.report.scores import against_best

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/leaderboard.md"
CELLS = "docs/leaderboard/cells.csv"
BLOCK = re.compile(r"(<!-- leaderboard -->\n).*?(<!-- end leaderboard -->)", re.DOTALL)
KEY = ["kind", "method", "setting", "seed", "tuned"]
HOST = "FedAvg"
REAL, IF_NORMAL = "▼", "▽"  # worse than the best of the setting
CHANCE = 0.2  # a score below it, of ten classes, is hardly better than a guess


# ---- from a folder to the CSV file
def rows(folder: Path) -> Iterator[dict[str, object]]:
    """The finished cells of an experiment folder."""
    record = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    for cell in record["cells"]:
        home = folder / cell["folder"]
        state = home / "cell.json"
        known = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
        if known.get("status") != "finished":
            continue
        summary = json.loads((home / "summary.json").read_text(encoding="utf-8"))
        lines = (home / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
        last = json.loads(lines[-1]) if lines else {}
        ended = summary["status"] == "ok"
        accuracy = summary.get("accuracy") or {}
        sent = [sum(kinds.values()) for kinds in summary.get("bytes", {}).values()]
        yield {
            "kind": cell["kind"],
            **cell["axes"],
            "tuned": json.dumps(cell["tuned"], sort_keys=True),
            "diverged": not ended or summary.get("loss") is None,
            "validation": last.get("acc_val_weighted") if ended else None,
            "accuracy": accuracy.get("last"),
            "best_val": accuracy.get("best_val"),
            "clients_mean": summary.get("acc_clients_mean"),
            "personal": (summary.get("personal") or {}).get("last"),
            "worst_decile": summary.get("acc_clients_worst_decile"),
            **{
                f"rounds_to_{target['accuracy']:g}": target["rounds"]
                for target in summary.get("targets", [])
            },
            "megabytes": round(sum(sent) / 1e6, 3),
            "seconds": round(summary.get("seconds", {}).get("train", 0.0), 3),
            "sha256": str(summary.get("weights_sha256"))[:16],
            "code": Code.text(known.get("code", {})),
        }


def take_over(folder: Path, path: Path) -> None:
    """Add the folder's cells to the CSV file."""
    found = pd.DataFrame(rows(folder))
    if path.exists():
        found = pd.concat([pd.read_csv(path), found], ignore_index=True)
    found = found.drop_duplicates(KEY, keep="last").sort_values(KEY, kind="stable")
    path.parent.mkdir(exist_ok=True)
    found.round(6).to_csv(path, index=False)


# ---- from the CSV file to the page
def page(root: Path) -> str:
    """The page as it should be."""
    text = (root / PAGE).read_text(encoding="utf-8")
    lines = "\n".join(_blocks(pd.read_csv(root / CELLS)))
    return BLOCK.sub(lambda m: f"{m[1]}{lines}\n{m[2]}", text)


def _blocks(cells: pd.DataFrame) -> Iterator[str]:
    experiment = definition.read(["experiment=leaderboard"])
    assert experiment is not None
    runs = cells[cells["kind"] == "run"]
    for dataset in dict.fromkeys(name.partition(",")[0] for name in _labels(experiment, "setting")):
        own = runs[runs["setting"].str.startswith(f"{dataset},")]
        yield f"## {dataset}\n"
        if own.empty:
            yield "Not run yet.\n"
            continue
        tried = cells[(cells["kind"] == "trial") & cells["setting"].isin(own["setting"])]
        order = [name for name in _labels(experiment, "setting") if name in set(own["setting"])]
        blocks = own.pivot_table("accuracy", ["setting", "seed"], "method").dropna(axis=1)
        ranking = statistics.rank(blocks)
        ranks = blocks.rank(axis=1, ascending=False).mean().sort_values()
        yield from _scores(own, order, ranks)
        if ranking is not None:
            best = str(ranks.index[0])
            told = [str(m) for m in ranks.index if ranking.nemenyi.loc[best, m] < 0.05]
            yield (
                f"Over the settings, {best} has the best mean rank. By Nemenyi's test, over"
                f" {ranking.blocks} pairs of a setting and a seed, and so of these settings only,"
                f" it differs from {_joined(told) if told else 'no other method'}; the critical"
                f" distance of mean ranks is {ranking.critical:.1f}.\n"
            )
        yield from _costs(own, tried, ranks)
        yield f"{len(own)} runs and {len(tried)} trials; {_joined(sorted(set(own['code'])))}.\n"
    every = len(experiment_cells.runs(experiment)) + len(experiment_cells.trials(experiment))
    yield f"{len(cells)} of {every} cells have been run."


def _scores(runs: pd.DataFrame, settings: Sequence[str], ranks: pd.Series) -> Iterator[str]:
    groups = runs.groupby(["method", "setting"])["accuracy"]
    means, stds = groups.mean().unstack(), groups.std().unstack()
    blocks = {
        name: runs[runs["setting"] == name].pivot(index="seed", columns="method", values="accuracy")
        for name in settings
    }
    bests = {name: str(blocks[name].dropna().mean().idxmax()) for name in settings}
    verdicts = {name: against_best(blocks[name], bests[name]) for name in settings}
    marks = {statistics.REAL: f" {REAL}", statistics.IF_NORMAL: f" {IF_NORMAL}"}
    yield f"| method | mean rank | {' | '.join(name.partition(', ')[2] for name in settings)} |"
    yield "|---|---|" + "---|" * len(settings)
    for method, rank in ranks.items():
        entries = []
        for name in settings:
            text = f"{means.loc[method, name]:.3f} ± {stds.loc[method, name]:.3f}"
            mark = marks.get(verdicts[name].get(str(method), ""), "")
            entries.append(f"**{text}**" if method == bests[name] else f"{text}{mark}")
        yield f"| {method} | {rank:.1f} | {' | '.join(entries)} |"
    yield ""
    yield _told(blocks, verdicts)


def _told(blocks: Mapping[str, pd.DataFrame], verdicts: Mapping[str, Mapping[str, str]]) -> str:
    """What the bold entries and the marks of a table of scores mean, and what they do not."""
    methods = max(len(table.columns) for table in blocks.values())
    couples = methods * (methods - 1) // 2
    seeds = min(statistics.fewest_pairs(table) for table in blocks.values())
    found = {verdict for told in verdicts.values() for verdict in told.values()}
    text = "Bold is the best mean of a setting. "
    if statistics.enough(seeds, couples):
        text += f"{REAL} is worse than it by Wilcoxon's test, with Holm's correction. "
    else:
        text += (
            f"With {seeds} seeds, no rank test within a setting can show a difference between"
            f" {methods} methods (that takes {statistics.pairs_needed(couples)} seeds), so that the"
            " best mean of a setting may be so by chance. "
        )
    if statistics.IF_NORMAL in found:
        text += (
            f"{IF_NORMAL} is worse than the best by the paired t-test with Holm's correction, which"
            " holds if differences between seeds are normal, and that so few seeds cannot show. "
        )
    elif statistics.REAL not in found:
        text += "Nor does the paired t-test, with Holm's correction, tell any from the best. "
    return f"{text.strip()}\n"


def _costs(runs: pd.DataFrame, trials: pd.DataFrame, ranks: pd.Series) -> Iterator[str]:
    """What a table of accuracies does not tell: worst clients, variance, tuning and costs."""
    host = runs[runs["method"] == HOST].groupby("setting")[["megabytes", "seconds"]].mean()
    heads = [
        "clients' mean",
        "personal models",
        "worst tenth of the clients",
        "spread over seeds",
        "rounds to .8",
        "rounds to .9",
    ]
    heads += ["median trial against the best", "trials below 20 %", "bytes", "time"]
    yield f"| method | {' | '.join(heads)} |"
    yield "|---|" + "---|" * len(heads)
    for method in ranks.index:
        own = runs[runs["method"] == method]
        tried = trials[trials["method"] == method]
        best = tried.groupby("setting")["validation"].max()
        lost = best - tried.fillna({"validation": 0.0}).groupby("setting")["validation"].median()
        failed = (tried["validation"].fillna(0.0) < CHANCE).mean()
        relative = own.groupby("setting")[["megabytes", "seconds"]].mean() / host
        entries = [
            f"{own['clients_mean'].mean():.3f}",
            f"{own['personal'].mean():.3f}" if own["personal"].notna().any() else "–",
            f"{own['worst_decile'].mean():.3f}",
            f"{own.groupby('setting')['accuracy'].std().mean():.3f}",
            *(_rounds(own[f"rounds_to_{target}"]) for target in ("0.8", "0.9")),
            f"-{lost.mean():.3f}",
            f"{failed:.0%}",
            *(f"{relative[name].mean():.1f}" for name in ("megabytes", "seconds")),
        ]
        yield f"| {method} | {' | '.join(entries)} |"
    yield ""


def _rounds(values: pd.Series) -> str:
    """The median number of rounds, and how many runs reached the target if not all did."""
    reached = values.dropna()
    if reached.empty:
        return "never"
    part = "" if len(reached) == len(values) else f" ({len(reached)} of {len(values)})"
    return f"{reached.median():.0f}{part}"


def _labels(experiment: definition.Experiment, axis: str) -> list[str]:
    return [str(value.label) for value in experiment.axes[axis]]


def _joined(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Write the page, or compare it with --check; return 1 if it is not up to date."""
    check = "--check" in argv
    for folder in (Path(word) for word in argv if word != "--check"):
        take_over(folder, root / CELLS)
    text = page(root)
    if not check:
        (root / PAGE).write_text(text, encoding="utf-8")
        return 0
    if (root / PAGE).read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is not up to date: python scripts/leaderboard.py")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
