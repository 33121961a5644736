"""The figures of a report: how methods look in them, the curves, and the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedhet.core.check import counted
from fedhet.data.storage import written
from fedhet.runs.record.figures import Picture, save
from fedhet.runs.record.summary import OWN_MODELS
from fedhet.study.report.compared import Study
from fedhet.study.report.document import FigureFile, joined
from fedhet.study.report.statistics import SHOWN

# Okabe and Ito's colours, which can be told apart with any kind of colour vision, without the
# yellow, which is too pale on paper.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
# Four line styles and nine markers: with seven colours, no two of 252 methods look alike, and
# neighbours differ in print without colours, too.
LINES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), "-.")
MARKERS = "osD^vP*Xh"
HATCHES = ("", "//", "..", "xx")
PANELS = 6  # of a figure
WIDTH = 3.4  # of a panel, in inches
LABEL = 28  # characters of a method beside an axis


class Look(NamedTuple):
    """The look of a method."""

    color: str
    line: str | tuple[int, tuple[float, ...]]
    marker: str
    hatch: str


def looks(methods: Sequence[str]) -> dict[str, Look]:
    """The look of each method, by its place among all methods of the report."""
    return {
        method: Look(
            COLORS[i % len(COLORS)],
            LINES[i % len(LINES)],
            MARKERS[i % len(MARKERS)],
            HATCHES[i // len(COLORS) % len(HATCHES)],
        )
        for i, method in enumerate(methods)
    }


def pages(conditions: Sequence[str], name: str) -> Iterator[tuple[str, list[str]]]:
    """The conditions in parts that fit into a figure, each with the figure's name."""
    for start in range(0, len(conditions), PANELS):
        part = list(conditions[start : start + PANELS])
        number = "" if len(conditions) <= PANELS else f"-{start // PANELS + 1}"
        yield f"{name}{number}", part


def panels(
    conditions: Sequence[str], height: float = 2.7, legend: float = 0.0
) -> tuple[Picture, list[Axes]]:
    """A figure with an axes for each condition, at most three in a row.

    Args:
        conditions: their names, which are the titles, without what all of them share.
        height: of a panel, in inches.
        legend: the height that is kept free below them.
    """
    columns = columns_of(len(conditions))
    rows = math.ceil(len(conditions) / columns)
    width = max(2, columns) * WIDTH
    total = rows * height + legend
    picture = Picture(figsize=(width, total), dpi=110)
    grid = picture.subplots(rows, columns, squeeze=False)
    # In inches: a layout that measures takes most of the time of a figure.
    picture.subplots_adjust(
        left=0.65 / width,
        right=1 - 0.15 / width,
        top=1 - 0.35 / total,
        bottom=(0.5 + legend) / total,
        wspace=0.75 / (width / columns),
        hspace=1.1 / height,
    )
    flat = list(grid.flat)
    for axes in flat[len(conditions) :]:
        axes.set_axis_off()
    for axes, condition in zip(flat, distinguished(conditions), strict=False):
        axes.set_title(shortened(condition, 44), fontsize=9)
        axes.tick_params(labelsize=8)
    return picture, flat[: len(conditions)]


def methods_at(axes: Axes, methods: Sequence[str], inverted: bool = False) -> None:
    """Write the methods at 0, 1, ... beside the vertical axis; inverted, the first is on top."""
    axes.set_yticks(range(len(methods)), [shortened(m, LABEL) for m in methods], fontsize=8)
    axes.set_ylim(-0.6, len(methods) - 0.4)
    if inverted:
        axes.invert_yaxis()


def same_range(grid: Sequence[Axes], axis: str) -> None:
    """Give all panels the range on the "x" or "y" axis that shows everything."""
    ends = [getattr(axes, f"get_{axis}lim")() for axes in grid]
    for axes in grid:
        getattr(axes, f"set_{axis}lim")(min(low for low, _ in ends), max(high for _, high in ends))


