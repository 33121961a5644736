"""Computes the content of environment.json and summary.json: the machine, and a run's results."""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedhet.core import trees
from fedhet.core.check import counted, installed_versions
from fedhet.core.client.state import state_sizes
from fedhet.core.messages import STEPS
from fedhet.core.metrics import comm_cost, effective_rounds
from fedhet.core.targets import TARGETS, Classes, LossOnly, Target
from fedhet.core.timing import SHARE

if TYPE_CHECKING:
    from fedhet.core.server.strategy import FedStrategy

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes in one unit of ru_maxrss
RECORDED_PACKAGES = (
    "fedhet",
    "torch",
    "torchvision",
    "flwr",
    "numpy",
    "scikit-learn",
    "hydra-core",
    "ray",
)


def versions() -> dict[str, Any]:
    """Return the versions of Python and of the packages that affect results, and the machine."""
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu(),
        "cpus": os.cpu_count(),
        **installed_versions(RECORDED_PACKAGES),
    }
    if torch.cuda.is_initialized():  # the next call would initialise an unused GPU
        environment["gpu"] = torch.cuda.get_device_name()
    return environment


@cache
def cpu() -> str:
    """Return the kind of CPU: equal seeds give equal weights only on CPUs of the same kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # only Linux has this file
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor()])[0] or platform.machine()


def peak_memory() -> dict[str, int]:
    """Return the most bytes that this process, and its GPU, have used at once.

    It counts from the start of the process, so it includes earlier runs in the same process. It
    does not include workers, because they are separate processes.
    """
    peak = {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT}
    if torch.cuda.is_initialized():
        peak["gpu_peak"] = torch.cuda.max_memory_allocated()
    return peak


# ---- summary.json: the results of a run's rounds
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
    target = TARGETS.get(summary.get("target", Classes.name), LossOnly)
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


def summarise(
    rows: Sequence[Row],
    strategy: FedStrategy,
    *,
    status: str,
    reason: str | None,
    seconds: float,
    failures: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the entries of summary.json that are known when a run has ended.

    Args:
        rows: the lines of rounds.jsonl.
        strategy: the run's strategy, in its final state.
        status: ok, failed or interrupted.
        reason: why the run did not succeed, or None.
        seconds: the duration of the whole run.
        failures: the clients that failed, with the round.
    """
    executed = [row["phase"] for row in rows]
    target, evaluation = strategy.workspace.task.scoring, strategy.workspace.evaluation
    losses = [row["loss_global"] for row in rows if row["loss_global"] is not None]
    validation = [row[key] for row in rows if (key := target.key("val_weighted")) in row]
    details = [row["details"] for row in rows if "details" in row]
    clocks = sums([row["seconds"] for row in rows])
    summary = {
        "status": status,
        "reason": reason,
        "phases": [
            {"name": entry.name, "rounds": executed.count(entry.name)}
            for entry in strategy.timetable
        ],
        "stopped_early": _stopped_early(strategy),
        "models": list(strategy.views),
        "target": target.name,
        "score": target.score() or None,
        **_scores(rows, strategy.views, target),
        **measures(rows, target, evaluation.last_k, evaluation.thresholds),
        **({"details": details[-1]} if details else {}),
        "validation": max(validation, default=None),
        "loss": losses[-1] if losses else None,
        "seconds": {
            "total": seconds,
            **{name: clocks.get(name, 0.0) for name in ("train", "evaluate", "aggregate")},
        },
        # If several runs share this process, the seconds are this run's share.
        "seconds_shared": SHARE.get() is not None,
        "communication": _communication(rows, strategy),
        "bytes": {way: sums([row["bytes"][way] for row in rows]) for way in ("up", "down")},
        "memory": peak_memory(),
        "client_state": state_sizes(strategy.run.state_bytes),
        "steps": all_steps(rows),
        "failures": failures,
        "rejected": dict(Counter(failure["reason"] for failure in failures)),
        "restarted": sum(strategy.setup.starts_afresh(f["reason"]) for f in failures),
        "degraded": lost_share(rows) > strategy.setup.replies.max_lost,
        "weights_sha256": trees.sha256(strategy.weights),
    }
    return {**summary, "columns": columns(summary)}


def _stopped_early(strategy: FedStrategy) -> dict[str, Any] | None:
    """Return the round in which the training stopped early, and why; None if it did not."""
    for entry in strategy.timetable:
        if entry.phase.evaluate and entry.rounds < entry.phase.rounds:
            patience = counted(strategy.setup.early_stopping.patience or 0, "evaluation")
            reason = f"early_stopping.patience: {patience} in a row without a better validation"
            return {"round": entry.rounds, "planned": entry.phase.rounds, "reason": reason}
    return None


def lost_share(rows: Sequence[Row]) -> float:
    """Return the share of the requested replies that failed.

    A reply does not count as failed if the server did not wait for it, because enough other replies
    had arrived.
    """
    lost = sum(
        failure["reason"] != "not awaited"
        for row in rows
        for failure in row["failures"]
        if failure["phase"] == row["phase"]
    )
    return lost / max(1, sum(len(row["cohort"]) for row in rows))


def _scores(rows: Sequence[Row], views: Sequence[str], target: Target) -> dict[str, Any]:
    """Return the deciding score of each view at three evaluations, then the other scores.

    The entry of the global model has the name of the score; the entry of any other view has the
    name of the view. The target's other scores are at the last evaluation. They are scores of the
    global model, or of the first view if there is no global model.
    """
    if not target.score():
        return {}
    scores: dict[str, Any] = {
        target.score(): _last_and_best(rows, target.key("global"), target.key("val_weighted"))
    }
    for view in views:
        if view != "global":
            own = target.clients_key(view), target.key(f"{view}_val_weighted")
            scores[view] = _last_and_best(rows, *own)
    names = columns({**scores, "target": target.name})
    for score in list(target.keys)[1:]:
        values = [row[names[score]] for row in rows if row.get(names[score]) is not None]
        scores[score] = values[-1] if values else None
    return scores


