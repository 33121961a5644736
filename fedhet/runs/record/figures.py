"""Draws the figures of a run and of a partition, and has the common parts of all figures."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedhet.core.check import counted
from fedhet.core.kinds import OfLoss, of_row
from fedhet.data.storage import written
from fedhet.runs.record.scores import Row, method_name

# Okabe and Ito's colours, which people with any kind of colour vision can distinguish.
VIEW_COLORS = {"global": "#0072B2", "personal": "#D55E00", "finetuned": "#009E73"}
# Paul Tol's "muted" colours, for the same reason.
CLASS_COLORS = (
    *("#332288", "#88CCEE", "#44AA99", "#117733", "#999933"),
    *("#DDCC77", "#CC6677", "#882255", "#AA4499", "#DDDDDD"),
)
BARS = 40  # with more clients, not every client's number is shown
ROWS = 1000  # a picture has about this many lines of pixels
SETTINGS = ("alpha", "classes", "shards", "sizes")  # settings of a partition to show in the title


class Picture(Figure):
    """A figure that notebooks show, with or without matplotlib's backend for notebooks."""

    def png(self) -> bytes:
        """Return the content of a PNG file."""
        content = io.BytesIO()
        # savefig would draw everything twice.
        FigureCanvasAgg(self).print_png(content, pil_kwargs={"compress_level": 3})
        return content.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


def margins(picture: Picture, left: float, right: float) -> None:
    """Set the margins of the axes in inches; it takes half the time of a measured layout."""
    width, height = picture.get_size_inches()
    picture.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - 0.55 / height, bottom=0.5 / height
    )


def title(summary: dict[str, Any] | None, partition: dict[str, Any]) -> str:
    """Return method, data and partition in two lines; without a summary, only the partition."""
    settings = partition.get("settings", {})
    values = [f"{key} {settings[key]}" for key in SETTINGS if settings.get(key) is not None]
    if settings.get("noise"):
        values.append(f"noise {settings['noise']}")
    kind = ", ".join([partition["name"], *values])
    clients = counted(partition["clients"], "client")
    if partition.get("hash"):
        clients += f" ({partition['hash']})"
    if summary is None:
        return f"{kind}\n{clients}"
    if not summary["dataset"]:
        return f"{method_name(summary)} on data given as a Task\n{clients}"
    return f"{method_name(summary)} on {summary['dataset']}\n{kind}, {clients}"


def save(picture: Picture, path: Path) -> Path:
    """Save the picture as the PNG file `path`, and as a PDF next to it; return `path`.

    Raises:
        WriteError: a file cannot be written; no part of it is left.
    """
    with written(path) as part:
        part.write_bytes(picture.png())
    picture.set_layout_engine("none")  # the PDF takes the layout of the PNG
    with written(path.with_suffix(".pdf")) as part:
        FigureCanvasPdf(picture).print_pdf(part)
    return path


# ---- the scores of a run
def draw(
    folder: Path, summary: dict[str, Any], rows: Sequence[Row], partition: dict[str, Any]
) -> list[Path]:
    """Save figures/accuracy and figures/labels, if there is something to show.

    The first one has the name of the score, such as r2 if numbers are predicted.

    Args:
        folder: the run folder.
        summary: the content of summary.json.
        rows: the lines of rounds.jsonl.
        partition: the content of partition.json.

    Returns:
        The paths of the PNG files; a PDF is next to each.
    """
    home = folder / "figures"
    home.mkdir(exist_ok=True)
    target = of_row(rows[0]) if rows else OfLoss
    pictures = {
        target.score(): accuracy(summary, rows, partition),
        "labels": labels(partition, summary),
    }
    return [save(picture, home / f"{name}.png") for name, picture in pictures.items() if picture]


