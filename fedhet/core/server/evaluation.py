"""Evaluation after a step, by the server and by the clients, and model selection by its scores."""

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

PARTS = ("val", "test")  # the parts of their data on which clients evaluate in every run
UNIT_SCORES = (  # scores in [0, 1]
    *("accuracy", "f1", "f1_micro", "f1_macro", "subset_accuracy"),
    *("auc", "sensitivity", "specificity", "recall_macro", "ece"),
)
Moment = dict[str, Any]  # step, round, weights, extras, versions


def global_scores(strategy: FedStrategy) -> Scores:
    """Return the scores of the global model on the global test set.

    Return {} if the run has no global model or no global test set.
    """
    return _on_test_set(strategy)[0]


def _on_test_set(strategy: FedStrategy, most: int | None = None) -> tuple[Scores, Tally]:
    """Return the scores of the global model on the global test set, and their tally.

    With `most`, use only the first `most` samples.
    """
    workspace = strategy.workspace
    if "global" not in strategy.views or (data := workspace.test_data) is None:
        return {}, {}
    samples = data if most is None else Samples(data.x[:most], data.y[:most])
    model = workspace.load(strategy.weights["model"])
    return assess(model, [samples], workspace.task, workspace.batcher)[0]


def sound_scores(
    strategy: FedStrategy, opened: OpenStep, backup: Backup
) -> tuple[Scores, Tally, OpenStep]:
    """Undo the step if an outlier spoilt it. Then score the model on the global test set.

    If no evaluation is due, the server only checks whether the loss on a part of the test set is
    finite.

    Returns:
        The scores and their tally, both {} if no evaluation is due; and the step, without its
        replies if it was undone.

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
    """Whether most losses of the first view, over all clients and parts, are not finite."""
    losses = [
        update.metrics[f"{part}.{strategy.views[0]}.loss"]
        for update in updates
        for part in PARTS
        if f"{part}.{strategy.views[0]}.loss" in update.metrics
    ]
    return 2 * sum(not math.isfinite(loss) for loss in losses) > len(losses)


def evaluation_moment(strategy: FedStrategy) -> Moment:
    """Return the values with which the server can repeat an evaluation of the current model."""
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
    """Return the messages that ask every client with data to evaluate a model.

    The messages carry the configuration's settings of local training, not the step's settings: a
    learning rate that the schedule has lowered for training would weaken the fine-tuning of an
    evaluation.

    Args:
        strategy: the run's strategy.
        moment: the earlier evaluation to repeat; None evaluates the current model. With `moment`,
            the messages request no scores of training data, because the caller only collects
            models.
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
    return [
        replace(msg, pid=pid, version=moment["versions"].get(pid, 0))
        for pid, n in enumerate(strategy.sizes)
        if n
    ]


