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
from fedhet.core.kinds import Kind
from fedhet.core.messages import STEPS
from fedhet.core.metrics import comm_cost, effective_rounds
from fedhet.core.timing import SHARE
from fedhet.runs.record.scores import Row, columns

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


def _scores(rows: Sequence[Row], views: Sequence[str], target: Kind) -> dict[str, Any]:
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
    rows: Sequence[Row], target: Kind, last_k: int, thresholds: Sequence[float]
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