def widen(picture: Picture, methods: Sequence[str], count: int) -> None:
    """Make room for the methods' names beside each of so many panels."""
    columns = columns_of(count)
    width, height = picture.get_size_inches()
    room = 0.25 + 0.068 * min(LABEL, max(map(len, methods)))
    width += columns * max(0.0, room - 0.65)
    picture.set_size_inches(width, height)
    panel = max(0.8, (width - 0.15) / columns - room)
    picture.subplots_adjust(left=room / width, wspace=room / panel)


def columns_of(count: int) -> int:
    """How many panels stand beside each other."""
    return 2 if count == 4 else min(3, count)


def distinguished(conditions: Sequence[str]) -> list[str]:
    """Conditions such as "dataset = mnist, clients = 20" without the parts that all have."""
    parts = [condition.split(", ") for condition in conditions]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    return [", ".join(p for p in own if p not in shared) or ", ".join(own) for own in parts]


def shortened(text: str, longest: int) -> str:
    """The text, cut to a length, in which no character has a meaning to matplotlib.

    It is cut in the middle, because labels may differ at their end alone.
    """
    half = longest // 2
    short = text if len(text) <= longest else f"{text[: longest - half - 1]}…{text[-half:]}"
    return short.replace("$", r"\$")


def legend_height(methods: Sequence[str]) -> float:
    """The height of a legend below all panels, in inches."""
    return 0.17 * math.ceil(len(methods) / legend_columns(methods))


def legend_columns(methods: Sequence[str]) -> int:
    """How many methods stand beside each other in a legend."""
    longest = max((len(method) for method in methods), default=1)
    return max(1, min(4, 90 // (min(longest, 40) + 8)))


def add_legend(picture: Picture, axes: Sequence[Axes], methods: Sequence[str]) -> None:
    """Put one legend below all panels, in the order of the methods."""
    handles = {
        label: handle
        for one in axes
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True)
    }
    names = [shortened(method, 40) for method in methods if shortened(method, 40) in handles]
    if names:
        picture.legend(
            [handles[name] for name in names],
            names,
            loc="lower center",
            ncols=legend_columns(methods),
            fontsize=8,
            frameon=False,
            handlelength=3.2,
        )


def store(picture: Picture, folder: Path, name: str, caption: str, alt: str) -> FigureFile:
    """Save the figure as PNG, PDF and SVG.

    Raises:
        WriteError: one of them cannot be written.
    """
    path = save(picture, folder / f"{name}.png")
    with (
        written(path.with_suffix(".svg")) as part,
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}),
    ):
        FigureCanvasSVG(picture).print_svg(part, metadata={"Date": None})
    return FigureFile(name, caption, alt, path.read_bytes())


# ---- curves: scores by round, by bytes and by seconds
AXES = {
    "round": "round",
    "megabytes": "MB sent, up and down",
    "seconds": "seconds of training",
}
MOST_MARKERS = 12