def received(
    replies: Iterable[Reply],
    strategy: FedStrategy,
    note: Callable[[Failure], None] = lambda failure: None,
    accept: Callable[[Upload], None] = lambda update: None,
) -> list[Upload]:
    """Return the replies of the clients that have not failed.

    Every failure is passed to `note`, and logged. If the run fails, its error names the clients
    that failed. Every update that has passed the checks is passed to `accept`.

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
    """Refuse impossible scores, and scores without a tally if the target has tallies.

    Args:
        update: the reply.
        scored: the parts and views that the client may score, such as "test.global".
        target: the kind of target; clients send its tallies if it is `tallied`.
        extras: the further extras that the message requested.
        sizes: the client's number of samples in each part of its data, by part. The server weighs
            the client's scores by it.

    Raises:
        ValueError: a metric or an extra is unknown or missing, or a value is out of its range.
    """
    sized: dict[str, float] = {}  # the number of samples, by part and view, such as "test.global"
    for name, value in update.metrics.items():
        where, _, metric = name.rpartition(".")
        if where not in scored or metric not in (*target.keys, *UNIT_SCORES, "loss", "n"):
            raise ValueError(
                f"unexpected metric {trees.shown(name)}; allowed: loss, n and the scores of the"
                f" target, for {', '.join(scored)}"
            )
        if metric == "n":
            sized[where] = value
            possible = value == sizes[where.partition(".")[0]] > 0
        elif metric in UNIT_SCORES:
            possible = 0.0 <= value <= 1.0
        else:  # the value may be infinite, because a model that diverged is a result
            # Files of scores store numbers as float64, which cannot hold larger integers exactly.
            huge = isinstance(value, int) and abs(value) > EXACT
            possible = not (huge or math.isnan(value)) and (metric != "r2" or value <= 1.0)
        if not possible:
            raise ValueError(
                f"metric {name!r} is {trees.shown(value)}; allowed for n: the client's number of"
                " samples, > 0; for scores such as accuracy: 0 to 1; for r2: at most 1; for all"
                f" others: no NaN, and integers up to {EXACT}"
            )
    if uncounted := {name.rpartition(".")[0] for name in update.metrics} - sized.keys():
        raise ValueError(f"the number of samples is missing for {trees.shown(sorted(uncounted))}")
    expected = {*extras, *(scored if target.tallied else ())}
    if unexpected := sorted(set(update.extras) - expected):
        raise ValueError(f"unexpected extras {trees.shown(unexpected)}")
    for where, n in sized.items() if target.tallied else ():
        samples = int(target.check(update.extras.get(where))["samples"])
        if samples != n:
            raise ValueError(f"the tally of {where} counts {samples} samples, but {where}.n is {n}")


def client_means(
    updates: Sequence[Upload], views: Sequence[str], target: Target
) -> dict[str, float]:
    """Return the mean scores and losses over the clients, under their names in rounds.jsonl.

    The names of the first view's scores do not name the view: acc_clients_mean, acc_val_weighted,
    ... For its deciding score, there is also acc_clients_worst_decile. The scores of every view
    except "global" are also given under the view's name: acc_personal_mean,
    acc_personal_val_weighted, ...
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
    """Return `Target.details` of all clients' test samples together, by view."""
    tallies = {
        view: [u.extras[f"test.{view}"] for u in updates if f"test.{view}" in u.extras]
        for view in views
    }
    joined = {view: target.joined(own) for view, own in tallies.items() if own}  # type: ignore[arg-type]
    return {view: details for view, tally in joined.items() if (details := target.details(tally))}


def _means(updates: Sequence[Upload], scored: str, name: str, target: Target) -> dict[str, float]:
    """Return two means over the clients with this part: the plain one, and one weighted by samples.

    If the target's scores are pooled, the weighted mean is the score of all samples together.
    """
    holders = [update for update in updates if update.metrics.get(f"{scored}.n")]
    metrics = [update.metrics for update in holders]
    means: dict[str, float] = {}
    for metric, short in (*target.keys.items(), ("loss", "loss")):
        key = f"{scored}.{metric}"
        pairs = [(own[key], own[f"{scored}.n"]) for own in metrics if key in own]
        if pairs:
            samples = sum(n for _, n in pairs)
            means[f"{short}_{name}_mean"] = sum(value for value, _ in pairs) / len(pairs)
            means[f"{short}_{name}_weighted"] = sum(value * n for value, n in pairs) / samples
    if target.pooled and holders:
        tallies = [update.extras[scored] for update in holders]
        for metric, value in target.scores(target.joined(tallies)).items():  # type: ignore[arg-type]
            means[f"{target.keys[metric]}_{name}_weighted"] = value
    return means


class Selection(Callback):
    """Selects the best model by the clients' validation data alone.

    It writes the best round so far into the loop, and can stop the training early. It compares
    models by the deciding score on all clients' validation samples together, or by the loss if this
    score is not defined.

    Args:
        setup: gives `early_stopping`.
    """

    name = "selection"
    memory = ("_best", "_values")

    def __init__(self, setup: RunSetup) -> None:
        self._key = setup.workspace.task.scoring.key("val_weighted")
        self._stopping = setup.early_stopping
        self._best = math.inf
        self._values: list[float] = []  # one for each evaluation; smaller is better

    def evaluated(self, loop: Loop, row: Row, updates: Sequence[Upload]) -> bool:
        """Judge the model of the step that the row describes."""
        value = -row[self._key] if self._key in row else row.get("loss_val_weighted")
        if value is None:
            if self._stopping.patience is not None:
                raise RunFailed(
                    f"early_stopping.patience={self._stopping.patience} needs validation scores,"
                    " but no client has validation samples, or no site sends validation scores; see"
                    " partition.split"
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
        if not [stop(past) for past in self._values][-1]:
            return False
        log.warning(  # a run shows messages of this level
            "training stops after round %d of its phase: %s in a row without a better validation",
            current.step,
            counted(stop.stale, "evaluation"),
        )
        return True
