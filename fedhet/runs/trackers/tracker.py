"""The interface of trackers, which send a run's progress to another tool; only servers use one."""

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
    """The run that a tracker follows.

    Attributes:
        folder: the run folder.
        sweep: the folder of its sweep or experiment, or None.
        settings: its settings by dotted keys.
        executed: the number of steps that a resumed run has executed; 0 for a new run.
        sent_steps: how many steps were sent to the tracker before.
        id: the id that the tracker had before, or None.
    """

    folder: Path
    sweep: Path | None
    settings: Mapping[str, Any]
    executed: int
    sent_steps: int
    id: str | None

    @property
    def group(self) -> str | None:
        """The name of the experiment or of the sweep's folder; with the day if that is a time."""
        if self.sweep is None:
            return None
        with suppress(OSError, DataError, KeyError):
            return str(read_object(self.sweep / "experiment.json")["experiment"])
        name = self.sweep.name
        return f"{self.sweep.parent.name}/{name}" if A_TIME.fullmatch(name) else name


class Tracker:
    """Base class of trackers.

    If a method raises an exception, the run continues without the tracker. If __init__ raises one,
    the run does not start.
    """

    package: ClassVar[str | None] = None  # the package to import; fedhet has an extra of this name
    id: str | None = None  # a resumed run passes it to `begin`

    def begin(self, run: Tracked) -> int:
        """Start tracking, and return how many steps the tracker already has.

        All later steps are passed to `step`, including steps that were executed before.
        """
        raise NotImplementedError

    def step(self, number: int, values: Mapping[str, float]) -> None:
        """Track the numbers in a line of rounds.jsonl, also NaN, by names like `seconds/train`."""

    def end(self, status: str, files: Sequence[Path]) -> None:
        """Track the end: status ok, failed or interrupted; files of settings, model and figures."""


# ---- how a run calls its tracker, and survives the tracker's failures
DEPTH = 3  # the folders of a sweep's runs may lie this many levels below the sweep's folder
FILE = "tracker.json"  # in the run folder: the tracker, its id, and how many steps it has
# The files that a tracker gets at the end.
RESULTS = ("*.yaml", "summary.json", "model_card.md", "*.safetensors", "figures/*.png")


def sweep_of(folder: Path) -> Path | None:
    """Return the folder of the sweep or experiment of a run folder; None for a single run.

    A sweep writes multirun.yaml before its first run, and an experiment writes experiment.json.
    """
    marks = ("experiment.json", "multirun.yaml")
    above = folder.resolve().parents[:DEPTH]
    return next((up for up in above if any((up / mark).is_file() for mark in marks)), None)


class Tracking(Callback):
    """Calls a run's tracker; after the tracker's first failure, it warns and calls it no more.

    The run folder is complete without the tracker. A resumed run sends the tracker the steps that
    it missed.

    Args:
        choice: the choice of the group `tracker`.
        tracker: the tracker, or None.
        folder: the run folder.
    """

    def __init__(self, choice: str, tracker: Tracker | None, folder: Path) -> None:
        self._name = choice
        self._tracker = tracker
        self._folder = folder

    def begin(self, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Begin or continue to track the run.

        Args:
            settings: the run's configuration.
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
        # If the evaluation of the step failed, a resumed run repeats the step and sends it again.
        whole = loop.row is None
        self._unharmed(lambda tracker: self._tell(tracker, loop.round, row, whole))

    def ended(self, loop: Loop, status: str, error: BaseException | None) -> None:
        files = [path for form in RESULTS for path in sorted(self._folder.glob(form))]
        self._unharmed(lambda tracker: tracker.end(status, files))

    def _tell(
        self, tracker: Tracker, number: int, row: Mapping[str, Any], whole: bool = True
    ) -> None:
        """Send a line of rounds.jsonl, unless the tracker has it; send incomplete lines again."""
        if number > self._known:
            tracker.step(number, numbers(row))
            if whole:
                self._note(tracker, number)

    def _note(self, tracker: Tracker, steps: int) -> None:
        write_json(self._folder / FILE, {"tracker": self._name, "id": tracker.id, "steps": steps})

    def _unharmed(self, action: Callable[[Tracker], None]) -> None:
        """Call the tracker; if it fails, log a warning and never call it again."""
        if self._tracker is None:
            return
        try:
            action(self._tracker)
        except Exception as error:  # noqa: BLE001 -- a tracker's failure must not end the run
            self._tracker = None
            reason = re.sub(r"//[^/@\s]*@", "//", reason_of(error))  # without a password
            log.warning("tracker=%s failed; the run continues without it: %s", self._name, reason)


def tracker_of(cfg: DictConfig) -> Tracker | None:
    """Build the tracker that the configuration names, and do not begin to track; None for none.

    Raises:
        ConfigError: a setting of the tracker is wrong, or its package is missing.
    """
    tracker = instantiate(cfg.tracker)
    if tracker is None:
        return None
    if not isinstance(tracker, Tracker):
        raise ConfigError(
            f"tracker._target_={cfg.tracker._target_} is no subclass of"
            " fedhet.runs.trackers.tracker.Tracker"
        )
    if tracker.package:
        extra = tracker.package if type(tracker).__module__.startswith("fedhet.") else None
        installed(f"tracker._target_={cfg.tracker._target_}", tracker.package, extra=extra)
    return tracker


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line of rounds.jsonl, as `seconds/train`; of lists the lengths."""
    counted = {key: len(value) if isinstance(value, list) else value for key, value in row.items()}
    return {
        name.replace(".", "/"): float(value)
        for name, value in leaves(counted, "/")
        if isinstance(value, int | float)
    }