def curves(study: Study, folder: Path) -> list[FigureFile]:
    """Draw the deciding score over the rounds, the bytes and the seconds, a panel per condition.

    Over the seconds only where they are the runs' own.
    """
    points = curve_points(study)
    files = []
    for x, label in AXES.items():
        if x == "seconds" and not study.comparable_seconds:
            continue
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
            if same:
                same_range(grid, "x")
            for axes in grid[:: columns_of(len(grid))]:
                axes.set_ylabel(study.title, fontsize=8)
            add_legend(picture, grid, study.methods)
            caption = (
                f"{study.title.capitalize()} by {label}: mean over seeds, with a band of one"
                " standard deviation. A curve ends where the first of its seeds ends, and its steep"
                " rise may begin below the range that is shown."
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
    for place, (method, look) in enumerate(looks(methods).items()):
        own = points[points["method"] == method]
        if own.empty:
            continue
        every = max(1, len(own) // MOST_MARKERS)
        axes.plot(
            own[x],
            own["mean"],
            color=look.color,
            linestyle=look.line,
            marker=look.marker,
            markersize=3.5,
            markevery=(place % every, every),  # so that equal curves are seen to be several
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
    """A sentence about the methods that are evaluated later than others; "" without any."""
    first = points.groupby("method", sort=False)["number"].min()
    late = first[first > first.min()].items()
    told = joined([f"that of {method} at round {number}" for method, number in late])
    why = "Rounds of preparation, or before the first evaluation, have no score"
    return f" {why}, so that some curves begin later: {told}." if told else ""


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
    low, high = float(scores.quantile(0.1)), float((scores + points["std"].fillna(0)).max())
    if high - low > 0.6 * (high - float(scores.min())):
        low = float(scores.min())
    margin = max(0.06 * (high - low), 0.005)
    return low - margin, high + margin


# ---- the others
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
        same_range(grid, "x")
        widen(picture, study.methods, len(grid))
        caption = (
            f"{study.title.capitalize()} of the clients on their own test data at the last"
            " evaluation, all seeds together: quartiles, whiskers of at most 1.5 times their"
            " distance, and single clients beyond. A client with few test samples has few possible"
            " scores, and widens its box by chance."
        )
        alt = (
            f"Box plots over clients for {len(study.methods)} methods in"
            f" {len(conditions)} settings."
        )
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
        " pairs of runs with the same setting and seed; the rest are defeats and ties."
    )
    return [store(picture, folder, "wins", caption, f"Matrix of wins between {count} methods.")]


def differences(
    found: pd.DataFrame, own: Mapping[str, pd.Series], score: str, reference: str, folder: Path
) -> list[FigureFile]:
    """Draw how each method differs from the reference: over the settings, and in each of them.

    Args:
        found: of each method `a` the `difference`, its interval from `low` to `high`, and the
            `verdict` of the test.
        own: setting -> the differences there, by method.
        score: what is compared, in words.
        reference: the method with which the others are compared.
        folder: where the figure is written.
    """
    if found.empty:
        return []
    methods = [str(name) for name in found["a"]]
    several = len(own) > 1
    picture, (axes,) = panels([""], height=1.0 + 0.36 * len(methods), legend=0.4)
    picture.set_size_inches(8.6, picture.get_size_inches()[1])
    axes.axvline(0, color="black", linewidth=1)
    for place, row in enumerate(found.itertuples()):
        shown = row.verdict == SHOWN
        color = COLORS[0 if row.difference > 0 else 1] if shown else GREY
        axes.plot([row.low, row.high], [place, place], color=color, linewidth=2.2)
        filled = color if shown else "white"
        axes.plot(row.difference, place, "o", color=color, markerfacecolor=filled, markersize=9)
        for i, those in enumerate(own.values() if several else ()):
            if row.a in those.index:
                marker = MARKERS[1:][i % (len(MARKERS) - 1)]
                axes.plot(those[row.a], place + 0.3, marker, color=GREY, markersize=4, alpha=0.8)
    methods_at(axes, methods, inverted=True)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(f"difference in {score} from {reference}: better to the right", fontsize=8)
    if several and len(own) < len(MARKERS):
        looks_ = [
            Line2D([], [], color=GREY, marker=MARKERS[1:][i], markersize=4, linestyle="")
            for i in range(len(own))
        ]
        names = [shortened(name, 40) for name in own]
        picture.legend(looks_, names, loc="lower center", ncols=4, fontsize=8, frameon=False)
    widen(picture, methods, 1)
    caption = (
        f"Each method's difference from {reference} with its 95 % interval: large marks are"
        " the mean over all settings, filled where the test shows it (blue: better, orange: worse)"
        " and hollow where it does not. An interval is that of one comparison by itself, so that it"
        " may leave out 0 where nothing is shown."
    )
    caption += " Small marks are single settings." if several else ""
    alt = "; ".join(f"{row.a} {row.difference:+.3f}" for row in found.itertuples())
    return [store(picture, folder, "differences", caption, f"Differences: {alt}.")]


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
            same_range(grid, "y")
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
