"""The figures of a report: the looks of methods, curves, and other figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.ticker import MaxNLocator

from fedhet.core.check import counted
from fedhet.data.storage import written
from fedhet.runs.record.figures import Picture, save
from fedhet.runs.record.scores import OWN_MODELS
from fedhet.study.report.compared import Study
from fedhet.study.report.document import FigureFile, joined
from fedhet.study.report.results import FoundRun
from fedhet.study.report.statistics import SHOWN

# Okabe and Ito's colours, which differ for every kind of colour vision. Their yellow is left out,
# because it is too pale on paper.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
# Seven colours, four line styles and nine markers give 252 different looks. Neighbours differ in
# print without colours, too.
LINES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), "-.")
MARKERS = "osD^vP*Xh"
GREY = "#555555"
PANELS = 6  # in a figure, at most
WIDTH = 3.4  # of a panel, in inches
LABEL = 28  # longest name of a method next to an axis, in characters


def looks(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the properties of each method's line; they follow from its place among all methods."""
    styles = zip(cycle(COLORS), cycle(LINES), cycle(MARKERS), strict=False)
    return {
        method: {"color": color, "linestyle": line, "marker": marker}
        for method, (color, line, marker) in zip(methods, styles, strict=False)
    }


def panels(
    conditions: Sequence[str], height: float = 2.7, row_names: Sequence[str] = (), share: str = ""
) -> tuple[Picture, list[Axes]]:
    """Make a figure with a panel for each condition, at most three in a row.

    Args:
        conditions: the names of the conditions. A panel's title is its name without the parts that
            all names share.
        height: height of a panel, in inches.
        row_names: the methods that are written next to each panel, if any.
        share: the axes that have the same range in all panels: "x", "y", "xy" or "".
    """
    columns = 2 if len(conditions) == 4 else min(3, len(conditions))
    rows = math.ceil(len(conditions) / columns)
    width = max(2, columns) * WIDTH + columns * 0.07 * min(
        LABEL, max(map(len, row_names), default=0)
    )
    picture = Picture(figsize=(width, rows * height), dpi=110, layout="constrained")
    parts = [condition.split(", ") for condition in conditions]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    grid: list[Axes] = []
    for number, own in enumerate(parts, 1):
        same = {f"share{axis}": grid[0] for axis in share if grid}
        axes = picture.add_subplot(rows, columns, number, **same)
        title = ", ".join(p for p in own if p not in shared) or ", ".join(own)
        axes.set_title(shortened(title, 44), fontsize=9)
        axes.tick_params(labelsize=8)
        grid.append(axes)
    return picture, grid


def methods_at(axes: Axes, methods: Sequence[str]) -> None:
    """Write the methods at 0, 1, ... next to the vertical axis, the first one on top."""
    axes.set_yticks(range(len(methods)), [shortened(m, LABEL) for m in methods], fontsize=8)
    axes.set_ylim(len(methods) - 0.4, -0.6)


def shortened(text: str, longest: int = 40) -> str:
    """Cut a text to a length, and escape characters that matplotlib would interpret.

    The cut is in the middle, because labels may differ only at their end.
    """
    half = longest // 2
    short = text if len(text) <= longest else f"{text[: longest - half - 1]}…{text[-half:]}"
    return short.replace("$", r"\$")


