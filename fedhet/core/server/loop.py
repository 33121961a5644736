"""The loop over a run's steps, as a generator.

The loop yields the messages of each step and of each evaluation. Its driver carries them to the
clients, and sends the replies into the generator. docs/architecture.md#one-round has the path of a
message. The transports that carry messages are in fedhet/engines, and Flower's in
fedhet/flower/transport.py.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from fedhet.core import messages, trees
from fedhet.core.client.state import Store, state_sizes
from fedhet.core.errors import ConfigError, WriteError
from fedhet.core.interruptions import exits_as_errors, raise_if_interrupted
from fedhet.core.messages import EVALUATE, Broadcast, Failure, Reply, Upload
from fedhet.core.server.admission import Backup, TakenAgain
from fedhet.core.server.callbacks import Callback, Row
from fedhet.core.server.evaluation import (
    client_details,
    client_means,
    evaluation_messages,
    mostly_diverged,
    received,
    sound_scores,
)
from fedhet.core.server.phases import OpenStep, locate
from fedhet.core.server.strategy import FedStrategy
from fedhet.core.timing import now


class Clock:
    """Measures the seconds of each named part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the block's seconds to `name`.

        Every part of a step runs in such a block. Because the block first checks for interruptions,
        no part begins after one.
        """
        raise_if_interrupted()
        began = now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + now() - began


Request = tuple[list[Broadcast], Clock]  # messages, and the clock for carrying them
Steps = Generator[Request, Iterable[Reply], None]


class Transport(Protocol):
    """Carries the messages of a step to the clients and yields their replies in the same order.

    Attributes:
        store: the clients' states, which checkpoints include; None if clients keep their states at
            their own sites.
    """

    @property
    def store(self) -> Store | None: ...

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterable[Reply]:
        """Carry the messages, which all belong to one phase.

        The transport adds to the clock the seconds of `broadcast` (packing), `clients` (while
        clients work) and `upload` (unpacking).
        """
        ...


class Loop:
    """The steps of a run.

    Args:
        method: the run's strategy.
        callbacks: the callbacks, in the order in which the loop calls them.
        evaluates: whether clients evaluate on their own data.

    Attributes:
        round: the number of the last step, from 1; 0 before the first.
        current: the step in progress, or the last one.
        plan: the messages that were sent last.
        row: the line of rounds.jsonl for a finished step while the run evaluates it; else None. If
            the evaluation fails, the row stays.
        best: the round of the best model so far by the clients' validation; 0 while there is none.
        failures: the failures of clients so far, with their rounds.
        notes: values that callbacks add to summary.json.
        transport: carries messages; the driver of the loop sets it.

    Raises:
        ConfigError: clients add noise to replies, and no callback accounts for the noise.
    """

    transport: Transport
    current: OpenStep

    def __init__(
        self, method: FedStrategy, callbacks: Sequence[Callback] = (), *, evaluates: bool = True
    ) -> None:
        self.method = method
        self.callbacks = list(callbacks)
        self.evaluates = evaluates
        self.round = 0
        self.plan: list[Broadcast] = []
        self.row: Row | None = None
        self.best = 0
        self.failures: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self._has_ended = False
        if method.workspace.noise and not any(callback.accounts for callback in self.callbacks):
            raise ConfigError(
                f"privacy.noise={method.workspace.noise.multiplier:g} needs a privacy account: add"
                " fedhet.runs.privacy.account.Account to the callbacks of the run"
            )

    @property
    def evaluating(self) -> bool:
        """Whether the last messages ask for an evaluation."""
        return bool(self.plan) and self.plan[0].phase == EVALUATE

    @property
    def last(self) -> bool:
        """Whether the step in progress is the last one of the run."""
        return locate(self.method.timetable, self.round + 1) is None

    def run(self, transport: Transport) -> None:
        """Take all remaining steps, and end the run.

        Raises:
            RunFailed: a client failed and on_failure is "stop", too few clients succeeded, or the
                merged weights are not finite.
        """
        self.transport = transport
        with self.ending(), suppress(StopIteration):  # after the last step
            steps = self.steps()
            request = next(steps)
            while True:
                request = steps.send(transport.exchange(*request))

    def exchange(self, plan: list[Broadcast]) -> Iterable[Reply]:
        """Carry a callback's messages, which belong to no step."""
        return self.transport.exchange(plan, Clock())

    def steps(self) -> Steps:
        """Take the remaining steps, and yield their messages as requests.

        Raises:
            RunFailed: a client failed and on_failure is "stop", too few clients succeeded, or the
                merged weights are not finite.
        """
        for callback in self.callbacks:
            callback.begun(self)
        method = self.method
        while locate(method.timetable, self.round + 1):
            self.round += 1
            clock = Clock()
            with clock("step"):
                backup = Backup(method, self.round)
                with clock("broadcast"):
                    self.begin(method.plan(self.round))
                try:
                    yield from self._finish(clock, backup)
                    with clock("evaluate"):
                        scores, tally, self.current = sound_scores(method, self.current, backup)
                finally:
                    for failure in self.current.failures:
                        self._note(failure)
                digest = trees.sha256(method.weights)
            self.row = row = step_row(method, self.current, clock, digest)
            if method.evaluates_after(self.current):
                target = method.workspace.task.scoring
                keys = {**target.keys, "loss": "loss"}
                row |= {f"{key}_global": scores.get(score) for score, key in keys.items()}
                if details := target.details(tally):
                    row["details"] = {"test_set": details}
                try:
                    if self.evaluates:
                        with clock("evaluate"):
                            yield from self._evaluation(row, backup)
                finally:  # the step is done, even if its evaluation fails
                    row["seconds"]["evaluate"] = clock.seconds["evaluate"]
            self.row = None
            for callback in self.callbacks:
                callback.step_ended(self, row)

    def _finish(self, clock: Clock, backup: Backup) -> Steps:
        """Finish the step in progress; if it has outliers, repeat it without their clients.

        Raises:
            RunFailed: a client failed and on_failure is "stop", too few clients succeeded, or the
                merged weights are not finite.
        """
        while True:
            try:
                # Replies may be lazy: the clients then train while `finish_step` reads them.
                replies = yield self.plan, clock
                return self.method.finish_step(self.current, replies, self.accept, repeats=True)
            except TakenAgain:
                failed = {failure.pid for failure in self.current.failures}
                with clock("broadcast"):
                    again = backup.plan_again(self.current)
                    left = [msg for msg in again.messages if msg.pid not in failed]
                    self.begin(replace(again, messages=left))

    def _evaluation(self, row: Row, backup: Backup) -> Steps:
        """Add the scores on the clients' data to the row.

        If the scores show that an outlier has made the model useless, undo the step, and let the
        clients evaluate the restored model.

        Raises:
            RunFailed: a client failed and on_failure is "stop", or no client succeeded.
        """
        method = self.method
        failures: list[Failure] = []
        try:
            self.send(evaluation_messages(method))
            updates = received((yield self.plan, Clock()), method, failures.append, self.accept)
            outliers: list[Failure] = []
            diverged = row["loss_global"] is None and mostly_diverged(updates, method)
            if diverged and (undone := backup.undo(self.current, outliers.append)):
                self.current = undone
                failures = outliers  # the server asks all clients again, also those that failed
                row |= {"accepted": 0, "metrics": {}}
                row["weights_sha256"] = trees.sha256(method.weights)
                row["client_state"] = state_sizes(method.run.state_bytes)
                self.send(evaluation_messages(method))
                updates = received((yield self.plan, Clock()), method, failures.append, self.accept)
        finally:
            for failure in failures:
                row["failures"].append(vars(failure))
                self._note(failure)
        scored = updates, method.views, method.workspace.task.scoring
        row |= client_means(*scored)
        if details := client_details(*scored):
            row["details"] = {**row.get("details", {}), "clients": details}
        stop = [callback.evaluated(self, row, updates) for callback in self.callbacks]
        if any(stop):
            method.end_phase(self.current)

    def begin(self, step: OpenStep) -> None:
        """Set the current step and its messages, and count their bytes."""
        self.current = step
        self.send(step.messages)
        for msg in step.messages:
            step.count("down", messages.payload(msg.slot, msg.weights, msg.extras))

    def send(self, plan: list[Broadcast]) -> None:
        """Set the messages to send, and call the callbacks' `planned`."""
        self.plan = plan
        for callback in self.callbacks:
            callback.planned(self, plan)

    def accept(self, update: Upload) -> None:
        """Call the callbacks' `accepted` with an accepted update."""
        for callback in self.callbacks:
            callback.accepted(self, update)

    def _note(self, failure: Failure) -> None:
        self.failures.append({"round": self.round, **vars(failure)})

    # ---- the end
    @contextmanager
    def ending(self) -> Iterator[None]:
        """When the block ends, call `end` with "ok", "failed" or "interrupted"."""
        try:
            with exits_as_errors():
                yield
        except (KeyboardInterrupt, SystemExit) as error:
            self.end("interrupted", error)
            raise
        except Exception as error:
            self.end("failed", error)
            raise
        self.end("ok")

    def end(self, status: str, error: BaseException | None = None) -> None:
        """Call `ended` of every callback. Only the first call of this function has an effect.

        If the last step's evaluation failed, call `step_ended` first, because the step itself is
        over.

        Raises:
            Exception: a callback failed. But if the run itself ended with a `WriteError`, that
                error is reported, and the callback's error is dropped.
        """
        if self._has_ended:
            return
        self._has_ended = True
        problem: BaseException | None = None
        # A row means a call of `step_ended`, and None the call of `ended`.
        for row in [None] if self.row is None else [self.row, None]:
            for callback in self.callbacks:
                try:
                    with exits_as_errors():
                        if row is not None:
                            callback.step_ended(self, row)
                        else:
                            callback.ended(self, status, error)
                except (KeyboardInterrupt, SystemExit) as stopped:
                    status, error, problem = "interrupted", stopped, stopped
                except Exception as failed:  # noqa: BLE001 -- the other callbacks are called first
                    status = "failed"
                    # If the run already failed with a file error, that one is reported.
                    if not isinstance(error, WriteError):
                        error, problem = failed, problem or failed
        if problem is not None:
            raise problem


