"""Evaluation after a step, by the server and by the clients, and the model selection from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedhet.core import trees
from fedhet.core.check import EXACT, counted
from fedhet.core.client.client import KEEP, TRAIN_TOO
from fedhet.core.client.descent import EarlyStopping
from fedhet.core.errors import RunFailed, log
from fedhet.core.messages import EVALUATE, Broadcast, Failure, Reply, Upload
from fedhet.core.metrics import FORWARD_BATCH, assess
from fedhet.core.owners import prefixed
from fedhet.core.server.callbacks import Callback, Row
from fedhet.core.targets import Scores, Tally, Target
from fedhet.core.task import Samples

if TYPE_CHECKING:
    from fedhet.core.server.admission import Backup
    from fedhet.core.server.loop import Loop
    from fedhet.core.server.phases import OpenStep
    from fedhet.core.server.run_setup import RunSetup
    from fedhet.core.server.strategy import FedStrategy

PARTS = ("val", "test")  # what clients evaluate on in every run
SHARES = (  # in [0, 1]
    *("accuracy", "f1", "f1_micro", "f1_macro", "subset_accuracy"),
    *("auc", "sensitivity", "specificity", "recall_macro", "ece"),
)
Moment = dict[str, Any]  # step, round, weights, extras, versions


def global_scores(strategy: FedStrategy) -> Scores:
    """Scores of the global model on the global test set; empty where a run has not both."""
    return _on_test_set(strategy)[0]


def _on_test_set(strategy: FedStrategy, most: int | None = None) -> tuple[Scores, Tally]:
    """These scores, or those on a part of the test set, and the tally of which they are."""
    workspace = strategy.workspace
    if "global" not in strategy.views or (data := workspace.test_data) is None:
        return {}, {}
    some = data if most is None else Samples(data.x[:most], data.y[:most])
    model = workspace.load(strategy.weights["model"])
    return assess(model, some, workspace.task, workspace.batcher)


def sound_scores(
    strategy: FedStrategy, opened: OpenStep, backup: Backup
) -> tuple[Scores, Tally, OpenStep]:
    """The scores on the global test set, after the step was undone if an outlier has spoilt it.

    Where no evaluation is due, a part of the set shows whether the loss is finite, and there are no
    scores. The last value is the step, without its replies if it was undone.

    Raises:
        RunFailed: the step had an outlier, and `on_failure` is "stop".
    """
    due = strategy.evaluates_after(opened)
    most = None if due else FORWARD_BATCH
    found = _on_test_set(strategy, most) if due or backup.possible else ({}, {})
    finite = math.isfinite(found[0].get("loss", 0.0))
    undone = None if finite else backup.undo(opened, opened.failures.append)
    if not due:
        return {}, {}, undone or opened
    return (*(_on_test_set(strategy) if undone else found), undone or opened)


def mostly_diverged(updates: Sequence[Upload], strategy: FedStrategy) -> bool:
    """Whether most clients' losses by the first view are not finite."""
    losses = [
        update.metrics[f"{part}.{strategy.views[0]}.loss"]
        for update in updates
        for part in PARTS
        if f"{part}.{strategy.views[0]}.loss" in update.metrics
    ]
    return 2 * sum(not math.isfinite(loss) for loss in losses) > len(losses)


def evaluation_moment(strategy: FedStrategy) -> Moment:
    """What an evaluation of the model as it is now is about, from which it can be repeated."""
    method = strategy.method
    state = strategy.run.states[method.GROUP]
    return {
        "step": strategy.step,
        "round": strategy.run.round,
        "weights": strategy.sent("model"),
        "extras": prefixed(method.name, method.evaluation_extras(strategy.weights, state)),
        "versions": dict(strategy.run.versions),
    }


