"""The loop over a run's steps, and our small subclass of Flower's Server that runs it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from fedhet.errors import RunFailed
from fedhet.messages import Broadcast, Failure, Reply, Update
from fedhet.phases import EarlyStopping, locate
from fedhet.record.run_folder import Recorder
from fedhet.strategy import FedStrategy

log = logging.getLogger("fedhet")
Observer = Callable[[dict[str, Any]], None]


class Clock:
    """Seconds by name, for one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class Courier(Protocol):
    """Carries the messages of a step to the clients and yields their replies in the same order.

    It clocks `broadcast` (packing), `clients` (while clients work) and `upload` (unpacking).
    """

    def train(self, plan: list[Broadcast], clock: Clock) -> Iterable[Reply]: ...
    def evaluate(self, plan: list[Broadcast], clock: Clock) -> Iterable[Reply]: ...


def run_rounds(
    strategy: FedStrategy,
    courier: Courier,
    recorder: Recorder,
    evaluate_clients: bool,
    observe: Observer,
) -> None:
    """Run the timetable to its end; RunFailed where a client fails and on_failure is "stop"."""
    number, select = 0, Selection(strategy, recorder)
    while locate(strategy.timetable, number + 1):
        number += 1
        clock = Clock()
        with clock("step"):
            with clock("broadcast"):
                plan = strategy.plan(number)
            try:
                strategy.settle(courier.train(plan, clock))
            finally:
                recorder.failures += [
                    {"round": number, **vars(failure)} for failure in strategy.now.failures
                ]
        row = _row(strategy, clock)
        try:
            if strategy.due:
                with clock("evaluate"):
                    _evaluate(strategy, courier, recorder, evaluate_clients, row)
        finally:  # the step is done, whatever became of its evaluation
            row["seconds"]["evaluate"] = clock.seconds.get("evaluate", 0.0)
            recorder.step(row, strategy.reports())
        observe(row)
        if strategy.due and evaluate_clients:
            select(row)
    recorder.finish("ok", strategy=strategy)


def _row(strategy: FedStrategy, clock: Clock) -> dict[str, Any]:
    """One line of rounds.jsonl. Client seconds are scaled to the wall time that the server spent
    waiting for clients."""
    now, spent = strategy.now, clock.seconds
    train, extras = now.seconds.get("seconds.train", 0.0), now.seconds.get("seconds.extras", 0.0)
    waited = spent.get("clients", 0.0)
    share = min(1.0, waited / (train + extras)) if train + extras else 0.0
    upload = spent.get("upload", 0.0) + waited - share * (train + extras)
    aggregate = spent["step"] - spent["broadcast"] - waited - spent.get("upload", 0.0)
    return {
        "phase": now.entry.header,
        "step": now.step,
        "round": now.round,
        "cohort": now.cohort,
        "acc_global": None,
        "loss_global": None,
        "acc_clients_mean": None,
        "acc_clients_weighted": None,
        "seconds": {
            "broadcast": spent["broadcast"],
            "train": share * train,
            "extras": share * extras,
            "upload": upload,
            "aggregate": aggregate,
            "evaluate": 0.0,
        },
        "bytes": now.bytes,
        "client_state": strategy.client_state,
        "failures": [vars(failure) for failure in now.failures],
        "metrics": now.metrics,
    }


def _evaluate(
    strategy: FedStrategy, courier: Courier, recorder: Recorder, clients: bool, row: dict[str, Any]
) -> None:
    """Add what the global test set and, if `clients`, the clients' own data say to the step's
    row."""
    found = strategy.evaluate_global()
    row |= {"acc_global": found.get("accuracy"), "loss_global": found.get("loss")}
    if not clients:
        return
    replies: list[Update] = []
    failures: list[Failure] = []
    for reply in courier.evaluate(strategy.evaluations(), Clock()):
        if isinstance(reply, Failure):
            failures.append(reply)
            row["failures"].append(vars(reply))
            recorder.failures.append({"round": row["round"], **vars(reply)})
            if strategy.setting.on_failure == "stop":
                raise RunFailed(str(reply))
        else:
            replies.append(reply)
    if not replies:
        raise RunFailed("; ".join(map(str, failures)))
    recorder.clients(row["round"], {reply.pid: reply.metrics for reply in replies})
    for view in strategy.views:
        first = [("clients", "val")] if view == strategy.views[0] else []
        for test, val in [*first, *([(view, f"{view}_val")] if view != "global" else [])]:
            row |= {**_means(replies, f"test.{view}", test), **_means(replies, f"val.{view}", val)}


def _means(replies: list[Update], scored: str, name: str) -> dict[str, float]:
    """Accuracy and loss over the clients that have this part of the data: the plain mean, and the
    one weighted by their samples."""
    told, means = [r.metrics for r in replies if r.metrics.get(f"{scored}.n")], dict[str, float]()
    for metric, short in (("accuracy", "acc"), ("loss", "loss")):
        pairs = [
            (found[f"{scored}.{metric}"], found[f"{scored}.n"])
            for found in told
            if f"{scored}.{metric}" in found
        ]
        if pairs:
            means[f"{short}_{name}_mean"] = sum(value for value, _ in pairs) / len(pairs)
            means[f"{short}_{name}_weighted"] = sum(value * n for value, n in pairs) / sum(
                n for _, n in pairs
            )
    return means


class Selection:
    """Model selection by the clients' validation data alone: the best model so far is kept, and
    training may stop early.

    A model is judged by its accuracy on the clients' validation samples taken together, by its loss
    where the targets are not classes."""

    def __init__(self, strategy: FedStrategy, recorder: Recorder) -> None:
        self._strategy, self._recorder, setting = strategy, recorder, strategy.setting
        self._stop = (
            None if setting.patience is None else EarlyStopping(setting.patience, setting.min_delta)
        )
        self._best = math.inf

    def __call__(self, row: dict[str, Any]) -> None:
        """After an evaluation."""
        value = (
            -row["acc_val_weighted"] if "acc_val_weighted" in row else row.get("loss_val_weighted")
        )
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
        now = self._strategy.now
        if self._stop and self._stop(value) and now.step < now.entry.rounds:
            log.info(
                "training stops after round %d: %d evaluations without a better validation",
                now.step,
                self._stop.stale,
            )
            self._strategy.close()
