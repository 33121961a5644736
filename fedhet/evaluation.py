"""Evaluation after a step, by the server and by the clients, and the model selection from it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fedhet.check import counted
from fedhet.client import FINETUNE_EPOCHS, evaluated_views
from fedhet.errors import RunFailed
from fedhet.messages import EVALUATE, Broadcast, Failure, Reply, Update
from fedhet.metrics import score
from fedhet.phases import EarlyStopping
from fedhet.trees import Tree

if TYPE_CHECKING:
    from fedhet.record.run_folder import Recorder
    from fedhet.strategy import FedStrategy

log = logging.getLogger("fedhet")


def run_views(strategy: FedStrategy) -> tuple[str, ...]:
    """The views that clients evaluate in this run; the first one chooses the best round.

    They are those of the method, without "global" where the run has no global model, and
    "finetuned" where the run asks for it.
    """
    views = tuple(evaluated_views(strategy.evaluates, strategy.site))
    return (*views, "finetuned") if strategy.setting.finetune_epochs else views


def global_scores(strategy: FedStrategy, weights: Tree | None = None) -> dict[str, float]:
    """Scores of the global model, or of `weights`, on the global test set.

    Empty where the task has no such set, or the run no such model.
    """
    site = strategy.site
    if "global" not in strategy.views or site.test_data is None:
        return {}
    return score(site.load(weights or strategy.weights["model"]), site.test_data, site.task)


def evaluation_messages(strategy: FedStrategy) -> list[Broadcast]:
    """Messages that ask every client with data to evaluate the model as it is now.

    They carry the configuration's settings of local training, not those of the step: a rate that
    has been lowered for the training must not weaken an evaluation that fine-tunes.
    """
    extras = dict(strategy.evaluation_extras)
    if strategy.setting.finetune_epochs:
        extras[FINETUNE_EPOCHS] = strategy.setting.finetune_epochs
    msg = Broadcast(
        phase=EVALUATE,
        step=strategy.current.step,
        round=strategy.current.round,
        local=strategy.setting.local,
        slot="model",
        weights=strategy.sent("model"),
        extras=extras,
        plugins=strategy.digests,
    )
    versions = strategy.versions
    return [msg.to(pid, versions.get(pid, 0), {}) for pid, n in enumerate(strategy.sizes) if n]


def received(
    replies: Iterable[Reply],
    on_failure: str,
    report: Callable[[Failure], None] = lambda failure: None,
) -> list[Update]:
    """The clients' scores; every client that failed is passed to `report`, then left out.

    What is left out is logged; where the run stops, its error names the clients.

    Raises:
        RunFailed: a client failed and `on_failure` is "stop", or no client succeeded.
    """
    updates: list[Update] = []
    failures: list[Failure] = []
    for reply in replies:
        if isinstance(reply, Update):
            updates.append(reply)
            continue
        failures.append(reply)
        report(reply)
        if on_failure == "stop":
            raise RunFailed(str(reply))
    if not updates:
        raise RunFailed("; ".join(map(str, failures)))
    for failure in failures:
        log.warning("%s", failure)
    return updates


def client_means(updates: Sequence[Update], views: Sequence[str]) -> dict[str, float]:
    """Accuracy and loss over the clients' test and validation data, as rounds.jsonl names them.

    The first view is "clients" (acc_clients_mean, acc_val_weighted, ...), and only its test
    accuracy has acc_clients_worst_decile. Every view but "global" also has names of its own
    (acc_personal_mean, acc_personal_val_weighted, ...).
    """
    means = _worst_decile(updates, views[0])
    for view in views:
        names = [("clients", "val")] if view == views[0] else []
        if view != "global":
            names.append((view, f"{view}_val"))
        for test, val in names:
            means |= _means(updates, f"test.{view}", test)
            means |= _means(updates, f"val.{view}", val)
    return means


def _means(updates: Sequence[Update], scored: str, name: str) -> dict[str, float]:
    """Over the clients that have this part of the data: the plain mean and that over samples."""
    metrics = [update.metrics for update in updates if update.metrics.get(f"{scored}.n")]
    means: dict[str, float] = {}
    for metric, short in (("accuracy", "acc"), ("loss", "loss")):
        key = f"{scored}.{metric}"
        pairs = [(one[key], one[f"{scored}.n"]) for one in metrics if key in one]
        if pairs:
            samples = sum(n for _, n in pairs)
            means[f"{short}_{name}_mean"] = sum(value for value, _ in pairs) / len(pairs)
            means[f"{short}_{name}_weighted"] = sum(value * n for value, n in pairs) / samples
    return means


def _worst_decile(updates: Sequence[Update], view: str) -> dict[str, float]:
    """The mean accuracy of the worst 10 % of the clients with test data, at least one client."""
    key = f"test.{view}.accuracy"
    accuracies = sorted(update.metrics[key] for update in updates if key in update.metrics)
    if not accuracies:
        return {}
    worst = accuracies[: max(1, len(accuracies) // 10)]
    return {"acc_clients_worst_decile": sum(worst) / len(worst)}


class Selection:
    """Model selection by the clients' validation data alone.

    The best model so far is kept, and training may stop early. A model is judged by its accuracy on
    all clients' validation samples together, or by its loss where the targets are not classes.
    """

    def __init__(self, strategy: FedStrategy, recorder: Recorder) -> None:
        self._strategy = strategy
        self._recorder = recorder
        self._best = math.inf
        self._stop: EarlyStopping | None = None
        if strategy.setting.patience is not None:
            self._stop = EarlyStopping(strategy.setting.patience, strategy.setting.min_delta)

    def __call__(self, row: dict[str, Any]) -> None:
        """Judge the model of the step that the row describes, after its evaluation."""
        if "acc_val_weighted" in row:
            value = -row["acc_val_weighted"]
        else:
            value = row.get("loss_val_weighted")
        if value is None:
            if self._stop:
                raise RunFailed(
                    f"early_stopping.patience={self._stop.patience}: no client has validation"
                    " samples; see partition.split"
                )
            return
        if value < self._best:
            self._best = value
            self._recorder.keep_best(self._strategy)
        current = self._strategy.current
        if self._stop and self._stop(value) and current.step < current.entry.rounds:
            log.info(
                "training stops after round %d: %s in a row without a better validation",
                current.step,
                counted(self._stop.stale, "evaluation"),
            )
            self._strategy.end_phase()
