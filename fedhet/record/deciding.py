"""The score of a run that decides in an experiment, as its `report.metric` says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedhet.core.targets import TARGETS, Classes, LossOnly

# `report.metric` -> the clients' own models that count by it, the first kind that a run has.
OWN_MODELS = {
    "personal": ("personal", "finetuned"),
    "personal_best_val": ("personal", "finetuned"),
    "finetuned": ("finetuned",),
}


def own_models(summary: dict[str, Any], metric: str) -> str | None:
    """The kind of own models that counts: "personal", "finetuned", or None for the global model.

    Args:
        summary: the content of the run's summary.json.
        metric: `report.metric`.
    """
    views = summary.get("models") or ()
    return next((view for view in OWN_MODELS.get(metric, ()) if view in views), None)


def own_score(summary: dict[str, Any], metric: str) -> float | None:
    """The clients' mean score on their own test data of the models that count.

    Args:
        summary: the content of the run's summary.json.
        metric: `report.metric`, a key of OWN_MODELS.
    """
    own = own_models(summary, metric)
    if own is None:
        target = TARGETS.get(summary.get("target", Classes.name), LossOnly)
        return summary.get(target.clients_key()) if target.score() else None
    scores = summary.get(own) or {}
    return scores.get("best_val" if metric.endswith("best_val") else "last")


def validation_score(
    summary: dict[str, Any], rows: Sequence[dict[str, Any]], metric: str
) -> float | None:
    """The score on the clients' validation data by which a trial is chosen.

    A run without the own models that the metric names counts with those that its clients would use
    instead.

    Args:
        summary: the content of summary.json of a run that has ended well.
        rows: the lines of rounds.jsonl.
        metric: `report.metric`. It names the models, and whether their last score, their best one
            or the mean of the last ones counts.

    Returns:
        The score; NaN where it is not finite; None if the run has none.
    """
    target = TARGETS.get(summary.get("target", Classes.name), LossOnly)
    own = own_models(summary, metric)
    key = target.key(f"{own}_val_weighted" if own else "val_weighted")
    scores = [math.nan if row[key] is None else float(row[key]) for row in rows if key in row]
    if not scores:
        return None
    if metric == "last_k":
        count = (summary.get(target.key("last_k")) or {}).get("evaluations") or 1
        return sum(scores[-count:]) / len(scores[-count:])
    if metric.endswith("best_val"):
        return max((score for score in scores if math.isfinite(score)), default=math.nan)
    return scores[-1]