def evaluation_messages(strategy: FedStrategy, moment: Moment | None = None) -> list[Broadcast]:
    """Messages by which every client with data evaluates the model as it is, or as it was.

    With a `moment` they are sent for the models, whose scores are known or not needed, so that no
    training data are scored.

    They carry the configuration's settings of local training, not those of the step: a rate that
    has been lowered for the training must not weaken an evaluation that fine-tunes.
    """
    train = {TRAIN_TOO: 1} if strategy.workspace.evaluation.train and moment is None else {}
    moment = moment or evaluation_moment(strategy)
    msg = Broadcast(
        phase=EVALUATE,
        step=moment["step"],
        round=moment["round"],
        local=strategy.setup.local,
        slot="model",
        weights=moment["weights"],
        extras={**moment["extras"], **train},
        plugins=strategy.digests,
        run_id=strategy.run_id,
    )
    versions = moment["versions"]
    return [
        replace(msg, pid=pid, version=versions.get(pid, 0))
        for pid, n in enumerate(strategy.sizes)
        if n
    ]


def received(
    replies: Iterable[Reply],
    strategy: FedStrategy,
    note: Callable[[Failure], None] = lambda failure: None,
    accept: Callable[[Upload], None] = lambda update: None,
) -> list[Upload]:
    """The clients' scores; every client that failed is passed to `note`, then left out.

    Updates that have passed the checks are passed to `accept`.

    What is left out is logged; where the run stops, its error names the clients.

    Raises:
        RunFailed: a client failed and `on_failure` is "stop", or no client succeeded.
    """
    target = strategy.workspace.task.scoring
    expected = [f"{KEEP}.{view}" for view in strategy.views]
    parts = ("train", *PARTS) if strategy.workspace.evaluation.train else PARTS
    scored = [f"{part}.{view}" for part in parts for view in strategy.views]
    known = strategy.workspace.task.part_sizes
    updates: list[Upload] = []
    failures: list[Failure] = []
    for reply in replies:
        if isinstance(reply, Upload):
            try:
                sizes = dict(zip(("train", *PARTS), known[reply.pid], strict=True))
                check_scores(reply, scored, target, expected, sizes)
            except ValueError as error:
                reply = Failure(reply.pid, EVALUATE, strategy.step, str(error), "refused")
            else:
                accept(reply)
                updates.append(reply)
                continue
        failures.append(reply)
        note(reply)
        strategy.setup.survive(reply)
    if not updates:
        raise RunFailed("; ".join(map(str, failures)))
    for failure in failures:
        log.warning("%s", failure)
    strategy.forget(failures)
    return updates


def check_scores(
    update: Upload,
    scored: Collection[str],
    target: Target,
    extras: Collection[str],
    sizes: Mapping[str, int],
) -> None:
    """Refuse scores that no evaluation can have, and scores without a tally where these are due.

    Args:
        update: the reply.
        scored: the parts of its data and the views that it was to score, as in "test.global".
        target: what is learned; clients send its tallies if it is `tallied`.
        extras: the further extras that the message requested.
        sizes: how many samples the client has in each part, by which its scores count.

    Raises:
        ValueError: a metric or an extra is unknown or missing, or a value is out of its range.
    """
    sized: dict[str, float] = {}  # "test.global" -> how many samples
    for name, value in update.metrics.items():
        where, _, metric = name.rpartition(".")
        if where not in scored or metric not in (*target.keys, *SHARES, "loss", "n"):
            raise ValueError(f"unexpected metric {trees.shown(name)}")
        if metric == "n":
            sized[where] = value
            possible = value == sizes[where.partition(".")[0]] > 0
        elif metric in SHARES:
            possible = 0.0 <= value <= 1.0
        else:  # those of a model that has diverged are infinite, which is a result
            huge = isinstance(value, int) and abs(value) > EXACT  # no file of scores could hold it
            possible = not (huge or math.isnan(value)) and (metric != "r2" or value <= 1.0)
        if not possible:
            raise ValueError(f"metric {name!r} is {trees.shown(value)}, which it cannot be")
    if uncounted := {name.rpartition(".")[0] for name in update.metrics} - sized.keys():
        raise ValueError(f"no number of samples for {trees.shown(sorted(uncounted))}")
    expected = {*extras, *(scored if target.tallied else ())}
    if unexpected := sorted(set(update.extras) - expected):
        raise ValueError(f"unexpected extras {trees.shown(unexpected)}")
    for where, n in sized.items() if target.tallied else ():
        samples = int(target.check(update.extras.get(where))["samples"])
        if samples != n:
            raise ValueError(f"a tally of {samples} samples for {where}.n={n}")


