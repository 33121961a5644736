"""Whole runs, to compare their final weights bit for bit."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from fedhet.core import trees
from fedhet.core.messages import Broadcast, Reply, Upload
from fedhet.core.server.phases import locate
from fedhet.core.task import Task
from fedhet.engines.dispatch import run_job
from fedhet.flower import wire
from fedhet.runs import config
from fedhet.runs.job import Job
from fedhet.runs.process import pinned_threads
from fedhet.runs.record.outcome import Run
from fedhet.runs.stores import DiskStore


def sha256(*overrides: str, task: Task | None = None) -> str:
    """Run, and return the hash of the final weights; equal hashes mean equal bytes.

    Args:
        overrides: the settings, such as "method=fedmine" and "engine.workers=2".
        task: replaces the configured dataset, partition and model.

    Raises:
        ConfigError: a setting is unknown or out of range.
        RunFailed: the run ended with status "failed".
    """
    with tempfile.TemporaryDirectory(prefix="fedhet-test-") as folder:
        run = run_quietly(config.compose(overrides), Path(folder, "run"), task)
    return run.summary["weights_sha256"]


def sha256_apart(*overrides: str, task: Task | None = None) -> str:
    """Return the same hash for a run in which clients share only messages and states.

    Each message passes through Flower's wire format, and new objects are built to serve it, as in a
    deployment.

    Raises:
        AssertionError: a client failed, changed its message, or keeps a state with NaN or infinite
            values.
    """
    with tempfile.TemporaryDirectory(prefix="fedhet-test-") as folder:
        apart = Apart(config.compose(overrides), task, Path(folder)).run()
        apart.check_states()
    return trees.sha256(apart.strategy.weights)


def run_quietly(settings: config.Config, folder: Path, task: Task | None = None) -> Run:
    """Run a configuration in its engine, without figures and without output on the terminal."""
    given = replace(settings, run_dir=str(folder), run_dir_given=True)
    with (
        mock.patch("fedhet.runs.record.figures.draw", return_value=[]),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        return run_job(given, task)


class Apart:
    """A run that serves every message with new objects, as if by a new process.

    Args:
        settings: the configuration.
        task: replaces the configured dataset, partition and model.
        folder: the folder for the clients' states.

    Attributes:
        strategy: the server half.
        store: the clients' states.
    """

    def __init__(self, settings: config.Config, task: Task | None, folder: Path) -> None:
        self._settings = settings
        self._task = task
        self.store = DiskStore(folder)
        self.strategy = Job(settings, task).strategy

    def run(self) -> Apart:
        """Take all steps of the timetable, without evaluation."""
        number = 0
        with pinned_threads(self._settings.run.engine.threads):
            while locate(self.strategy.timetable, number + 1):
                number += 1
                step = self.strategy.plan(number)
                self.strategy.finish_step(step, self._replies(step.messages))
        return self

    def check_states(self) -> None:
        """Check the state of every client that keeps one.

        Raises:
            AssertionError: the state that the server accepted is lost, or holds NaN or infinite
                values.
        """
        for pid, version in self.strategy.run.versions.items():
            state = self.store.load(pid, version)
            assert state, f"client {pid} has lost its state of round {version}"
            bad = trees.first_nonfinite(state)
            assert bad is None, f"the state {bad!r} of client {pid} holds NaN or infinite values"

    def _replies(self, plan: list[Broadcast]) -> Iterator[Reply]:
        for msg in plan:
            before = _digest(msg)
            tensors, carried = wire.MessagePacker()(msg)
            received = wire.read_broadcast(list(map(wire.read_array, tensors)), carried)
            reply = Job(self._settings, self._task).client(self.store).handle(received)
            assert isinstance(reply, Upload), str(reply)
            assert _digest(received) == before == _digest(msg), (
                f"client {msg.pid} changed the tensors of its message in phase {msg.phase!r}; the"
                " server and other clients may share these tensors"
            )
            yield wire.read_reply(msg, wire.reply_arrays(msg, reply))


def _digest(msg: Broadcast) -> str:
    """Return a hash over all tensors of a message."""
    extras = {
        name: value if isinstance(value, dict) else {"": value}
        for name, value in msg.extras.items()
        if isinstance(value, torch.Tensor | dict)
    }
    return trees.sha256({"weights": dict(msg.weights), **extras})
