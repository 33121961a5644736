"""The figures of a partition: which client has how many samples of which class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from fedhet.record.picture import Picture, margins, save, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Paul Tol's "muted", which can be told apart with any kind of colour vision.
CLASS_COLORS = (
    *("#332288", "#88CCEE", "#44AA99", "#117733", "#999933"),
    *("#DDCC77", "#CC6677", "#882255", "#AA4499", "#DDDDDD"),
)
BARS = 40  # up to so many clients have a number of their own


def partition_figures(folder: Path, partition: dict[str, Any]) -> list[Path]:
    """Save labels.png and circles.png, and a PDF beside each.

    Args:
        folder: an existing folder.
        partition: the content of partition.json.

    Returns:
        The paths of the PNG files.
    """
    pictures = {"labels": labels(partition), "circles": circles(partition)}
    return [save(picture, folder / f"{name}.png") for name, picture in pictures.items() if picture]


def labels(partition: dict[str, Any], summary: dict[str, Any] | None = None) -> Picture | None:
    """Plot the samples of each client by class; None where the partition has no counts.

    Few classes are the parts of stacked bars; many are the columns of a map, whose shades are the
    numbers of samples, beside the clients' totals.

    Args:
        partition: the content of partition.json.
        summary: that of summary.json, for the title.
    """
    counts = np.array(partition.get("counts") or [[]])
    clients, classes = counts.shape
    if not classes:
        return None
    bars = classes <= len(CLASS_COLORS)
    height = min(9.0, 1.6 + 0.2 * max(clients, classes)) if bars else min(9.0, 2 + 0.2 * clients)
    picture = Picture(figsize=(7 if bars else 9, height), dpi=120)
    full = partition.get("classes") or [str(label) for label in range(classes)]
    names = [name if len(name) <= 24 else f"{name[:23]}…" for name in full]
    axes = (_bars if bars else _map)(picture, counts, names, kind_of(partition))
    axes.set_ylabel("client")
    picture.suptitle(title(summary, partition), fontsize=11)
    if clients <= BARS:
        axes.set_yticks(np.arange(clients))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(clients - 0.5, -0.5)
    return picture


def kind_of(partition: dict[str, Any]) -> str:
    """What the columns of the counts are."""
    return "label" if partition.get("target") == "labels" else "class"


def _bars(picture: Picture, counts: np.ndarray, names: Sequence[str], kind: str) -> Axes:
    axes = picture.subplots()
    legend = 0.8 + 0.08 * max(map(len, names))  # its width in inches, about
    margins(picture, left=0.7, right=legend)
    clients, classes = counts.shape
    left = np.zeros(clients)
    edges = np.arange(clients + 1) - 0.5
    for label in range(classes):
        # One patch per class: a bar for each of its clients takes seconds if there are many.
        axes.stairs(
            left + counts[:, label],
            edges,
            baseline=left,
            orientation="horizontal",
            fill=True,
            color=CLASS_COLORS[label],
            label=names[label],
        )
        left = left + counts[:, label]
    if clients <= BARS:
        axes.hlines(edges, 0, left.max(), color="white", linewidth=3)
    axes.set(xlabel="samples", xlim=(0, 1.02 * left.max()))
    axes.legend(title=kind, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return axes


def _map(picture: Picture, counts: np.ndarray, names: Sequence[str], kind: str) -> Axes:
    picture.set_layout_engine("constrained")
    clients, classes = counts.shape
    axes, totals = picture.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    image = axes.imshow(
        np.ma.masked_equal(counts, 0),
        norm=LogNorm(0.4, max(2, counts.max())),  # from .4, so that one sample is not too pale
        cmap=colormaps["YlGnBu"],
        aspect="auto",
        interpolation="none",
    )
    ticks = [i * 10**power for power in range(8) for i in (1, 2, 5)]
    bar = picture.colorbar(image, ax=(axes, totals), aspect=30, pad=0.02, format="%d", ticks=ticks)
    bar.ax.set(ylim=(1, max(2, counts.max())), ylabel=f"samples of the {kind}")
    bar.ax.minorticks_off()
    totals.stairs(
        counts.sum(1),
        np.arange(clients + 1) - 0.5,
        orientation="horizontal",
        fill=True,
        color="#888888",
    )
    totals.set(xlabel="samples")
    totals.tick_params(left=False, labelleft=False)
    width = max(map(len, names))
    shown = range(0, classes, max(1, math.ceil(classes * width / 75)))
    size = "small" if len(shown) <= 40 else "x-small"
    axes.set_xticks(shown, [names[label] for label in shown], fontsize=size)
    axes.set_xlabel(kind)
    return axes  # type: ignore[no-any-return]


def circles(partition: dict[str, Any]) -> Picture | None:
    """Plot samples per client and class as papers do: a circle's area is their number.

    None where the samples have no classes or labels.

    Args:
        partition: the content of partition.json.
    """
    counts = np.array(partition["counts"])
    clients, classes = counts.shape
    if not classes:
        return None
    width = min(16.0, 2 + 0.3 * clients)
    height = min(12.0, 1.5 + 0.3 * classes)
    picture = Picture(figsize=(width, height), dpi=120, layout="constrained")
    axes = picture.add_subplot()
    client, label = counts.nonzero()
    sizes = counts[client, label]
    # The width of a cell in points; the rest is margin.
    cell = 72 * min(width / (clients + 6), height / (classes + 4))
    axes.scatter(client, label, s=cell**2 * sizes / max(1, sizes.max(initial=0)), linewidths=0)
    axes.set(
        xlabel="client",
        ylabel=kind_of(partition),
        xlim=(-1, clients),
        ylim=(-1, classes),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    picture.suptitle(title(None, partition), fontsize=11)
    fontsize = "small" if classes <= 20 else "xx-small"
    axes.set_yticks(np.arange(classes), partition["classes"], fontsize=fontsize)
    return picture
