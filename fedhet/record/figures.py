"""The figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def draw(
    folder: Path, title: str, rows: Sequence[dict[str, Any]], partition: dict[str, Any]
) -> list[Path]:
    """figures/accuracy.png and figures/labels.png, where there is something to show; returns their
    paths."""
    home = folder / "figures"
    home.mkdir(exist_ok=True)
    drawn = []
    scored = [
        row for row in rows if row["acc_global"] is not None or row["acc_clients_mean"] is not None
    ]
    if scored:
        drawn.append(_save(accuracy(title, scored), home / "accuracy.png"))
    if partition.get("counts"):
        drawn.append(_save(labels(np.array(partition["counts"]), partition), home / "labels.png"))
    return drawn


def accuracy(title: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """Accuracy per training round: the global test set, and the mean over the clients' own test
    data."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for key, label in (
        ("acc_global", "global test set"),
        ("acc_clients_mean", "mean of the clients' test data"),
    ):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.set(xlabel="round", ylabel="accuracy", title=title, ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def labels(counts: np.ndarray, partition: dict[str, Any]) -> Figure:
    """Samples per client and class; counts (clients, classes)."""
    clients, classes = counts.shape
    figure = Figure(figsize=(7, min(12.0, 1.8 + 0.28 * clients)), layout="constrained")
    axes = figure.add_subplot()
    left, edges = np.zeros(clients), np.arange(clients + 1) - 0.5
    palette = colormaps["tab10" if classes <= 10 else "tab20" if classes <= 20 else "turbo"]
    names = partition.get("classes") or [str(c) for c in range(classes)]
    for c in range(classes):
        color = palette(c if classes <= 20 else c / (classes - 1))
        # One patch for a class: a bar for each of its clients takes seconds where there are many.
        axes.stairs(
            left + counts[:, c],
            edges,
            baseline=left,
            orientation="horizontal",
            fill=True,
            color=color,
            label=names[c],
        )
        left = left + counts[:, c]
    axes.set(xlabel="samples", ylabel="client", title=_title(partition))
    axes.invert_yaxis()
    if clients <= 40:
        axes.set_yticks(np.arange(clients))
        axes.hlines(edges, 0, left.max(), color="white", linewidth=3)
    if classes <= 20:
        axes.legend(
            title="class", ncols=1, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5)
        )
    return figure


def circles(counts: np.ndarray, partition: dict[str, Any]) -> Figure:
    """Samples per client and class as papers draw them: the area of a circle is their number;
    counts (clients, classes)."""
    clients, classes = counts.shape
    figure = Figure(
        figsize=(min(16.0, 2 + 0.3 * clients), min(12.0, 1.5 + 0.3 * classes)), layout="constrained"
    )
    axes = figure.add_subplot()
    client, label = counts.nonzero()
    sizes = counts[client, label]
    # points; the rest is margin
    cell = 72 * min(figure.get_figwidth() / (clients + 6), figure.get_figheight() / (classes + 4))
    axes.scatter(client, label, s=cell**2 * sizes / max(1, sizes.max(initial=0)), linewidths=0)
    axes.set(
        xlabel="client",
        ylabel="class",
        title=_title(partition),
        xlim=(-1, clients),
        ylim=(-1, classes),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yticks(
        np.arange(classes), partition["classes"], fontsize="small" if classes <= 20 else "xx-small"
    )
    return figure


def partition_figures(folder: Path, partition: dict[str, Any]) -> list[Path]:
    """labels.png and circles.png of a partition.json's content; returns their paths."""
    counts = np.array(partition["counts"])
    return [
        _save(draw(counts, partition), folder / f"{draw.__name__}.png")
        for draw in (labels, circles)
    ]


def _title(partition: dict[str, Any]) -> str:
    return f"{partition['name']} partition, {partition['clients']} clients ({partition['hash']})"


def _save(figure: Figure, path: Path) -> Path:
    FigureCanvasAgg(figure).print_figure(str(path), dpi=120)
    return path
