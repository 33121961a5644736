"""The curves of a report: scores by round, by bytes and by seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedhet.core.check import counted
from fedhet.record.deciding import OWN_MODELS
from fedhet.report.document import FigureFile, joined
from fedhet.report.study import Study
from fedhet.report.style import (
    add_legend,
    columns_of,
    legend_height,
    looks,
    pages,
    panels,
    shortened,
    store,
)

AXES = {
    "round": "round",
    "megabytes": "MB sent, up and down",
    "seconds": "seconds of training",
}
MOST_MARKERS = 12


def curves(study: Study, folder: Path) -> list[FigureFile]:
    """Draw the deciding score over the rounds, the bytes and the seconds, a panel per condition."""
    points = curve_points(study)
    files = []
    for x, label in AXES.items():
        for name, conditions in pages(_known(study, points), f"curves-by-{x}"):
            legend = legend_height(study.methods)
            ranges, same = _ranges(points, conditions)
            picture, grid = panels(conditions, legend=legend)
            for axes, condition in zip(grid, conditions, strict=True):
                here = points[points["setting"] == condition]
                draw_curves(axes, here, study.methods, x, label)
                axes.set_ylim(*ranges[condition])
                if x == "round":
                    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            for axes in grid[:: columns_of(len(grid))]:
                axes.set_ylabel(study.title, fontsize=8)
            add_legend(picture, grid, study.methods)
            caption = (
                f"{study.title.capitalize()} by {label}: mean over seeds, with a band of one"
                " standard deviation. A curve ends where the first of its seeds ends."
            )
            caption += _late(points) + ("" if same else " The panels' ranges of scores differ.")
            alt = (
                f"Curves of {study.title} by {label}, one for each of"
                f" {counted(len(study.methods), 'method')}, in"
                f" {counted(len(conditions), 'setting')}. The table of scores has the last values."
            )
            files.append(store(picture, folder, name, caption, alt))
    return files


def draw_curves(
    axes: Axes, points: pd.DataFrame, methods: Sequence[str], x: str, label: str | None = None
) -> None:
    """Draw the methods' means, with a band of one standard deviation.

    Args:
        axes: the panel.
        points: rows of `curve_points` in one setting.
        methods: all methods of the figure, whose colours are the same in every panel.
        x: the column on the horizontal axis.
        label: what stands below it; the name of the column if None.
    """
    for method, look in looks(methods).items():
        own = points[points["method"] == method]
        if own.empty:
            continue
        axes.plot(
            own[x],
            own["mean"],
            color=look.color,
            linestyle=look.line,
            marker=look.marker,
            markersize=3.5,
            markevery=max(1, len(own) // MOST_MARKERS),
            linewidth=1.4,
            label=shortened(method, 40),
        )
        if own["std"].notna().any():
            low, high = own["mean"] - own["std"], own["mean"] + own["std"]
            axes.fill_between(own[x], low, high, color=look.color, alpha=0.14, lw=0)
    axes.set_xlabel(label or x, fontsize=8)
    axes.grid(alpha=0.3)


def curve_points(study: Study) -> pd.DataFrame:
    """A row per method, condition and evaluated round: mean and std over seeds, and the costs."""
    rounds = study.results.rounds
    scores = _scores(study, rounds)
    if scores.isna().all():
        return pd.DataFrame(columns=["method", "setting", "number", *AXES, "mean", "std"])
    ordered = rounds.copy()
    sent = [column for column in rounds if str(column).startswith("bytes.")]
    worked = [c for c in rounds if str(c).startswith("seconds.") and c != "seconds.evaluate"]
    ordered["number"] = ordered.groupby("folder").cumcount() + 1
    ordered["megabytes"] = ordered[sent].sum(axis=1) / 1e6
    ordered["seconds"] = ordered[worked].sum(axis=1)
    ordered[["megabytes", "seconds"]] = ordered.groupby("folder")[["megabytes", "seconds"]].cumsum()
    ordered["score"] = scores
    if not study.target.keys:
        ordered["score"] = -ordered["score"]
    columns = ["folder", "number", "megabytes", "seconds", "score"]
    scored = ordered.loc[ordered["score"].notna(), columns]
    places = study.scores[["method", "setting", "folder"]]
    scored = places.merge(scored, on="folder", validate="one_to_many")
    groups = scored.groupby(["setting", "method", "number"], sort=False)
    points = groups.agg(
        megabytes=("megabytes", "mean"),
        seconds=("seconds", "mean"),
        mean=("score", "mean"),
        std=("score", "std"),
        seeds=("score", "size"),
    ).reset_index()
    most = points.groupby(["setting", "method"])["seeds"].transform("max")
    points = points[points["seeds"] == most].sort_values(["setting", "method", "number"])
    points["round"] = points["number"]
    return points


def _scores(study: Study, rounds: pd.DataFrame) -> pd.Series:
    """The deciding score in each row of `rounds`; all NaN where there is none."""
    target = study.target
    clients = target.clients_key()
    ways = {
        "worst": target.key("clients_worst_decile"),
        **dict.fromkeys(("clients", *OWN_MODELS), clients),
    }
    keys = [ways.get(study.metric, target.key("global")), clients]
    if not target.keys:
        keys = ["loss_global", "loss_clients_mean", "loss_clients_weighted"]
    key = next((k for k in keys if k in rounds and rounds[k].notna().any()), None)
    scores = rounds[key].astype(float) if key else pd.Series(math.nan, index=rounds.index)
    for kind in set(study.own_models.values()):
        of_kind = rounds["folder"].map(study.own_models) == kind
        if (column := target.clients_key(kind)) in rounds:
            scores = scores.mask(of_kind, rounds[column].astype(float))
    return scores


def _known(study: Study, points: pd.DataFrame) -> list[str]:
    return [name for name in study.conditions if (points["setting"] == name).any()]


def _late(points: pd.DataFrame) -> str:
    """A sentence about the methods whose training begins after other phases; "" without any."""
    first = points.groupby("method", sort=False)["number"].min()
    late = first[first > first.min()].items()
    told = joined([f"that of {method} at round {number}" for method, number in late])
    why = "Rounds before the training count too, and have no score, so that some curves begin later"
    return f" {why}: {told}." if told else ""


def _ranges(
    points: pd.DataFrame, conditions: Sequence[str]
) -> tuple[dict[str, Sequence[float]], bool]:
    """The range of each panel, and whether it is the same: where all of them have a part in common.

    Scores of an easy and of a hard data set, which are far apart, would be flat lines in one range.
    """
    own = {name: _limits(points[points["setting"] == name]) for name in conditions}
    lows, highs = zip(*own.values(), strict=True)
    if max(lows) >= min(highs):
        return own, False
    return dict.fromkeys(conditions, (min(lows), max(highs))), True


def _limits(points: pd.DataFrame) -> Sequence[float]:
    """The range of the scores without the lowest tenth: the steep rise hides later differences."""
    scores = points["mean"]
    low, high = float(scores.quantile(0.1)), float(scores.max())
    if high - low > 0.6 * (high - float(scores.min())):
        low = float(scores.min())
    margin = max(0.06 * (high - low), 0.005)
    return low - margin, high + margin
