"""The loop over a run's steps. Couriers, one per engine, carry its messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from fedhet.core import trees
from fedhet.core.admission import Undo
from fedhet.core.evaluation import (
    Selection,
    client_means,
    evaluation_messages,
    mostly_diverged,
    received,
    sound_scores,
)
from fedhet.core.interruptions import raise_if_interrupted
from fedhet.core.messages import Broadcast, Failure, Reply, Update
from fedhet.core.phases import locate
from fedhet.core.state import Store, state_sizes
from fedhet.core.strategy import FedStrategy
from fedhet.handover.delivery import deliver
from fedhet.record.personal import PersonalModels
from fedhet.record.run_folder import Recorder

Observer = Callable[[dict[str, Any]], None]


class Clock:
    """Seconds by name, for one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block; every part of a step is one, so none begins after an interruption."""
        raise_if_interrupted()
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class Courier(Protocol):
    """Carries the messages of a step to the clients and yields their replies in the same order.

    Attributes:
        store: the clients' states, which checkpoints hold; None where clients keep them at their
            own sites.
    """

    @property
    def store(self) -> Store | None: ...

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterable[Reply]:
        """Carry the messages, which are all of one phase.

        The clock gets `broadcast` (packing), `clients` (while clients work) and
        `upload` (unpacking).
        """
        ...


def run_rounds(
    strategy: FedStrategy,
    courier: Courier,
    recorder: Recorder,
    evaluate_clients: bool,
    observe: Observer,
) -> None:
    """Run the timetable to its end.

    Raises:
        RunFailed: a client failed and on_failure is "stop", or no client succeeded.
    """
    select = Selection(strategy, recorder)

    def exchange(plan: list[Broadcast]) -> Iterable[Reply]:
        return courier.exchange(plan, Clock())

    personal = PersonalModels(strategy, recorder, exchange if evaluate_clients else None)
    checkpoints = recorder.checkpoints
    number = checkpoints.begin(strategy, courier.store, selection=select, personal=personal)
    while locate(strategy.timetable, number + 1):
        number += 1
        clock = Clock()
        with clock("step"):
            with clock("broadcast"):
                plan = strategy.plan(number)
            undo = Undo(strategy)
            try:
                strategy.settle(courier.exchange(plan, clock))
                with clock("evaluate"):
                    scores = sound_scores(strategy, undo)
            finally:
                for failure in strategy.current.failures:
                    recorder.failures.append({"round": number, **vars(failure)})
            digest = trees.sha256(strategy.weights)
        row = _row(strategy, clock, digest)
        try:
            if strategy.due:
                last = locate(strategy.timetable, number + 1) is None
                keys = {**strategy.site.task.scoring.keys, "loss": "loss"}
                row |= {f"{key}_global": scores.get(score) for score, key in keys.items()}
                with clock("evaluate"):
                    if evaluate_clients:
                        _evaluate(strategy, recorder, personal, undo, last, row)
        finally:  # the step is done, whatever became of its evaluation
            row["seconds"]["evaluate"] = clock.seconds.get("evaluate", 0.0)
            recorder.step(row, strategy.reports())
        observe(row)
        if strategy.due and evaluate_clients:
            select(row)
        checkpoints.step(last=locate(strategy.timetable, number + 1) is None)
    personal.complete()
    if strategy.setting.deliver:
        deliver(strategy, recorder, exchange)
    recorder.finish("ok", strategy=strategy)


def _row(strategy: FedStrategy, clock: Clock, digest: str) -> dict[str, Any]:
    """One line of rounds.jsonl.

    The clients' own seconds are scaled to the time that the server spent waiting for them.
    """
    current = strategy.current
    seconds = clock.seconds
    train = current.seconds.get("seconds.train", 0.0)
    extras = current.seconds.get("seconds.extras", 0.0)
    waited = seconds.get("clients", 0.0)
    unpacking = seconds.get("upload", 0.0)
    evaluating = seconds.get("evaluate", 0.0)  # so far, on the server's own data
    share = min(1.0, waited / (train + extras)) if train + extras else 0.0
    return {
        "phase": current.entry.name,
        "step": current.step,
        "round": current.round,
        "cohort": current.cohort,
        **_no_scores(strategy),
        "seconds": {
            "broadcast": seconds["broadcast"],
            "train": share * train,
            "extras": share * extras,
            "upload": unpacking + waited - share * (train + extras),
            "aggregate": seconds["step"] - seconds["broadcast"] - waited - unpacking - evaluating,
            "evaluate": 0.0,
        },
        "bytes": current.bytes,
        "client_state": state_sizes(strategy.state_bytes),
        "accepted": current.accepted,
        "failures": [vars(failure) for failure in current.failures],
        "metrics": current.metrics,
        **strategy.account.record(),
        "weights_sha256": digest,
    }


def _no_scores(strategy: FedStrategy) -> dict[str, None]:
    """The scores that a line of rounds.jsonl always has, for a step without an evaluation."""
    keys = strategy.site.task.scoring.keys.values()
    parts = ("clients_mean", "clients_weighted")
    on_global = [f"{key}_global" for key in (*keys, "loss")]
    return dict.fromkeys([*on_global, *(f"{key}_{part}" for key in keys for part in parts)])


def _evaluate(
    strategy: FedStrategy,
    recorder: Recorder,
    personal: PersonalModels,
    undo: Undo,
    last: bool,
    row: dict[str, Any],
) -> None:
    """Add the scores on the clients' data to the row.

    Raises:
        RunFailed: a client failed and on_failure is "stop", or no client succeeded.
    """

    def report(failure: Failure) -> None:
        row["failures"].append(vars(failure))
        recorder.failures.append({"round": row["round"], **vars(failure)})

    def evaluated() -> list[Update]:
        plan = evaluation_messages(strategy)
        return received(personal.evaluate(plan, last=last), strategy, report)

    updates = evaluated()
    if row["loss_global"] is None and mostly_diverged(updates, strategy) and undo(report):
        row |= {"accepted": 0, "weights_sha256": trees.sha256(strategy.weights)}
        updates = evaluated()
    recorder.clients(row["round"], {update.pid: update.metrics for update in updates})
    row |= client_means(updates, strategy.views, strategy.site.task.scoring)
    personal.note(row)
