"""Figures of a reproduction: our levels next to the paper's, and curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from fedhet.study.report.document import FigureFile
from fedhet.study.report.plots import COLORS, draw_curves, figures, methods_at
from papers.measures import in_words, is_share
from papers.paper import LEVELS, Paper
from papers.table import Record

NAME = "beside-the-paper"
SIDES = {"ours": ("mean", "spread"), "the paper's": ("paper", "paper_spread")}
# Counts have a logarithmic axis if the largest is more than so many times the smallest.
LOG_FROM = 10.0


def draw(lines: Sequence[Record], paper: Paper, folder: Path, stem: str = NAME) -> list[FigureFile]:
    """Draw the lines with comparable levels: a panel for each setting and measure.

    If each panel would have a single method, draw a panel with all settings for each measure.

    Args:
        lines: the lines of the table of one reproduction.
        paper: the figures and claims of the paper.
        folder: the folder for the figures.
        stem: the beginning of their names.

    Raises:
        WriteError: a figure cannot be written.
    """
    shown = [
        line
        for line in lines
        if line["kind"] == "figure"
        and line["mean"]
        and paper.compared_at(line["scale"]) == LEVELS
        and paper.has_levels(line["measure"])
    ]
    for earlier in folder.glob(f"{stem}*.*"):
        earlier.unlink()
    places = Counter((line["measure"], line["setting"]) for line in shown)
    several = len({measure for measure, _ in places}) > 1
    by_method = any(count > 1 for count in places.values())
    row_axis = "method" if by_method else "setting"
    found: dict[str, list[Record]] = {}
    for line in shown:
        measure = in_words(line["measure"]) if several or not by_method else ""
        setting = line["setting"] if by_method else ""
        found.setdefault(", ".join(filter(None, (setting, measure))), []).append(line)
    labels = list(dict.fromkeys(line[row_axis] for line in shown))
    caption = (
        f"{paper.source}: our means and standard deviations over the seeds, and the paper's"
        " figures with the paper's spreads."
    )
    return figures(
        list(found),
        lambda axes, title: _draw(axes, found[title], [line[row_axis] for line in found[title]]),
        folder,
        stem,
        caption,
        f"Our figures and the paper's for {', '.join(labels)}.",
        height=1.4 + 0.24 * max(map(len, found.values()), default=0),
        row_names=labels,
    )


def _draw(axes: Axes, rows: Sequence[Record], labels: Sequence[str]) -> None:
    """Draw rows of one measure, with these labels next to the vertical axis."""
    values = [float(row[mean]) for row in rows for mean, _ in SIDES.values()]
    for i, (side, (mean, spread)) in enumerate(SIDES.items()):
        axes.errorbar(
            [float(row[mean]) for row in rows],
            np.arange(len(rows)) + 0.24 * i - 0.12,
            xerr=[float(row[spread] or 0) for row in rows],
            fmt="oD"[i],
            color=COLORS[i],
            markersize=4,
            elinewidth=1,
            label=side,
        )
    name = rows[0]["measure"]
    if not is_share(name) and min(values) > 0 and max(values) / min(values) > LOG_FROM:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(in_words(name), fontsize=8)
    methods_at(axes, labels)
    axes.grid(axis="x", alpha=0.3)


def curves(points: pd.DataFrame, name: str, folder: Path) -> list[FigureFile]:
    """Draw mean scores by round, with a band of one standard deviation, a panel for each setting.

    Args:
        points: columns `setting`, `method`, `round`, `mean` and `std`.
        name: the name of the figure; several figures get numbers after it.
        folder: the folder for the figures.
    """
    methods, settings = (list(dict.fromkeys(points[n])) for n in ("method", "setting"))

    def draw(axes: Axes, setting: str) -> None:
        draw_curves(axes, points[points["setting"] == setting], methods, "round", "round")

    return figures(settings, draw, folder, name, "Accuracy by round.", "Accuracy by round")
