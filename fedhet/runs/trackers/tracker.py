"""The interface of trackers, which follow a run beside its folder; only the server has one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import DictConfig

from fedhet.core.check import installed
from fedhet.core.errors import ConfigError, DataError, log, reason_of
from fedhet.core.server.callbacks import Callback, Row
from fedhet.core.server.loop import Loop
from fedhet.data.forms import read_object
from fedhet.data.storage import write_json
from fedhet.runs.config.instantiation import instantiate
from fedhet.runs.record.schema import leaves, read_or_empty

A_TIME = re.compile(r"\d\d-\d\d-\d\d")


@dataclass(frozen=True)
class Tracked:
    """The run: its folder, that of its sweep or experiment, and its settings by dotted keys.

    A resumed run goes on after the step `executed`, and has the `id` of its tracker and the number
    of steps that were `sent_steps`.
    """

    folder: Path
    sweep: Path | None
    settings: Mapping[str, Any]
    executed: int
    sent_steps: int
    id: str | None

    @property
    def group(self) -> str | None:
        """The name of the experiment, or of the sweep's folder, with the day if it is a time."""
        if self.sweep is None:
            return None
        with suppress(OSError, DataError, KeyError):
            return str(read_object(self.sweep / "experiment.json")["experiment"])
        name = self.sweep.name
        return f"{self.sweep.parent.name}/{name}" if A_TIME.fullmatch(name) else name


class Tracker:
    """An exception in a method costs the tracking and not the run; one in __init__ refuses it."""

    package: ClassVar[str | None] = None  # what it imports, which is also the extra of fedhet
    id: str | None = None  # a resumed run gets it back

    def begin(self, run: Tracked) -> int:
        """Return how many steps it holds already; all later ones are told, those executed too."""
        raise NotImplementedError

    def step(self, number: int, values: Mapping[str, float]) -> None:
        """Take the numbers in a line of rounds.jsonl, NaN included, by names `seconds/train`."""

    def end(self, status: str, files: Sequence[Path]) -> None:
        """Take the results: status ok, failed or interrupted; settings, model and figures."""


# ---- what the run's tracker is told, and how its failures are kept from the run
DEPTH = 3  # how far below its folder the runs of a sweep may lie
FILE = "tracker.json"  # in the run folder: which tracker was told how many steps, under which id
# What a tracker gets in the end.
RESULTS = ("*.yaml", "summary.json", "model_card.md", "*.safetensors", "figures/*.png")


def sweep_of(folder: Path) -> Path | None:
    """The folder of the sweep or experiment to which a run folder belongs; None for a run alone.

    A sweep writes multirun.yaml, and an experiment its experiment.json, before its first run.
    """
    marks = ("experiment.json", "multirun.yaml")
    above = folder.resolve().parents[:DEPTH]
    return next((up for up in above if any((up / mark).is_file() for mark in marks)), None)


class Tracking(Callback):
    """A run and its tracker, which is dropped with a warning when it first fails.

    The run folder is complete without it, and a resumed run tells the tracker what it has missed.

    Args:
        choice: that of the group `tracker`.
        tracker: None if there is none.
        folder: the run folder.
    """

    def __init__(self, choice: str, tracker: Tracker | None, folder: Path) -> None:
        self._name = choice
        self._tracker = tracker
        self._folder = folder

    def begin(self, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Begin to track the run, or go on.

        Args:
            settings: its configuration.
            rows: the lines of rounds.jsonl so far.
        """

        def begin(tracker: Tracker) -> None:
            before = read_or_empty(self._folder / FILE)
            if before.get("tracker") != self._name:
                before = {"steps": 0, "id": None}
            run = Tracked(
                folder=self._folder,
                sweep=sweep_of(self._folder),
                settings=dict(leaves(settings)),
                executed=len(rows),
                sent_steps=before["steps"],
                id=before["id"],
            )
            self._known = tracker.begin(run)
            self._note(tracker, self._known)
            for number, row in enumerate(rows, 1):
                self._tell(tracker, number, row)

        self._unharmed(begin)

    def step_ended(self, loop: Loop, row: Row) -> None:
        # One whose evaluation has failed is told again where the run goes on with it.
        whole = loop.row is None
        self._unharmed(lambda tracker: self._tell(tracker, loop.round, row, whole))

    def ended(self, loop: Loop, status: str, error: BaseException | None) -> None:
        files = [path for form in RESULTS for path in sorted(self._folder.glob(form))]
        self._unharmed(lambda tracker: tracker.end(status, files))

    def _tell(
        self, tracker: Tracker, number: int, row: Mapping[str, Any], whole: bool = True
    ) -> None:
        """Tell a line of rounds.jsonl, unless it is known; one that is not whole is told again."""
        if number > self._known:
            tracker.step(number, numbers(row))
            if whole:
                self._note(tracker, number)

    def _note(self, tracker: Tracker, steps: int) -> None:
        entry = {"tracker": self._name, "id": tracker.id, "steps": steps}
        write_json(self._folder / FILE, entry)

    def _unharmed(self, action: Callable[[Tracker], None]) -> None:
        """Let the tracker act; one that fails is named once and never called again."""
        if self._tracker is None:
            return
        try:
            action(self._tracker)
        except Exception as error:  # noqa: BLE001 -- a library's failure is not the run's
            self._tracker = None
            reason = re.sub(r"//[^/@\s]*@", "//", reason_of(error))  # without a password
            log.warning("tracker=%s fails, and the run goes on without it: %s", self._name, reason)


def tracker_of(cfg: DictConfig) -> Tracker | None:
    """The tracker that the configuration names, which has not begun; None for none.

    Raises:
        ConfigError: a setting of it is wrong, or its package is missing.
    """
    tracker = instantiate(cfg.tracker)
    if tracker is None:
        return None
    if not isinstance(tracker, Tracker):
        raise ConfigError(f"tracker._target_={cfg.tracker._target_}: it is no fedhet Tracker")
    if tracker.package:
        ours = type(tracker).__module__.startswith("fedhet.")
        extra = tracker.package if ours else None
        installed(f"tracker._target_={cfg.tracker._target_}", tracker.package, extra=extra)
    return tracker


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a line of rounds.jsonl, as `seconds/train`; of lists how many they hold."""
    counted = {key: len(value) if isinstance(value, list) else value for key, value in row.items()}
    return {
        name.replace(".", "/"): float(value)
        for name, value in leaves(counted, "/")
        if isinstance(value, int | float)
    }
