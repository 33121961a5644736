"""Reads summary.json: its scores and their names, the method, and what an experiment compares.

It does not import torch, so that reports begin at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedhet.core.check import counted
from fedhet.core.kinds import KINDS, OfClasses, OfLoss

Row = dict[str, Any]  # a line of rounds.jsonl


def method_name(summary: dict[str, Any]) -> str:
    """Return the method with its plug-ins, server optimiser and merge, if these are not default."""
    others = summary.get("server_opt") or "none", summary.get("merge") or "mean"
    names = [summary["method"], *summary["plugins"], *others]
    return " + ".join(dict.fromkeys(name for name in names if name not in ("none", "mean")))


def columns(summary: dict[str, Any]) -> dict[str, str]:
    """Return a dict: the name of each score in summary.json -> its column in rounds.jsonl.

    The names are in the order of summary.json. summary.json contains this dict as "columns";
    earlier versions of fedhet did not write it.
    """
    target = KINDS.get(summary.get("target", OfClasses.name), OfLoss)
    if not (score := target.score()):
        return {"loss": "loss_global"}
    has_global = (summary.get(score) or {}).get("last") is not None
    own = [view for view in summary.get("models") or () if view != "global"]
    decides = target.key("global") if has_global else target.clients_key()
    where = "global" if has_global else "clients_weighted"
    return {
        score: target.key("global"),
        **{view: target.clients_key(view) for view in own},
        **{name: f"{short}_{where}" for name, short in list(target.keys.items())[1:]},
        **dict.fromkeys((target.key("last_k"), "thresholds"), decides),
        "validation": target.key("val_weighted"),
        "loss": "loss_global",
    }


def headline(summary: dict[str, Any]) -> list[str]:
    """Return the last scores of the run's models, each with its name in rounds.jsonl."""
    return [
        f"{name} {score['last']:.4f}"
        for entry, name in columns(summary).items()
        if isinstance(score := summary.get(entry), dict) and score.get("last") is not None
    ]


# The scores that eval.scores=all adds for classes, and their titles.
DETAILS = {
    "auc": "AUC",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "recall_macro": "mean recall of the classes",
    "ece": "calibration error",
}


def detailed(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a dict: "<model>, <samples>" -> the detailed scores of the last evaluation."""
    details = summary.get("details") or {}
    clients = (details.get("clients") or {}).items()
    places = {
        "global model, global test set": details.get("test_set"),
        **{f"{view} model{'s' * (view != 'global')}, clients' test data": d for view, d in clients},
    }
    return {place: found for place, found in places.items() if found}


def privacy_spent(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a table's row with the privacy guarantee of the noise; empty without noise."""
    if "privacy" not in summary:
        return []
    spent = summary["privacy"]
    most = counted(spent["releases"], "release")
    epsilons = [
        f"{spent[key]:.4g} if a client's data are {change}"
        for key, change in (("epsilon_replaced", "replaced"), ("epsilon", "left out"))
        if key in spent  # earlier versions recorded only "epsilon"
    ]
    return [("privacy", f"epsilon {', '.join(epsilons)}, at delta {spent['delta']:g} ({most})")]


# ---- the score by which an experiment compares runs, given by its `report.metric`
# For a `report.metric`: the kinds of the clients' own models. The first kind that a run has is
# scored.
OWN_MODELS = {
    "personal": ("personal", "finetuned"),
    "personal_best_val": ("personal", "finetuned"),
    "finetuned": ("finetuned",),
}


def own_models(summary: dict[str, Any], metric: str) -> str | None:
    """Return which of the clients' own models are scored: "personal" or "finetuned".

    Return None if the metric names no own models that the run has.

    Args:
        summary: the content of the run's summary.json.
        metric: `report.metric`.
    """
    views = summary.get("models") or ()
    return next((view for view in OWN_MODELS.get(metric, ()) if view in views), None)


def own_score(summary: dict[str, Any], metric: str) -> float | None:
    """Return the mean score, on the clients' own test data, of the models that `metric` names.

    Args:
        summary: the content of the run's summary.json.
        metric: `report.metric`, a key of OWN_MODELS.
    """
    own = own_models(summary, metric)
    if own is None:
        target = KINDS.get(summary.get("target", OfClasses.name), OfLoss)
        return summary.get(target.clients_key()) if target.score() else None
    scores = summary.get(own) or {}
    return scores.get("best_val" if metric.endswith("best_val") else "last")


def validation_score(
    summary: dict[str, Any], rows: Sequence[dict[str, Any]], metric: str
) -> float | None:
    """Return the score on the clients' validation data by which tuning chooses a trial.

    If the run has none of the own models that `metric` names, this is the score of the run's first
    view, which its clients would use instead.

    Args:
        summary: the content of summary.json of a successful run.
        rows: the lines of rounds.jsonl.
        metric: `report.metric`. It names the models, and whether the last score, the best score or
            the mean of the last scores counts.

    Returns:
        The score; NaN if it is not finite; None if the run has none.
    """
    target = KINDS.get(summary.get("target", OfClasses.name), OfLoss)
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