def client_means(
    updates: Sequence[Upload], views: Sequence[str], target: Target
) -> dict[str, float]:
    """Scores and loss over the parts of the clients' data, as rounds.jsonl names them.

    The first view is "clients" (acc_clients_mean, acc_val_weighted, ...), and only its deciding
    score has acc_clients_worst_decile. Every view but "global" also has names of its own
    (acc_personal_mean, acc_personal_val_weighted, ...).
    """
    means: dict[str, float] = {}
    key = f"test.{views[0]}.{target.score()}"
    if scores := sorted(update.metrics[key] for update in updates if key in update.metrics):
        worst = scores[: max(1, len(scores) // 10)]
        means[target.key("clients_worst_decile")] = sum(worst) / len(worst)
    for view in views:
        names = [("clients", "")] if view == views[0] else []
        if view != "global":
            names.append((view, f"{view}_"))
        for test, prefix in names:
            means |= _means(updates, f"test.{view}", test, target)
            for part in ("val", "train"):
                means |= _means(updates, f"{part}.{view}", f"{prefix}{part}", target)
    return means


def client_details(
    updates: Sequence[Upload], views: Sequence[str], target: Target
) -> dict[str, Any]:
    """View -> what is recorded of all the clients' test samples together (`Target.details`)."""
    tallies = {
        view: [u.extras[f"test.{view}"] for u in updates if f"test.{view}" in u.extras]
        for view in views
    }
    joined = {view: target.joined(own) for view, own in tallies.items() if own}  # type: ignore[arg-type]
    return {view: details for view, tally in joined.items() if (details := target.details(tally))}


def _means(updates: Sequence[Upload], scored: str, name: str, target: Target) -> dict[str, float]:
    """Over the clients that have this part of the data: the plain mean and that over samples.

    Where clients send tallies, the latter is the score of all their samples together.
    """
    holders = [update for update in updates if update.metrics.get(f"{scored}.n")]
    metrics = [update.metrics for update in holders]
    means: dict[str, float] = {}
    for metric, short in (*target.keys.items(), ("loss", "loss")):
        key = f"{scored}.{metric}"
        pairs = [(one[key], one[f"{scored}.n"]) for one in metrics if key in one]
        if pairs:
            samples = sum(n for _, n in pairs)
            means[f"{short}_{name}_mean"] = sum(value for value, _ in pairs) / len(pairs)
            means[f"{short}_{name}_weighted"] = sum(value * n for value, n in pairs) / samples
    if target.pooled and holders:
        tallies = [update.extras[scored] for update in holders]
        scores = target.scores(target.joined(tallies))  # type: ignore[arg-type]
        for metric, value in scores.items():
            means[f"{target.keys[metric]}_{name}_weighted"] = value
    return means


class Selection(Callback):
    """Model selection by the clients' validation data alone.

    The loop learns which model is the best so far, and training may stop early. A model is judged
    by its deciding score on all clients' validation samples together, or by its loss where that is
    not defined.

    Args:
        setting: `early_stopping` counts here.
    """

    name = "selection"
    memory = ("_best", "_values")

    def __init__(self, setup: RunSetup) -> None:
        self._key = setup.workspace.task.scoring.key("val_weighted")
        self._stopping = setup.early_stopping
        self._best = math.inf
        self._values: list[float] = []  # of all evaluations; a smaller one is better

    def evaluated(self, loop: Loop, row: Row, updates: Sequence[Upload]) -> bool:
        """Judge the model of the step that the row describes."""
        value = -row[self._key] if self._key in row else row.get("loss_val_weighted")
        if value is None:
            if self._stopping.patience is not None:
                raise RunFailed(
                    f"early_stopping.patience={self._stopping.patience}: no client has validation"
                    " samples, or its site sends no score of them; see partition.split"
                )
            return False
        if value < self._best:
            self._best = value
            loop.best = loop.round
        self._values.append(value)
        current, patience = loop.current, self._stopping.patience
        if patience is None or current.step == current.entry.rounds:
            return False
        stop = EarlyStopping(patience, self._stopping.min_delta)
        if not [stop(one) for one in self._values][-1]:
            return False
        log.warning(  # the level that a run shows
            "training stops after round %d: %s in a row without a better validation",
            current.step,
            counted(stop.stale, "evaluation"),
        )
        return True
