"""The figures of a report beside the curves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedhet.record.figures import Picture
from fedhet.report.document import FigureFile
from fedhet.report.statistics import Ranking
from fedhet.report.study import Study
from fedhet.report.style import (
    LABEL,
    add_legend,
    legend_height,
    looks,
    methods_at,
    pages,
    panels,
    shortened,
    store,
    widen,
)

MOST_CONDITIONS = 12  # whose label distributions are drawn
GREY = "#555555"


def boxes(study: Study, folder: Path) -> list[FigureFile]:
    """Draw the clients' scores at the last evaluation, a box per method."""
    clients = study.results.last_clients
    if clients.empty or not study.target.keys:
        return []
    score = study.target.score()
    shown = clients[(clients["split"] == "test") & (clients["metric"] == score)]
    shown = study.scores[["method", "setting", "folder"]].merge(
        shown[["folder", "model", "value"]], on="folder", validate="one_to_many"
    )
    # Each run has the scores of the models that count, or else of the first that its clients have.
    first = shown.groupby("folder")["model"].first().to_dict()
    shown = shown[shown["model"] == shown["folder"].map(first | study.own_models)]
    known = [name for name in study.conditions if (shown["setting"] == name).any()]
    files = []
    for name, conditions in pages(known, "clients"):
        picture, grid = panels(conditions, height=1.3 + 0.24 * len(study.methods))
        for axes, condition in zip(grid, conditions, strict=True):
            here = shown[shown["setting"] == condition]
            for place, (method, look) in enumerate(looks(study.methods).items()):
                values = here.loc[here["method"] == method, "value"].dropna()
                if values.empty:
                    continue
                drawn = axes.boxplot(
                    [values],
                    positions=[place],
                    orientation="horizontal",
                    widths=0.65,
                    patch_artist=True,
                    flierprops={"marker": look.marker, "markersize": 2.5, "alpha": 0.6},
                    medianprops={"color": "black", "linewidth": 1.4},
                )
                for box in drawn["boxes"]:
                    box.set(facecolor=f"{look.color}66", edgecolor=look.color, hatch=look.hatch)
            methods_at(axes, study.methods, inverted=True)
            axes.set_xlabel(f"{study.title} of a client", fontsize=8)
            axes.grid(axis="x", alpha=0.3)
        widen(picture, study.methods, len(grid))
        caption = (
            f"{study.title.capitalize()} of the clients on their own test data at the last"
            " evaluation, all seeds together: quartiles, whiskers of at most 1.5 times their"
            " distance, and single clients beyond."
        )
        methods = f"{len(study.methods)} methods in {len(conditions)} settings"
        alt = f"Box plots over clients for {methods}."
        files.append(store(picture, folder, name, caption, alt))
    return files


def label_distribution(study: Study, folder: Path) -> list[FigureFile]:
    """Draw the samples of each client by class, a panel per condition, of its first seed."""
    partitions = {}
    for cell in study.cells:
        condition = study.place(cell)[1]
        if condition not in partitions:
            partition = study.results.partition(cell)
            counts = np.array(partition.get("counts") or [[]])
            if counts.size and counts.ndim == 2:
                seed = cell.axes.get("seed", cell.summary.get("seed"))
                partitions[condition] = (counts, f"{condition}, seed {seed}")
    files = []
    for name, conditions in pages(list(partitions)[:MOST_CONDITIONS], "labels"):
        picture, grid = panels([partitions[s][1] for s in conditions], height=3.0)
        for axes, condition in zip(grid, conditions, strict=True):
            counts = partitions[condition][0]
            shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
            image = axes.imshow(shares.T, cmap="Blues", vmin=0, vmax=1, aspect="auto")
            axes.set_xlabel("client", fontsize=8)
            axes.set_ylabel("class", fontsize=8)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True))
            bar = picture.colorbar(image, ax=axes, pad=0.02)
            bar.ax.tick_params(labelsize=7)
        caption = (
            "Label distribution: the share of each class (rows) among the training samples of each"
            " client (columns), of the first seed of each setting."
        )
        if len(partitions) > MOST_CONDITIONS:
            caption += f" Only the first {MOST_CONDITIONS} of {len(partitions)} settings are drawn."
        alt = f"Maps of classes by clients in {len(conditions)} settings."
        files.append(store(picture, folder, name, caption, alt))
    return files


