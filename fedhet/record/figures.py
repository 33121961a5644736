"""The figures of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from fedhet.core.targets import LossOnly, of_row
from fedhet.record.labels import labels
from fedhet.record.picture import Picture, margins, save, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedhet.record.summary import Row

# Okabe and Ito's colours, which can be told apart with any kind of colour vision.
VIEW_COLORS = {"global": "#0072B2", "personal": "#D55E00", "finetuned": "#009E73"}


def draw(
    folder: Path, summary: dict[str, Any], rows: Sequence[Row], partition: dict[str, Any]
) -> list[Path]:
    """Save figures/accuracy and figures/labels, as far as there is something to show.

    The first has the name of the score: r2 where numbers are predicted.

    Args:
        folder: the run folder.
        summary: the content of summary.json.
        rows: the lines of rounds.jsonl.
        partition: the content of partition.json.

    Returns:
        The paths of the PNG files; a PDF is beside each.
    """
    home = folder / "figures"
    home.mkdir(exist_ok=True)
    target = of_row(rows[0]) if rows else LossOnly
    pictures = {
        target.score(): accuracy(summary, rows, partition),
        "labels": labels(partition, summary),
    }
    return [save(picture, home / f"{name}.png") for name, picture in pictures.items() if picture]


def accuracy(
    summary: dict[str, Any], rows: Sequence[Row], partition: dict[str, Any]
) -> Picture | None:
    """Plot the scores over the rounds; None where there are none.

    There is a curve for the global model on the global test set, and one for each view, over the
    clients' own test data.

    Args:
        summary: the content of summary.json.
        rows: the lines of rounds.jsonl.
        partition: the content of partition.json.
    """
    target = of_row(rows[0]) if rows else LossOnly
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
        points = [(row["step"], row[key]) for row in rows if _is_finite(row.get(key))]
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


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _zoom(axes: Axes, scores: np.ndarray) -> None:
    """Leave out the lowest tenth of the scores where the others differ much less than all do.

    The first rounds' steep rise would otherwise hide every later difference.
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
