"""How methods look in all figures of a report, and how figures are saved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG

from fedhet.record.figures import Picture, save
from fedhet.record.files import written
from fedhet.report.document import FigureFile

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
    """The text, cut to a length, in which no character has a meaning to matplotlib."""
    short = text if len(text) <= longest else f"{text[: longest - 1]}…"
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
