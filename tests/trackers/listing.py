"""A tracker of one's own, which writes what it is told into a file, and fails where it shall."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedhet.runs.trackers.tracker import Tracked, Tracker


class Listing(Tracker):
    """Appends a line to `listing.jsonl` in the run folder for each call.

    Args:
        fails: in which call: "begin", "step 2", "end".
    """

    name = "listing"
    built = 0  # how often

    def __init__(self, *, fails: str = "") -> None:
        Listing.built += 1
        self._fails = fails

    def _add(self, call: str, entry: object) -> None:
        if call == self._fails:
            raise ConnectionError("http://me:secret@there is unreachable")
        with (self._folder / "listing.jsonl").open("a") as file:
            file.write(json.dumps({"call": call, "entry": entry}) + "\n")

    def begin(self, run: Tracked) -> int:
        self._folder = run.folder
        self.id = run.id or "an id"
        about = {"executed": run.executed, "told": run.sent_steps, "id": run.id}
        sweep = run.sweep and run.sweep.name
        self._add("begin", {**about, "sweep": sweep, "settings": dict(run.settings)})
        return run.sent_steps

    def step(self, number: int, values: Mapping[str, float]) -> None:
        lines = (self._folder / "rounds.jsonl").read_text().splitlines()
        self._add(f"step {number}", {"lines": len(lines), "values": dict(values)})

    def end(self, status: str, files: Sequence[Path]) -> None:
        names = [str(file.relative_to(self._folder)) for file in files]
        self._add("end", {"status": status, "files": names})
