"""The interface of trackers, which follow a run beside its folder; only the server has one."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedhet.core.errors import DataError
from fedhet.record.schema import read_object

A_TIME = re.compile(r"\d\d-\d\d-\d\d")


@dataclass(frozen=True)
class Tracked:
    """The run: its folder, that of its sweep or experiment, and its settings by dotted keys.

    A resumed run goes on after the step `executed`, and has the `id` of its tracker and the number
    of steps that were `told`.
    """

    folder: Path
    sweep: Path | None
    settings: Mapping[str, Any]
    executed: int
    told: int
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
