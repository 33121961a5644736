"""The figures of a run and of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedhet.check import counted

if TYPE_CHECKING:
    from fedhet.record.summary import Row


def draw(
    folder: Path,
    title: str,
    rows: Sequence[Row],
    views: Sequence[str],
    partition: dict[str, Any],
) -> list[Path]:
    """Save figures/accuracy.png and figures/labels.png, as far as there is something to show.

    Args:
        folder: the run folder.
        title: the title of the accuracies.
        rows: the lines of rounds.jsonl.
        views: the models that clients evaluate, as `models` in summary.json names them.
        partition: the content of partition.json.

    Returns:
        The paths of the files.
    """
    home = folder / "figures"
    home.mkdir(exist_ok=True)
    paths = []
    scored = [
        row for row in rows if row["acc_global"] is not None or row["acc_clients_mean"] is not None
    ]
    if scored:
        paths.append(_save(accuracy(title, scored, views), home / "accuracy.png"))
    if partition.get("counts"):
        paths.append(_save(labels(np.array(partition["counts"]), partition), home / "labels.png"))
    return paths


def partition_figures(folder: Path, partition: dict[str, Any]) -> list[Path]:
    """Save labels.png and circles.png.

    Args:
        folder: an existing folder.
        partition: the content of partition.json.

    Returns:
        The paths of the files.
    """
    counts = np.array(partition["counts"])
    return [
        _save(labels(counts, partition), folder / "labels.png"),
        _save(circles(counts, partition), folder / "circles.png"),
    ]


def accuracy(title: str, rows: Sequence[Row], views: Sequence[str]) -> Figure:
    """Plot accuracy over rounds: global test set, and mean over the clients' own test data.

    The clients' accuracy is that of the first of the `views`.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    models = "" if views[0] == "global" else f"{views[0]} models, "
    curves = {
        "acc_global": "global test set",
        "acc_clients_mean": f"{models}mean over the clients' test data",
    }
    for key, label in curves.items():
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.set(xlabel="round", ylabel="accuracy", title=title, ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def labels(counts: np.ndarray, partition: dict[str, Any]) -> Figure:
    """Plot the samples of each client by class as stacked bars; counts (clients, classes)."""
    clients, classes = counts.shape
    figure = Figure(figsize=(7, min(12.0, 1.8 + 0.28 * clients)), layout="constrained")
    axes = figure.add_subplot()
    left = np.zeros(clients)
    edges = np.arange(clients + 1) - 0.5
    names = partition.get("classes") or [str(label) for label in range(classes)]
    for label in range(classes):
        # One patch per class: a bar for each of its clients takes seconds if there are many.
        axes.stairs(
            left + counts[:, label],
            edges,
            baseline=left,
            orientation="horizontal",
            fill=True,
            color=_color(label, classes),
            label=names[label],
        )
        left = left + counts[:, label]
    axes.set(xlabel="samples", ylabel="client", title=_partition_title(partition))
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
    """Plot samples per client and class as papers do: a circle's area is their number.

    Args:
        counts: (clients, classes).
        partition: the content of partition.json.
    """
    clients, classes = counts.shape
    width = min(16.0, 2 + 0.3 * clients)
    height = min(12.0, 1.5 + 0.3 * classes)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    client, label = counts.nonzero()
    sizes = counts[client, label]
    # The width of a cell in points; the rest is margin.
    cell = 72 * min(width / (clients + 6), height / (classes + 4))
    axes.scatter(client, label, s=cell**2 * sizes / max(1, sizes.max(initial=0)), linewidths=0)
    axes.set(
        xlabel="client",
        ylabel="class",
        title=_partition_title(partition),
        xlim=(-1, clients),
        ylim=(-1, classes),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    fontsize = "small" if classes <= 20 else "xx-small"
    axes.set_yticks(np.arange(classes), partition["classes"], fontsize=fontsize)
    return figure


def _color(label: int, classes: int) -> tuple[float, float, float, float]:
    if classes <= 20:
        return colormaps["tab10" if classes <= 10 else "tab20"](label)
    return colormaps["turbo"](label / (classes - 1))


def _partition_title(partition: dict[str, Any]) -> str:
    clients = counted(partition["clients"], "client")
    return f"{partition['name']} partition, {clients} ({partition['hash']})"


def _save(figure: Figure, path: Path) -> Path:
    FigureCanvasAgg(figure).print_figure(str(path), dpi=120)
    return path