def _last_and_best(rows: Sequence[Row], test: str, validation: str) -> dict[str, float | None]:
    """Return the test score at three evaluations.

    Args:
        rows: the lines of rounds.jsonl.
        test: the key of the test score.
        validation: the key of the validation score.

    Returns:
        `last`: at the last evaluation. `best_val`: at the evaluation with the best validation
        score. `best_test`: the best of all; nobody can choose it without the test data.
    """
    scores = [(row[test], row.get(validation)) for row in rows if row.get(test) is not None]
    validated = [
        (on_validation, on_test) for on_test, on_validation in scores if on_validation is not None
    ]
    return {
        "last": scores[-1][0] if scores else None,
        "best_val": max(validated, key=lambda pair: pair[0])[1] if validated else None,
        "best_test": max((on_test for on_test, _ in scores), default=None),
    }


def measures(
    rows: Sequence[Row], target: Target, last_k: int, thresholds: Sequence[float]
) -> dict[str, Any]:
    """Return measures for the comparison of methods, in addition to the last score.

    They use the global model's score (acc_global). In a run without a global model, they use the
    clients' score (acc_clients_mean; for numbers, r2_clients_weighted). The names below are the
    names for classes.

    Args:
        rows: the lines of rounds.jsonl.
        target: what is learned.
        last_k: the number of evaluations to average.
        thresholds: scores in (0, 1].

    Returns:
        `acc_clients_mean`, `acc_clients_worst_decile`: at the last evaluation of the clients.
        `acc_last_k`: the mean score of the last `last_k` evaluations, and their number (smaller in
        a run with fewer evaluations). `thresholds`: for each threshold the rounds, bytes and
        seconds until the first evaluation that reaches it; None if none does. Empty if the target
        has no score.
    """
    if not target.score():
        return {}
    clients = target.clients_key()
    scored = [row for row in rows if row[clients] is not None]
    last = scored[-1] if scored else {}
    has_global = any(row.get(target.key("global")) is not None for row in rows)
    key = target.key("global") if has_global else clients
    scores = [row[key] for row in rows if row[key] is not None][-last_k:]
    worst = target.key("clients_worst_decile")
    return {
        clients: last.get(clients),
        worst: last.get(worst),
        target.key("last_k"): {
            "mean": sum(scores) / len(scores) if scores else None,
            "evaluations": len(scores),
        },
        "thresholds": [
            {target.score(): threshold, **_cost(rows, key, threshold)} for threshold in thresholds
        ],
    }


def _cost(rows: Sequence[Row], key: str, threshold: float) -> dict[str, float | None]:
    """Return the rounds, bytes and seconds until an evaluation reaches the threshold.

    All three are None if no evaluation does. Rounds before the training count, and so do bytes of
    all kinds in both directions. The messages and the time of evaluations do not count, because
    evaluations are measurements.
    """
    steps = [i for i, row in enumerate(rows) if row[key] is not None and row[key] >= threshold]
    if not steps:
        return {"rounds": None, "bytes": None, "seconds": None}
    until = rows[: steps[0] + 1]
    return {
        "rounds": len(until),
        "bytes": sum(sum(sent.values()) for row in until for sent in row["bytes"].values()),
        "seconds": sum(sum(row["seconds"].values()) - row["seconds"]["evaluate"] for row in until),
    }


def _communication(rows: Sequence[Row], strategy: FedStrategy) -> dict[str, int | None]:
    """Return the effective rounds of FedDisk's paper, and their cost.

    The effective rounds are the rounds until the global model reaches its own best score. A step
    before the training counts as a round if clients sent something in it. The cost is the count of
    numbers that one client sends and receives in these rounds (FedDisk, eq. 18 and 19). Both
    results are None if the run has no score of a global model.
    """
    key = strategy.workspace.task.scoring.key("global")
    scored = [
        (row["step"], row[key])
        for row in rows
        if row["phase"] == "train" and row.get(key) is not None and math.isfinite(row[key])
    ]
    if not scored:
        return {"effective_rounds": None, "cost": None}
    evaluations = effective_rounds(torch.tensor([score for _, score in scored]))
    step = scored[(evaluations or len(scored)) - 1][0]
    before = [
        row["phase"] for row in rows if row["phase"] != "train" and any(row["bytes"]["up"].values())
    ]
    cost = comm_cost(_count_numbers(strategy.sent("model")), step)
    for entry in strategy.timetable:
        phase = entry.phase
        if entry.name != "train" and phase.slot and phase.uploads:
            cost += comm_cost(_count_numbers(strategy.sent(phase.slot)), before.count(entry.name))
    return {"effective_rounds": len(before) + step, "cost": cost}


def sums(counts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a dict: each name -> the sum of the values with this name."""
    totals: Counter[str] = Counter()
    for named in counts:
        totals.update(named)
    return dict(totals)


def all_steps(rows: Sequence[Row]) -> int | None:
    """Return the optimiser steps of all clients together, on the model or a copy of it.

    It is None if some steps are unknown: real clients and clients with noise do not report them.
    """
    known = [row["accepted"] * row["metrics"][STEPS] for row in rows if STEPS in row["metrics"]]
    return round(sum(known)) if len(known) == sum(row["accepted"] > 0 for row in rows) else None


def _count_numbers(tree: trees.Tree) -> int:
    return sum(tensor.numel() for tensor in tree.values() if tensor.is_floating_point())


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
        target = TARGETS.get(summary.get("target", Classes.name), LossOnly)
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