def accuracy(
    summary: dict[str, Any], rows: Sequence[Row], partition: dict[str, Any]
) -> Picture | None:
    """Plot the scores over the rounds; return None if there are no scores.

    One curve shows the global model on the global test set, and one curve for each view shows the
    scores on the clients' own test data.

    Args:
        summary: the content of summary.json.
        rows: the lines of rounds.jsonl.
        partition: the content of partition.json.
    """
    target = of_row(rows[0]) if rows else OfLoss
    if not target.keys:
        return None
    first = summary["models"][0]
    over = "all of" if target.pooled else "mean over"
    curves = {target.key("global"): ("global", "global model, global test set")}
    for view in summary["models"]:
        key = target.clients_key("clients" if view == first else view)
        model = "global model" if view == "global" else f"{view} models"
        curves[key] = (view, f"{model}, {over} the clients' test data")
    picture = Picture(figsize=(7, 4.2), dpi=120)
    axes = picture.subplots()
    margins(picture, left=0.85, right=0.15)
    rounds: list[int] = []
    shown: list[float] = []
    for number, (key, (view, label)) in enumerate(curves.items()):
        points = [
            (row["step"], row[key])
            for row in rows
            if row.get(key) is not None and math.isfinite(row[key])
        ]
        if points:
            steps, scores = zip(*points, strict=True)
            rounds += steps
            shown += scores
            dashed = view == "global" and key != target.key("global")
            axes.plot(
                steps,
                scores,
                color=VIEW_COLORS.get(view),
                linestyle="--" if dashed else "-",
                marker="osD^"[number] if len(points) <= 60 else None,
                markersize=4,
                label=label,
            )
    if not shown:
        return None
    axes.set(xlabel="round", ylabel=target.title)
    picture.suptitle(title(summary, partition), fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(min(rounds) - 0.5, max(rounds) + 0.5)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    _zoom(axes, np.array(shown))
    return picture


def _zoom(axes: Axes, scores: np.ndarray) -> None:
    """Leave out the lowest tenth of the scores if the range without it is much smaller.

    Otherwise the steep rise in the first rounds would hide all later differences.
    """
    low, tenth, high = np.quantile(scores, (0, 0.1, 1))
    if high - tenth < 0.6 * (high - low):
        below = int((scores < tenth).sum())
        axes.text(
            0.99,
            0.02,
            f"{below} lower values, down to {low:.2f}, are not shown",
            transform=axes.transAxes,
            horizontalalignment="right",
            fontsize="x-small",
            color="#555555",
        )
        low = tenth
    margin = max(0.05 * (high - low), 0.005)
    axes.set_ylim(low - margin, high + margin)


# ---- which client has how many samples of which class
def labels(partition: dict[str, Any], summary: dict[str, Any] | None = None) -> Picture | None:
    """Plot the samples of each client by class; return None if the partition has no counts.

    Few classes are shown as stacked bars. Many classes are shown as the columns of a map; its
    shades are the numbers of samples, and bars at its side show the clients' totals. With more than
    ROWS clients, each row is the mean of neighbours.

    Args:
        partition: the content of partition.json.
        summary: the content of summary.json, for the title.
    """
    counts = np.atleast_2d(partition.get("counts", []))
    clients, classes = counts.shape
    if not classes:
        return None
    first = np.linspace(0, clients, min(clients, ROWS), endpoint=False).astype(int)
    edges = np.append(first, clients) - 0.5
    means = np.add.reduceat(counts, first) / np.diff(edges)[:, None]
    bars = classes <= len(CLASS_COLORS)
    height = min(9.0, 1.6 + 0.2 * max(clients, classes)) if bars else min(9.0, 2 + 0.2 * clients)
    picture = Picture(figsize=(7 if bars else 9, height), dpi=120)
    names = [
        name if len(name) <= 24 else f"{name[:23]}…"
        for name in partition.get("classes") or map(str, range(classes))
    ]
    kind = "label" if partition.get("target") == "labels" else "class"
    axes = (_bars if bars else _map)(picture, means, edges, names, kind)
    axes.set_ylabel("client")
    picture.suptitle(title(summary, partition), fontsize=11)
    if clients <= BARS:
        axes.set_yticks(np.arange(clients))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(clients - 0.5, -0.5)
    return picture


def _bars(
    picture: Picture, counts: np.ndarray, edges: np.ndarray, names: Sequence[str], kind: str
) -> Axes:
    axes = picture.subplots()
    # On the right, the approximate width of the legend in inches.
    margins(picture, left=0.7, right=0.8 + 0.08 * max(map(len, names)))
    left = np.zeros(len(counts))
    for label, own in enumerate(counts.T):
        # One patch per class: a separate bar for each client takes seconds if there are many.
        axes.stairs(
            left + own,
            edges,
            baseline=left,
            orientation="horizontal",
            fill=True,
            color=CLASS_COLORS[label],
            label=names[label],
        )
        left = left + own
    if len(counts) <= BARS:
        axes.hlines(edges, 0, left.max(), color="white", linewidth=3)
    axes.set(xlabel="samples", xlim=(0, 1.02 * left.max()))
    axes.legend(title=kind, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return axes


def _map(
    picture: Picture, counts: np.ndarray, edges: np.ndarray, names: Sequence[str], kind: str
) -> Axes:
    picture.set_layout_engine("constrained")
    classes = len(names)
    axes, totals = picture.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    image = axes.imshow(
        np.ma.masked_equal(counts, 0),
        norm=LogNorm(0.4, max(2, counts.max())),  # from .4, so that one sample is not too pale
        cmap=colormaps["YlGnBu"],
        aspect="auto",
        interpolation="none",
        extent=(-0.5, classes - 0.5, edges[-1], edges[0]),
    )
    ticks = [i * 10**power for power in range(8) for i in (1, 2, 5)]
    bar = picture.colorbar(image, ax=(axes, totals), aspect=30, pad=0.02, format="%d", ticks=ticks)
    bar.ax.set(ylim=(1, max(2, counts.max())), ylabel=f"samples of the {kind}")
    bar.ax.minorticks_off()
    totals.stairs(
        counts.sum(1),
        edges,
        orientation="horizontal",
        fill=True,
        color="#888888",
    )
    totals.set(xlabel="samples")
    totals.tick_params(left=False, labelleft=False)
    shown = range(0, classes, max(1, math.ceil(classes * max(map(len, names)) / 75)))
    axes.set_xticks(
        shown,
        [names[label] for label in shown],
        fontsize="small" if len(shown) <= 40 else "x-small",
    )
    axes.set_xlabel(kind)
    return axes  # type: ignore[no-any-return]