def step_row(strategy: FedStrategy, current: OpenStep, clock: Clock, digest: str) -> dict[str, Any]:
    """Return one line of rounds.jsonl.

    If the clients report more seconds than the server waited for them, their seconds are scaled
    down to the waiting time.
    """
    seconds = clock.seconds
    train = current.seconds.get("seconds.train", 0.0)
    extras = current.seconds.get("seconds.extras", 0.0)
    waited = seconds.get("clients", 0.0)
    unpacking = seconds.get("upload", 0.0)
    evaluating = seconds.get("evaluate", 0.0)  # so far, only the server has evaluated
    # Every line has these scores; if no evaluation is due, they are null.
    keys = strategy.workspace.task.scoring.keys.values()
    on_clients = [f"{key}_clients_{mean}" for key in keys for mean in ("mean", "weighted")]
    share = min(1.0, waited / (train + extras)) if train + extras else 0.0
    return {
        "phase": current.entry.name,
        "step": current.step,
        "round": current.round,
        "cohort": current.cohort,
        **dict.fromkeys([*(f"{key}_global" for key in (*keys, "loss")), *on_clients]),
        "seconds": {
            "broadcast": seconds["broadcast"],
            "train": share * train,
            "extras": share * extras,
            "upload": unpacking + waited - share * (train + extras),
            "aggregate": seconds["step"] - seconds["broadcast"] - waited - unpacking - evaluating,
            "evaluate": evaluating,
        },
        "bytes": current.bytes,
        "client_state": state_sizes(strategy.run.state_bytes),
        "accepted": current.accepted,
        "failures": [vars(failure) for failure in current.failures],
        "metrics": current.metrics,
        "weights_sha256": digest,
    }


def recorded_numbers(step: OpenStep) -> dict[str, Any]:
    """Return the numbers that the method and the plug-ins recorded, as rounds.jsonl has them."""
    return {
        f"{component}.{name}": value
        for component, recorded in step.recorded.items()
        for name, value in recorded.items()
        if not isinstance(value, Tensor)
    }