def figures(
    conditions: Sequence[str],
    draw: Callable[[Axes, str], object],
    folder: Path,
    name: str,
    caption: str,
    alt: str,
    **layout: Any,
) -> list[FigureFile]:
    """Save a figure with a panel for each condition, or several figures with up to six panels.

    Args:
        conditions: the conditions, one for each panel.
        draw: draws one panel. The figure has one legend for everything with a label.
        folder: the folder for the figures.
        name: the name of the figure; several figures get numbers after it.
        caption: what the figures show, and how to read them.
        alt: what the figures show, for readers who cannot see them.
        layout: see `panels`.

    Raises:
        WriteError: a file cannot be written.
    """
    files = []
    for start in range(0, len(conditions), PANELS):
        part = conditions[start : start + PANELS]
        picture, grid = panels(part, **layout)
        handles: dict[str, Any] = {}
        for axes, condition in zip(grid, part, strict=True):
            draw(axes, condition)
            own, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, own, strict=True))
        if handles:
            columns = max(1, min(4, 90 // (max(map(len, handles)) + 8)))
            rows = math.ceil(len(handles) / columns)
            picture.set_figheight(picture.get_figheight() + 0.17 * rows)
            picture.legend(
                list(handles.values()),
                list(handles),
                loc="outside lower center",
                ncols=columns,
                fontsize=8,
                frameon=False,
                handlelength=3.2,
            )
        number = f"-{start // PANELS + 1}" if len(conditions) > PANELS else ""
        files.append(store(picture, folder, f"{name}{number}", caption, alt))
    return files


def store(picture: Picture, folder: Path, name: str, caption: str, alt: str) -> FigureFile:
    """Save the figure as PNG, PDF and SVG.

    Raises:
        WriteError: a file cannot be written.
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

    The curves over the seconds are left out if runs shared a process.
    """
    points = curve_points(study)
    known = study.known(points)
    if not known:
        return []
    ranges = {name: _limits(points[points["setting"] == name]) for name in known}
    lows, highs = zip(*ranges.values(), strict=True)
    # Panels have the same range if all their ranges overlap. The scores of an easy and a hard
    # dataset are far apart, and would be flat lines in one range.
    same = max(lows) < min(highs)
    if same:
        ranges = dict.fromkeys(known, (min(lows), max(highs)))
    files = []
    for x, label in AXES.items():
        if x == "seconds" and not study.comparable_seconds:
            continue

        def draw(axes: Axes, condition: str, x: str = x, label: str = label) -> None:
            draw_curves(axes, points[points["setting"] == condition], study.methods, x, label)
            axes.set_ylim(*ranges[condition])
            axes.set_ylabel(study.title, fontsize=8)

        caption = (
            f"{study.title.capitalize()} by {label}: mean over seeds, with a band of one"
            " standard deviation. A curve ends at the last round that all of its seeds have. Its"
            " steep rise may begin below the visible range."
        )
        caption += _late(points) + ("" if same else " The panels' ranges of scores differ.")
        alt = (
            f"Curves of {study.title} by {label} for"
            f" {counted(len(study.methods), 'method')} in {counted(len(known), 'setting')}."
            " The table of scores has the last values."
        )
        share = "xy" if same else ""
        files += figures(known, draw, folder, f"curves-by-{x}", caption, alt, share=share)
    return files


def draw_curves(
    axes: Axes, points: pd.DataFrame, methods: Sequence[str], x: str, label: str
) -> None:
    """Draw the methods' means, with a band of one standard deviation.

    Args:
        axes: the panel.
        points: rows of `curve_points` in one setting.
        methods: all methods of the figure; a method has the same colour in every panel.
        x: the column on the horizontal axis.
        label: the label of the horizontal axis.
    """
    for place, (method, look) in enumerate(looks(methods).items()):
        own = points[points["method"] == method]
        if own.empty:
            continue
        every = max(1, len(own) // MOST_MARKERS)
        axes.plot(
            own[x],
            own["mean"],
            **look,
            markersize=3.5,
            markevery=(place % every, every),  # markers of equal curves are shifted
            linewidth=1.4,
            label=shortened(method),
        )
        low, high = own["mean"] - own["std"], own["mean"] + own["std"]
        axes.fill_between(own[x], low, high, color=look["color"], alpha=0.14, lw=0)
    if x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_xlabel(label, fontsize=8)
    axes.grid(alpha=0.3)


def curve_points(study: Study) -> pd.DataFrame:
    """Return mean and std over seeds, and costs: a row per method, condition, evaluated round."""
    rounds = study.results.rounds
    scores = _scores(study, rounds)
    if scores.isna().all():
        return pd.DataFrame(columns=["method", "setting", "number", *AXES, "mean", "std"])
    by_run = rounds.groupby("folder")["folder"]
    sent = rounds.filter(regex=r"^bytes\.").sum(axis=1)
    worked = rounds.filter(regex=r"^seconds\.(?!evaluate$)").sum(axis=1)
    ordered = pd.DataFrame(
        {
            "folder": rounds["folder"],
            "number": by_run.cumcount() + 1,
            "megabytes": sent.groupby(rounds["folder"]).cumsum() / 1e6,
            "seconds": worked.groupby(rounds["folder"]).cumsum(),
            "score": scores if study.target.keys else -scores,
        }
    )
    scored = study.scores[["method", "setting", "folder"]].merge(
        ordered.dropna(subset="score"), on="folder", validate="one_to_many"
    )
    points = (
        scored.groupby(["setting", "method", "number"])
        .agg(
            megabytes=("megabytes", "mean"),
            seconds=("seconds", "mean"),
            mean=("score", "mean"),
            std=("score", "std"),
            seeds=("score", "size"),
        )
        .reset_index()
    )
    most = points.groupby(["setting", "method"])["seeds"].transform("max")
    return points[points["seeds"] == most].assign(round=lambda frame: frame["number"])


def _scores(study: Study, rounds: pd.DataFrame) -> pd.Series:
    """Return the deciding score in each row of `rounds`; all NaN if there is none."""
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


def _late(points: pd.DataFrame) -> str:
    """Return a sentence on methods with a later first evaluation than others; "" without any."""
    first = points.groupby("method", sort=False)["number"].min()
    late = first[first > first.min()].items()
    listed = joined([f"{method} at round {number}" for method, number in late])
    why = (
        "Some curves begin later, because rounds of preparation, or before the first evaluation,"
        " have no score"
    )
    return f" {why}: {listed}." if listed else ""


def _limits(points: pd.DataFrame) -> tuple[float, float]:
    """Return the range of the scores, without the lowest tenth if it takes 40 % of the range.

    The steep rise at the begin of a curve would hide later differences.
    """
    scores = points["mean"]
    low, high = float(scores.quantile(0.1)), float((scores + points["std"].fillna(0)).max())
    if high - low > 0.6 * (high - float(scores.min())):
        low = float(scores.min())
    margin = max(0.06 * (high - low), 0.005)
    return low - margin, high + margin


# ---- other figures


def boxes(study: Study, folder: Path) -> list[FigureFile]:
    """Draw the clients' scores at the last evaluation, a box per method."""
    clients = study.results.last_clients
    if clients.empty or not study.target.keys:
        return []
    shown = clients[(clients["split"] == "test") & (clients["metric"] == study.target.score())]
    shown = study.scores[["method", "setting", "folder"]].merge(
        shown[["folder", "model", "value"]], on="folder", validate="one_to_many"
    )
    # Use the models that the metric scores, else the first kind of models of the run's clients.
    first = shown.groupby("folder")["model"].first().to_dict()
    shown = shown[shown["model"] == shown["folder"].map(first | study.own_models)]
    groups = shown.dropna(subset="value").groupby(["setting", "method"])["value"]
    values = {place: own.to_numpy() for place, own in groups}

    def draw(axes: Axes, condition: str) -> None:
        drawn = axes.boxplot(
            [values.get((condition, method), []) for method in study.methods],
            positions=range(len(study.methods)),
            orientation="horizontal",
            widths=0.65,
            patch_artist=True,
            flierprops={"markersize": 2.5, "alpha": 0.6},
            medianprops={"color": "black", "linewidth": 1.4},
        )
        for box, look in zip(drawn["boxes"], looks(study.methods).values(), strict=True):
            box.set(facecolor=f"{look['color']}66", edgecolor=look["color"])
        methods_at(axes, study.methods)
        axes.set_xlabel(f"{study.title} of a client", fontsize=8)
        axes.grid(axis="x", alpha=0.3)

    caption = (
        f"{study.title.capitalize()} of the clients on their own test data at the last"
        " evaluation, all seeds together. A box shows the quartiles, its whiskers reach at most"
        " 1.5 times their distance, and points are single clients beyond. Clients with few test"
        " samples have few possible scores, which can widen a box by chance."
    )
    known = study.known(shown)
    alt = f"Box plots over clients for {len(study.methods)} methods in {len(known)} settings."
    layout = {"height": 1.3 + 0.24 * len(study.methods), "row_names": study.methods, "share": "x"}
    return figures(known, draw, folder, "clients", caption, alt, **layout)


def label_distribution(study: Study, folder: Path) -> list[FigureFile]:
    """Draw the label distribution of the clients: a panel per condition, with its first seed."""
    first: dict[str, FoundRun] = {}
    for cell in study.cells:
        first.setdefault(study.place(cell)[1], cell)
    partitions = {}
    for condition, cell in first.items():
        counts = np.array(study.results.partition(cell).get("counts") or [[]])
        if counts.size and counts.ndim == 2:
            partitions[f"{condition}, seed {study.place(cell)[2]}"] = counts

    def draw(axes: Axes, condition: str) -> None:
        counts = partitions[condition]
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        image = axes.imshow(shares.T, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_xlabel("client", fontsize=8)
        axes.set_ylabel("class", fontsize=8)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.figure.colorbar(image, ax=axes, pad=0.02).ax.tick_params(labelsize=7)

    caption = (
        "Label distribution: the share of each class (rows) among the training samples of each"
        " client (columns), for the first seed of each setting."
    )
    alt = f"Maps of classes by clients in {len(partitions)} settings."
    return figures([*partitions], draw, folder, "labels", caption, alt, height=3.0)


def differences(
    found: pd.DataFrame, own: Mapping[str, pd.Series], score: str, reference: str, folder: Path
) -> list[FigureFile]:
    """Draw each method's difference from the reference: over all settings, and in each setting.

    Args:
        found: a row for each method `a`, with the `difference`, its interval from `low` to `high`,
            and the `verdict` of the test.
        own: setting -> the differences in it, by method.
        score: the compared score, in words.
        reference: the method with which the others are compared.
        folder: the folder for the figure.
    """
    if found.empty:
        return []
    methods = [str(name) for name in found["a"]]
    several = len(own) > 1

    def draw(axes: Axes, _: str) -> None:
        axes.axvline(0, color="black", linewidth=1)
        for place, row in enumerate(found.itertuples()):
            shown = row.verdict == SHOWN
            color = COLORS[0 if row.difference > 0 else 1] if shown else GREY
            filled = color if shown else "white"
            axes.plot([row.low, row.high], [place, place], color=color, linewidth=2.2)
            axes.plot(row.difference, place, "o", color=color, markerfacecolor=filled, markersize=9)
        named = several and len(own) < len(MARKERS)
        places = np.arange(len(methods)) + 0.3
        for (name, gains), marker in zip(own.items() if several else (), cycle(MARKERS[1:])):
            label = shortened(name) if named else None
            (marks,) = axes.plot(gains.reindex(methods), places, marker, color=GREY, label=label)
            marks.set(markersize=4, alpha=0.8)
        methods_at(axes, methods)
        axes.grid(axis="x", alpha=0.3)
        axes.set_xlabel(f"difference in {score} from {reference}: better to the right", fontsize=8)

    caption = (
        f"Each method's difference from {reference} with its 95 % interval. Large marks are the"
        " mean over all settings. They are filled if the test shows the difference (blue: better,"
        " orange: worse), and hollow if it does not. The interval belongs to a single comparison,"
        " so it may leave out 0 although nothing is shown."
    )
    caption += " Small marks are single settings." if several else ""
    listed = "; ".join(f"{row.a} {row.difference:+.3f}" for row in found.itertuples())
    alt = f"Differences: {listed}."
    layout = {"height": 1.4 + 0.36 * len(methods), "row_names": methods}
    return figures([""], draw, folder, "differences", caption, alt, **layout)


def tuning_response(study: Study, folder: Path) -> list[FigureFile]:
    """Draw the validation scores of the trials by their values, a figure per tuned setting."""
    cells = [cell for cell in study.results.source.cells if cell.trial]
    scores = {cell.name: study.validation(cell) for cell in cells}
    files = []
    for key in dict.fromkeys(name for cell in cells for name in cell.tuned):
        points = [
            {
                "method": str(cell.axes.get(study.compare, "")),
                "setting": study.condition_of(cell.axes),
                "x": cell.tuned[key],
                "validation": scores[cell.name],
            }
            for cell in cells
            if key in cell.tuned
        ]
        trials = pd.DataFrame(points).dropna(subset="validation")

        def draw(axes: Axes, condition: str, trials: pd.DataFrame = trials, key: str = key) -> None:
            _response(study, axes, trials[trials["setting"] == condition])
            axes.set_xlabel(shortened(key), fontsize=8)
            axes.set_ylabel("validation score", fontsize=8)

        caption = (
            f"The trials of the tuning: score on the clients' validation data by {key}. Points"
            " are trials, and lines join the best trials of each value. Trials that failed or"
            " diverged have no point."
        )
        alt = f"Validation score by {key}, one line for each method that tunes it."
        name = "tuning-" + "".join(c if c.isalnum() else "-" for c in key)
        files += figures(study.known(trials), draw, folder, name, caption, alt, share="y")
    return files


def _response(study: Study, axes: Axes, trials: pd.DataFrame) -> None:
    """Draw the validation scores of trials over `x`, which is a number or a text."""
    values = pd.to_numeric(trials["x"], errors="coerce")
    if values.isna().any():
        names = sorted(set(map(str, trials["x"])))
        values = trials["x"].map(lambda value: names.index(str(value)))
        axes.set_xticks(range(len(names)), [shortened(name, 12) for name in names])
    elif values.min() > 0 and values.max() / values.min() > 10:
        axes.set_xscale("log")
    for method, look in looks(study.methods).items():
        own = trials["method"] == method
        if own.any():
            x, y = values[own], trials.loc[own, "validation"]
            mark = {"color": look["color"], "marker": look["marker"]}
            axes.scatter(x, y, s=10, alpha=0.5, **mark)
            best = y.groupby(x).max()
            axes.plot(best.index, best, **look, markersize=4, label=shortened(method))
    axes.grid(alpha=0.3)