def win_matrix(study: Study, folder: Path) -> list[FigureFile]:
    """Draw how often each method beats each other one."""
    blocks = study.blocks(study.metric).dropna(axis=1, how="all")
    methods = list(blocks.columns)
    if len(methods) < 2:
        return []
    count = len(methods)
    share = np.full((count, count), math.nan)
    names = [shortened(m, LABEL) for m in methods]
    room = 0.3 + 0.075 * max(map(len, names))
    side = max(1.6, 0.52 * count)
    picture = Picture(figsize=(room + side + 0.9, side + room + 0.3), dpi=110, layout="constrained")
    axes = picture.subplots()
    for i, first in enumerate(methods):
        for j, second in enumerate(methods):
            both = blocks[[first, second]].dropna()
            if i == j or both.empty:
                continue
            wins = int((both[first] > both[second]).sum())
            share[i, j] = wins / len(both)
            color = "white" if share[i, j] > 0.65 else "black"
            text = f"{wins}/{len(both)}"
            axes.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(count), names, rotation=90, fontsize=8)
    axes.set_yticks(range(count), names, fontsize=8)
    caption = (
        "How often the method of the row has a higher score than that of the column, over all"
        " pairs of runs with the same setting and seed; what is missing to 1 are defeats and ties."
    )
    return [store(picture, folder, "wins", caption, f"Matrix of wins between {count} methods.")]


def critical_difference(study: Study, ranking: Ranking | None, folder: Path) -> list[FigureFile]:
    """Draw Demsar's diagram of mean ranks."""
    if ranking is None:
        return []
    from scikit_posthocs import critical_difference_diagram

    names = {method: shortened(method, LABEL) for method in map(str, ranking.ranks.index)}
    if len(set(names.values())) < len(names):
        names = {m: f"{i + 1}: {name}" for i, (m, name) in enumerate(names.items())}
    height = 1.2 + 0.16 * len(names)
    picture = Picture(figsize=(7, height), dpi=110, layout="constrained")
    axes = picture.subplots()
    look = looks(study.methods)
    critical_difference_diagram(
        ranking.ranks.rename(names),
        ranking.nemenyi.rename(index=names, columns=names),
        ax=axes,
        label_fmt_left="{label} ({rank:.2f})",
        label_fmt_right="({rank:.2f}) {label}",
        label_props={"fontsize": 8},
        color_palette={names[m]: look[m].color for m in names},
    )
    for text in axes.texts:
        text.set_color("black")  # pale colours are hard to read
    axes.set_title(f"critical distance {ranking.critical:.2f}", fontsize=9, color=GREY)
    caption = (
        "Critical-distance diagram (Demšar 2006): mean ranks, 1 is best. A bar joins methods that"
        " Nemenyi's test does not tell apart at the level .05."
    )
    alt = "Mean ranks: " + ", ".join(f"{m} {r:.2f}" for m, r in ranking.ranks.sort_values().items())
    return [store(picture, folder, "critical-distance", caption, alt)]


def tuning_response(study: Study, folder: Path) -> list[FigureFile]:
    """Draw the validation score of the trials by each value that was tried."""
    trials = study.results.trials
    cells = [cell for cell in study.results.source.cells if cell.trial]
    if trials.empty:
        return []
    trials = trials.assign(
        method=[str(value) for value in trials[study.compare]] if study.compare in trials else "",
        setting=[study.condition_of(cell.axes) for cell in cells],
        validation=[study.validation(cell) for cell in cells],
    )
    files = []
    for column in [c for c in trials if str(c).startswith("tuned.")]:
        known = trials[trials[column].notna() & trials["validation"].notna()]
        present = [name for name in study.conditions if (known["setting"] == name).any()]
        key = str(column).removeprefix("tuned.")
        slug = "".join(c if c.isalnum() else "-" for c in key)
        for name, conditions in pages(present, f"tuning-{slug}"):
            picture, grid = panels(conditions, legend=legend_height(study.methods))
            for axes, condition in zip(grid, conditions, strict=True):
                _response(study, axes, known[known["setting"] == condition], str(column))
                axes.set_xlabel(shortened(key, 40), fontsize=8)
                axes.set_ylabel("validation score", fontsize=8)
            add_legend(picture, grid, study.methods)
            caption = (
                f"The trials of the tuning: score on the clients' validation data by {key}; points"
                " are trials, and lines join the best ones of each value. Trials that failed or"
                " diverged have no point."
            )
            alt = f"Validation score by {key}, one line for each method that tunes it."
            files.append(store(picture, folder, name, caption, alt))
    return files


def _response(study: Study, axes: Axes, trials: pd.DataFrame, column: str) -> None:
    values = pd.to_numeric(trials[column], errors="coerce")
    numeric = values.notna().all()
    names = sorted({str(value) for value in trials[column]})
    x = values if numeric else trials[column].map(lambda value: names.index(str(value)))
    for method, look in looks(study.methods).items():
        own = trials["method"] == method
        if not own.any():
            continue
        points = pd.DataFrame({"x": x[own], "y": trials.loc[own, "validation"]})
        axes.scatter(
            points["x"], points["y"], s=10, color=look.color, marker=look.marker, alpha=0.5
        )
        best = points.groupby("x")["y"].max()
        axes.plot(
            best.index,
            best.to_numpy(),
            color=look.color,
            linestyle=look.line,
            marker=look.marker,
            markersize=4,
            label=shortened(method, 40),
        )
    if numeric and values.min() > 0 and values.max() / values.min() > 10:
        axes.set_xscale("log")
    elif not numeric:
        axes.set_xticks(range(len(names)), [shortened(name, 12) for name in names])
    axes.grid(alpha=0.3)
