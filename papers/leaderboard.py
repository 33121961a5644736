"""The leaderboards: all methods, compared by the global model or by the clients' own models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedhet.core.check import counted
from fedhet.runs.record.scores import own_models, own_score, validation_score
from fedhet.runs.record.summary import all_steps
from fedhet.study import cells, definition
from fedhet.study.code import Code
from fedhet.study.report import statistics
from fedhet.study.report.comparisons import hidden_by_mean
from fedhet.study.report.document import FigureFile, joined
from fedhet.study.report.plots import differences
from fedhet.study.report.results import NOT_RUN, FoundRun, Results
from fedhet.study.tuning import Space, at_the_edge
from papers import design
from papers.tables import markdown

HOST = "FedAvg"
BETTER, WORSE = " ▲", " ▼"  # than FedAvg in a setting
SEEDS = 10  # differences in a setting are tested if it has at least so many seeds
CHANCE = 0.2  # with ten classes, a score below it is hardly better than a guess
KEY = ["kind", "method", "setting", "seed", "tuned"]
COSTS = ["megabytes", "seconds", "evaluation"]


class Board(NamedTuple):
    """A comparison of all methods.

    Attributes:
        heading: the marks of a dataset's heading in Markdown.
        score: the compared column.
        clients: the column of the clients' mean score.
        other: the title and the column of the other kind of models.
        pooled: whether the pool of experiment=design gives the margin of this score.
    """

    heading: str
    score: str
    clients: str
    other: tuple[str, str]
    pooled: bool = True


# Name of the experiment -> its board.
BOARDS = {
    "leaderboard": Board("##", "accuracy", "clients_mean", ("personal models", "personal")),
    "leaderboard_personal": Board("###", "score", "score", ("global model", "global"), False),
    "hospitals": Board("##", "score", "score", ("global model", "global")),
}


# ---- from a folder to the csv file
def take_over(read: Results, path: Path) -> None:
    """Add the finished runs and trials to the csv file of their board.

    A run of this folder removes the earlier run with the same labels, even if its trials have
    chosen another value or if it has failed. Earlier trials are removed if this experiment no
    longer tries their values.
    """
    ended = [cell for cell in read.source.cells if cell.counts]
    found = pd.DataFrame(_row(cell, read, path.stem) for cell in ended)
    earlier = pd.read_csv(path) if path.exists() else pd.DataFrame()
    if path.stem == "leaderboard":
        known = pd.concat([earlier, found])
        hosts = known[(known["kind"] == "run") & (known["method"] == HOST)]
        limits = hosts.groupby(["setting", "seed"])["steps"].last()
        found["equal_steps"] = [
            None if cell.trial else _after(limits.get((row.setting, row.seed)), cell, read)
            for cell, row in zip(ended, found.itertuples(), strict=True)
        ]
    if len(earlier):
        trials = [cell for cell in read.source.experiment["cells"] if cell["kind"] == "trial"]
        tried = {
            (*_place("trial", cell["axes"]), json.dumps(cell["tuned"], sort_keys=True))
            for cell in trials
        }
        begun = [cell for cell in read.source.cells if cell.status != NOT_RUN]
        places = {_place("trial" if cell.trial else "run", cell.axes) for cell in begun}
        keys = earlier[KEY].itertuples(index=False, name=None)
        stays = [key in tried or key[:-1] not in places for key in keys]
        found = pd.concat([earlier[stays], found], ignore_index=True)
    found = found.drop_duplicates(KEY, keep="last").sort_values(KEY, kind="stable")
    found.round(6).to_csv(path, index=False)


def _after(limit: float | None, cell: FoundRun, read: Results) -> float | None:
    """Return the score at the first evaluation after the clients took at least `limit` steps.

    If a run has diverged before, return its last score; if it has too few steps, return None.
    """
    steps = read.steps(cell)
    if limit is None or np.isnan(limit):
        return None
    for number, step in enumerate(steps, 1):
        if step["acc_global"] is not None and (all_steps(steps[:number]) or 0) >= limit:
            return float(step["acc_global"])
    return _of_global_model(cell, read)["accuracy"] if cell.summary["status"] != "ok" else None


def _place(kind: str, axes: Mapping[str, Any]) -> tuple[str, ...]:
    return (kind, *(axes[name] for name in KEY[1:-1]))


def _row(cell: FoundRun, read: Results, board: str) -> dict[str, Any]:
    summary = cell.summary
    ended = summary["status"] == "ok"
    metric = read.source.experiment["report"]["metric"]
    sent = sum(sum(kinds.values()) for kinds in summary.get("bytes", {}).values())
    of_board = _of_global_model if board == "leaderboard" else _of_own_models
    return {
        "kind": "trial" if cell.trial else "run",
        **cell.axes,
        "tuned": json.dumps(cell.tuned, sort_keys=True),
        "diverged": not ended,
        "validation": validation_score(summary, read.steps(cell), metric) if ended else None,
        **of_board(cell, read),
        "megabytes": round(sent / 1e6, 3),
        "seconds": round(summary.get("seconds", {}).get("train", 0.0), 3),
        "steps": summary.get("steps"),
        "cpu": read.environment(cell).get("cpu"),
        "sha256": str(summary.get("weights_sha256"))[:16],
        "code": Code.text(cell.code),
    }


def _of_global_model(cell: FoundRun, read: Results) -> dict[str, Any]:
    summary = cell.summary
    accuracy = summary.get("accuracy") or {}
    last = accuracy.get("last")
    return {
        "diverged": summary["status"] != "ok" or summary.get("loss") is None,
        # A run that diverged before its first evaluation has no score, and counts as 0.
        "accuracy": 0.0 if summary["status"] != "ok" and last is None else last,
        "best_val": accuracy.get("best_val"),
        "clients_mean": summary.get("acc_clients_mean"),
        "personal": (summary.get("personal") or {}).get("last"),
        "worst_decile": summary.get("acc_clients_worst_decile"),
        **{
            f"rounds_to_{reached['accuracy']:g}": reached["rounds"]
            for reached in summary.get("thresholds", [])
        },
    }


def _of_own_models(cell: FoundRun, read: Results) -> dict[str, Any]:
    summary = cell.summary
    models = own_models(summary, "personal") or "global"
    has_global = "global" in summary.get("models", ())
    clients = read.last_clients.query(
        "folder == @cell.name and split == 'test' and model == @models and metric == 'accuracy'"
    )
    details = summary.get("details", {}).get("clients", {}).get(models, {})
    worst = clients["value"].sort_values().iloc[: max(1, len(clients) // 10)]
    return {
        "models": models,
        "score": own_score(summary, "personal") or 0.0,  # no score if it diverged at once
        "global": summary.get("acc_clients_mean") if has_global else None,
        "worst_decile": None if cell.trial else float(worst.mean()) if len(worst) else 0.0,
        "auc": details.get("auc"),
        "evaluation": round(summary.get("seconds", {}).get("evaluate", 0.0), 3),
    }


# ---- from the csv file to the tables
def tables(name: str, every: pd.DataFrame) -> Iterator[str]:
    """Yield all tables of a board, and sentences on their results.

    Args:
        name: the name of the experiment.
        every: the kept runs and trials.
    """
    board = BOARDS[name]
    experiment = definition.read([f"experiment={name}"])
    assert experiment is not None
    settings = [str(value.label) for value in experiment.axes["setting"]]
    runs = every[every["kind"] == "run"]
    yield f"{board.heading} All settings"
    yield from overall(runs, board.score, pooled=board.pooled)
    yield from at_equal_steps(runs)
    for dataset in dict.fromkeys(label.partition(",")[0] for label in settings):
        own = runs[runs["setting"].str.startswith(f"{dataset},")]
        yield f"{board.heading} {dataset}"
        if own.empty:
            yield "Not run yet."
            continue
        tried = every[(every["kind"] == "trial") & every["setting"].isin(own["setting"])]
        order = [label for label in settings if label in set(own["setting"])]
        yield from ranked(own, order, board.score, pooled=board.pooled)
        yield costs(own, tried, board)
        yield from edges(own, tried)
        yield f"{len(own)} runs and {len(tried)} trials; {joined(sorted(set(own['code'])))}."
    count = len(cells.runs(experiment)) + len(cells.trials(experiment))
    yield f"{len(every)} of {count} runs and trials are complete."


class Compared(NamedTuple):
    """Each method against FedAvg over the settings with enough seeds.

    Attributes:
        settings: the settings with enough seeds; all settings if none has enough.
        tested: whether the settings have enough seeds; else nothing is tested.
        margin: a difference must be larger than this.
        ranks: the mean rank of each method, best first.
        gains: (settings, other methods), the mean differences.
        found: see `statistics.compare`; best first.
    """

    settings: list[str]
    tested: bool
    margin: float
    ranks: pd.Series
    gains: pd.DataFrame
    found: pd.DataFrame


def compared(runs: pd.DataFrame, score: str, *, pooled: bool = True) -> Compared:
    """Compare the methods that have all runs.

    A seed is one pair of the tests, with its mean over the settings. Settings are no independent
    pairs, because settings of one dataset share data and seeds.

    Args:
        runs: the runs of all datasets.
        score: the compared column.
        pooled: see `Board`; if false, the margin is 0.
    """
    table = runs.pivot_table(score, ["setting", "seed"], "method")
    seeds = table.groupby("setting").size()
    known = [*seeds.index[seeds >= SEEDS]]
    tested = bool(known)
    known = known or [*seeds.index]
    table = table.loc[known].dropna(axis=1)
    means = table.groupby("setting").mean()
    gains = means.drop(columns=HOST).sub(means[HOST], axis=0)
    margin = design.margin_over(known) if tested and pooled else 0.0
    found = statistics.compare(table.groupby("seed").mean(), HOST, effects=tested, margin=margin)
    found = found.sort_values("difference", ascending=False, ignore_index=True)
    return Compared(known, tested, margin, mean_ranks(means), gains, found)


def overall(runs: pd.DataFrame, score: str, *, pooled: bool = True) -> Iterator[str]:
    """Yield the table of all methods over the settings, and which are better or worse than FedAvg.

    Args:
        runs, score, pooled: see `compared`.
    """
    known, tested, margin, ranks, gains, found = compared(runs, score, pooled=pooled)
    p = f"p, beyond {design.points(margin)} points" if margin else "p"
    by_method = found.set_index("a")
    rows = []
    for method, rank in ranks.items():
        row = {"method": str(method), "mean rank": f"{rank:.1f}"}
        row |= dict.fromkeys((f"against {HOST}", "95 %", "settings in which it is better", p), "")
        if method != HOST:
            own = by_method.loc[method]
            row[f"against {HOST}"] = f"{100 * own['difference']:+.1f}"
            if len(known) > 1:
                wins = (gains[method].round(4) > 0).sum()  # files have six digits
                row["settings in which it is better"] = f"{wins} of {len(known)}"
            if tested and not np.isnan(own["low"]):
                row["95 %"] = f"{100 * own['low']:+.1f} to {100 * own['high']:+.1f}"
            if tested:
                row[p] = f"{own['p']:.3f}"
        rows.append(row)
    yield markdown(rows)
    yield from _lacking(runs[runs["setting"].isin(known)], ranks)
    if not tested:
        yield (
            f"No setting has been run with {SEEDS} seeds. Therefore nothing is tested, and none of"
            " these differences is shown."
        )
        return
    real = found[found["verdict"] == statistics.SHOWN]
    better = [str(row.a) for row in real.itertuples() if row.difference > 0]
    worse = [str(row.a) for row in real.itertuples() if row.difference < 0]
    beyond = f", by more than the {design.points(margin)} points of tuning," if margin else ""
    place = f"Over these {counted(len(known), 'setting')}" if len(known) > 1 else "In this setting"
    yield (
        f"{place}{beyond} {joined(better) or 'no method'}"
        f" {'are' if len(better) > 1 else 'is'} shown to be better than {HOST}, and"
        f" {joined(worse) or 'none'} to be worse."
    )
    hiding: dict[str, list[str]] = {}
    for method in [*better, *worse] if len(known) > 1 else ():
        own = gains[method] if method in better else -gains[method]
        if hidden := hidden_by_mean(own.to_dict(), lambda gain: f"{100 * gain:z.1f}"):
            hiding.setdefault(hidden, []).append(method)
    if hiding:
        yield "What these means hide: {}.".format(
            "; ".join(f"{joined(methods)} ({hidden})" for hidden, methods in hiding.items())
        )


def picture(runs: pd.DataFrame, board: Board, folder: Path) -> list[FigureFile]:
    """Draw the differences that `compared` finds; draw nothing if nothing is tested."""
    drawn = compared(runs, board.score, pooled=board.pooled)
    if not drawn.tested:
        return []
    own = {name: drawn.gains.loc[name] for name in drawn.settings}
    return differences(drawn.found, own, "accuracy", HOST, folder)


def at_equal_steps(runs: pd.DataFrame) -> Iterator[str]:
    """Yield the comparison of all methods after as many local steps as FedAvg takes in all.

    Yield nothing if no run has such a score, as for personal models and runs of earlier versions.

    Args:
        runs: the runs of all datasets.
    """
    column = "equal_steps"
    if column not in runs or runs[column].isna().all():
        return
    own = runs[runs["method"] == HOST].groupby("setting")[column].apply(lambda s: s.notna().all())
    runs = runs[runs["setting"].map(own)]
    groups = runs.groupby("method")
    reach = groups[column].apply(lambda scores: scores.notna().all())
    yield "### At equal local steps"
    yield from overall(runs[runs["method"].map(reach)], column)
    steps = groups["steps"].sum() / groups["steps"].sum()[HOST]
    more = [f"{method} {steps[method]:.1f}" for method in steps.index if steps[method] > 1.05]
    yield f"Steps in all rounds, as multiples of {HOST}'s: {joined(more) or 'all have as many'}."
    if fewer := [str(method) for method in reach.index if not reach[method]]:
        yield f"Left out, because some runs never take as many steps: {joined(fewer)}."


def ranked(
    runs: pd.DataFrame, settings: Sequence[str], score: str, *, pooled: bool = True
) -> Iterator[str]:
    """Yield the table of scores by method and setting, sorted by mean rank, and its legend.

    Args:
        runs: the runs of one dataset.
        settings: its settings, in the order of the columns.
        score: the compared column.
        pooled: see `Board`.
    """
    ranks = mean_ranks(_pairs(runs, score))
    groups = runs.groupby(["method", "setting"])[score]
    means, stds = groups.mean().unstack(), groups.std().unstack()
    blocks = {
        name: _pairs(runs[runs["setting"] == name], score).droplevel("setting") for name in settings
    }
    bests = {name: str(blocks[name].mean().idxmax()) for name in settings}
    margins = {
        name: design.margin_over([name]) if pooled and len(blocks[name]) >= SEEDS else 0.0
        for name in settings
    }
    found = {
        name: statistics.differences(block, HOST, effects=False, margin=margins[name])
        for name, block in blocks.items()
    }
    decided = statistics.decide(pd.concat(found, names=["setting"]).reset_index("setting"))
    shown = decided[decided["verdict"] == statistics.SHOWN].set_index(["a", "setting"])
    rows = []
    for method, rank in ranks.items():
        row = {"method": str(method), "mean rank": f"{rank:.1f}"}
        for name in settings:
            text = f"{means.loc[method, name]:.3f} ± {stds.loc[method, name]:.3f}"
            own = f"**{text}**" if method == bests[name] else text
            if (method, name) in shown.index:
                own += BETTER if shown.loc[(method, name), "difference"] > 0 else WORSE
            row[name.partition(", ")[2]] = own
        rows.append(row)
    yield markdown(rows)
    yield _summary_line(int(decided["pairs"].min()), len(decided), [*margins.values()])
    yield from _lacking(runs, ranks)


def _lacking(runs: pd.DataFrame, ranks: pd.Series) -> Iterator[str]:
    """Name the methods that lack a run, and therefore cannot be compared."""
    if lacking := [str(m) for m in dict.fromkeys(runs["method"]) if m not in ranks.index]:
        yield f"Not compared, because runs have failed or are missing: {joined(lacking)}."


def mean_ranks(scores: pd.DataFrame) -> pd.Series:
    """Return the mean rank of each column, best first; scores printed alike share a rank."""
    return statistics.mean_ranks(scores).sort_values(kind="stable")


def _pairs(runs: pd.DataFrame, score: str) -> pd.DataFrame:
    """Return a table with a row per setting and seed; methods that lack a score are left out."""
    return runs.pivot_table(score, ["setting", "seed"], "method").dropna(axis=1)


def _summary_line(seeds: int, comparisons: int, margins: Sequence[float]) -> str:
    """Return the legend of a table of scores: its bold entries and its marks."""
    text = "Bold is the best mean of a setting, perhaps by chance."
    needed = statistics.pairs_needed(comparisons)
    if seeds >= needed:
        least = joined([design.points(margin) for margin in margins])
        beyond = f" (by more than the {least} points of tuning)" if any(margins) else ""
        return (
            f"{text} A method with ▲ is shown to be better than {HOST} in the setting, and a method"
            f" with ▼ to be worse{beyond}, by Wilcoxon's test over {seeds} seeds, with Holm's"
            f" correction for the {comparisons} comparisons of this table."
        )
    return (
        f"{text} No difference from {HOST} is tested: {comparisons} comparisons need {needed}"
        f" seeds, and these have {seeds}."
    )


def costs(runs: pd.DataFrame, trials: pd.DataFrame, board: Board) -> str:
    """Make the table of worst clients, variance, tuning and costs."""
    relative = runs.groupby(["method", "setting"])[[c for c in COSTS if c in runs]].mean()
    title, other = board.other
    rows = []
    for method in mean_ranks(_pairs(runs, board.score)).index:
        own, tried = (part[part["method"] == method] for part in (runs, trials))
        best = tried.groupby("setting")["validation"].max()
        median = tried.fillna({"validation": 0.0}).groupby("setting")["validation"].median()
        row = {
            "method": str(method),
            "clients' mean": f"{own[board.clients].mean():.3f}",
            title: f"{own[other].mean():.3f}" if own[other].notna().any() else "–",
            **({"AUC": f"{own['auc'].mean():.3f}"} if "auc" in own and own["auc"].any() else {}),
            "worst tenth of the clients": f"{own['worst_decile'].mean():.3f}",
            "spread over seeds": f"{own.groupby('setting')[board.score].std().mean():.3f}",
        }
        for target in (column for column in own if column.startswith("rounds_to_")):
            row[f"rounds to {target.removeprefix('rounds_to_0')}"] = _rounds(own[target])
        row["median trial against the best"] = f"-{(best - median).mean():.3f}"
        if board.score == "accuracy":
            row["trials below 20 %"] = f"{(tried['validation'].fillna(0) < CHANCE).mean():.0%}"
        multiples = (relative.loc[method] / relative.loc[HOST]).mean()
        heads = ("bytes", "time", "evaluation")
        row |= {head: f"{value:.1f}" for head, value in zip(heads, multiples, strict=False)}
        rows.append(row)
    return markdown(rows)


def edges(runs: pd.DataFrame, trials: pd.DataFrame) -> Iterator[str]:
    """Name the chosen values at the edge of the tried values."""
    tried = trials["tuned"].map(json.loads).groupby([trials["method"], trials["setting"]]).agg(list)
    listed = []
    for run in runs.drop_duplicates(["method", "setting"]).to_dict("records"):
        chosen, points = json.loads(run["tuned"]), tried[run["method"], run["setting"]]
        space: Space = {key: tuple({point[key] for point in points}) for key in chosen}
        listed += [
            f"{run['method']} {key}={chosen[key]} ({run['setting'].partition(', ')[2]})"
            for key in at_the_edge(chosen, space)
        ]
    if listed:
        yield (
            "These chosen values lie at the edge of the tried values, and better values may lie"
            f" beyond: {joined(listed)}."
        )


def _rounds(values: pd.Series) -> str:
    """Format the median number of rounds, and the number of runs that reached the target."""
    reached = values.dropna()
    if reached.empty:
        return "never"
    part = "" if len(reached) == len(values) else f" ({len(reached)} of {len(values)})"
    return f"{reached.median():.0f}{part}"
