"""Figures of a reproduction: the levels beside the paper's, and curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from fedhet.study.report.document import FigureFile
from fedhet.study.report.plots import (
    COLORS,
    add_legend,
    draw_curves,
    legend_height,
    methods_at,
    pages,
    panels,
    store,
    widen,
)
from papers.measures import in_words, is_share
from papers.paper import LEVELS, Paper
from papers.table import Record

NAME = "beside-the-paper"
WHOSE = {"ours": ("mean", "spread"), "the paper's": ("paper", "paper_spread")}
# Counts whose largest value is more than so many times the smallest have a logarithmic axis.
LOG_FROM = 10.0

Row = tuple[str, Record]  # what stands beside the axis, and the line of the table


def draw(lines: Sequence[Record], paper: Paper, folder: Path, stem: str = NAME) -> list[FigureFile]:
    """Draw the lines whose levels are compared, with a panel for each setting.

    Args:
        lines: of the table of one reproduction.
        paper: what the paper says.
        folder: where the figures are written.
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
    by_title = _panels(shown)
    files = []
    for name, titles in pages(list(by_title), stem):
        rows = {title: by_title[title] for title in titles}
        labels = [label for part in rows.values() for label, _ in part]
        height = 1.1 + 0.24 * max(map(len, rows.values()))
        picture, grid = panels(titles, height=height, legend=0.3)
        for axes, part in zip(grid, rows.values(), strict=True):
            _draw(axes, part)
        widen(picture, labels, len(grid))
        add_legend(picture, grid, list(WHOSE))
        caption = (
            f"{paper.source}: our means and standard deviations over the seeds, and the paper's"
            " figures with the spreads that it prints."
        )
        alt = f"Our figures and the paper's for {', '.join(dict.fromkeys(labels))}."
        files.append(store(picture, folder, name, caption, alt))
    return files


def _panels(lines: Sequence[Record]) -> dict[str, list[Row]]:
    """The title of each panel with its rows.

    A panel has the methods of one setting and measure. Where each of them would have a single
    method, it has all settings of a measure instead.
    """
    places = Counter((line["measure"], line["setting"]) for line in lines)
    several = len({measure for measure, _ in places}) > 1
    by_method = any(count > 1 for count in places.values())
    found: dict[str, list[Row]] = {}
    for line in lines:
        measure = in_words(line["measure"]) if several or not by_method else ""
        setting = line["setting"] if by_method else ""
        title = ", ".join(filter(None, (setting, measure)))
        label = line["method"] if by_method else line["setting"]
        found.setdefault(title, []).append((label, line))
    return found


def _draw(axes: Axes, rows: Sequence[Row]) -> None:
    labels = [label for label, _ in rows]
    values = [float(line[mean]) for _, line in rows for mean, _ in WHOSE.values()]
    for i, (whose, (mean, spread)) in enumerate(WHOSE.items()):
        axes.errorbar(
            [float(line[mean]) for _, line in rows],
            [place + 0.24 * i - 0.12 for place in range(len(rows))],
            xerr=[float(line[spread] or 0) for _, line in rows],
            fmt="oD"[i],
            color=COLORS[i],
            markersize=4,
            elinewidth=1,
            label=whose,
        )
    name = rows[0][1]["measure"]
    if not is_share(name) and min(values) > 0 and max(values) / min(values) > LOG_FROM:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(in_words(name), fontsize=8)
    methods_at(axes, labels, inverted=True)
    axes.grid(axis="x", alpha=0.3)


def curves(points: pd.DataFrame, name: str, folder: Path) -> list[FigureFile]:
    """Draw mean scores by round, with a band of one standard deviation, a panel for each setting.

    Args:
        points: their `setting`, `method`, `round`, `mean` and `std`.
        name: that of the figure; of several, the beginning.
        folder: where it is written.
    """
    files = []
    methods = list(dict.fromkeys(points["method"]))
    for part, settings in pages(list(dict.fromkeys(points["setting"])), name):
        picture, grid = panels(settings, legend=legend_height(methods))
        for axes, setting in zip(grid, settings, strict=True):
            draw_curves(axes, points[points["setting"] == setting], methods, "round")
        add_legend(picture, grid, methods)
        files.append(store(picture, folder, part, "Accuracy by round.", "Accuracy by round"))
    return files
