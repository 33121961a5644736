"""What is shown while runs go on in other processes, read from their folders alone.

So it is the same for every launcher. On a terminal there is a line for each running run and a bar
for the whole; elsewhere a line is printed when a run ends.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedhet.core.errors import clean
from fedhet.process import signals_deferred

if TYPE_CHECKING:
    from fedhet.launchers.runs import PlannedRun

TITLES = {"acc": "accuracy", "balanced": "balanced accuracy", "exact": "exact matches"}


@dataclass
class ShownRun:
    """A run, as far as its folder tells.

    Attributes:
        folder: its run folder, which need not exist yet.
        label: what it is, for people.
        before: when summary.json was last changed before the run began, in ns; 0: there was none.
        began: when the run was first seen, on the monotonic clock.
        rounds: how many it will train.
        row: the last line of rounds.jsonl.
        read: the bytes of rounds.jsonl that are read.
        status: "waiting", "running", or how it has ended.
        reason: why it has failed.
        seconds: how long it took.
        trial: whether its validation score is shown in place of the one on test data.
    """

    folder: Path
    label: str
    before: int = 0
    began: float = 0.0
    rounds: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    read: int = 0
    status: str = "waiting"
    reason: str = ""
    seconds: float = 0.0
    trial: bool = False

    def __post_init__(self) -> None:
        self.before = _changed(self.folder / "summary.json")

    @property
    def ended(self) -> bool:
        return self.status not in ("waiting", "running")

    @property
    def share(self) -> float:
        """How much of it is done, in [0, 1]."""
        if self.ended:
            return 1.0
        return min(1.0, self.row.get("round", 0) / self.rounds) if self.rounds else 0.0

    def look(self) -> None:
        """Read what is new in the folder."""
        path = self.folder / "summary.json"
        if self.ended or _changed(path) == self.before:
            return
        try:
            summary = json.loads(path.read_text())
            self._read_rows()
        except (OSError, ValueError):  # it is being written
            return
        if self.status == "waiting":
            self.status, self.began = "running", time.monotonic()
        self.rounds = summary.get("rounds", 0)
        self.seconds = time.monotonic() - self.began
        if "seconds" in summary:  # which are known in the end
            self.seconds = summary["seconds"]["total"]
            self.status, self.reason = summary["status"], summary["reason"] or ""

    def _read_rows(self) -> None:
        with (self.folder / "rounds.jsonl").open("rb") as file:
            if file.seek(0, 2) < self.read:  # a new file
                self.read = 0
            file.seek(self.read)
            lines, end, _ = file.read().rpartition(b"\n")
        if end:
            self.row = json.loads(lines.rpartition(b"\n")[2])
            self.read += len(lines) + 1

    def score(self) -> str:
        """The last score in words, of the global model if there is one; "" before the first."""
        on_test = ("_global", "_clients_weighted", "_clients_mean")
        for where in ("_val_weighted",) if self.trial else on_test:
            for key, value in self.row.items():
                name = key.removesuffix(where)
                if name not in (key, "loss") and value is not None:
                    on = "validation " if self.trial else ""
                    return f"{on}{TITLES.get(name, name)} {value:.4f}"
        loss = self.row.get("loss_global")
        return "" if loss is None else f"loss {loss:.4f}"

    def line(self) -> str:
        """How it has ended, in words."""
        if self.status == "ok":
            return f"{self.score() or 'ok'} ({self.seconds:.1f} s): {self.label}"
        return f"{self.label}: {self.status}: {clean(self.reason)}"


class Watch:
    """Looks at the runs' folders, and shows what has changed; on a terminal inside its block.

    Args:
        total: how many runs there are in all.
        done: how many of them had ended before.
        console: where to show it; stderr if None.
    """

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self.total = total
        self.runs: dict[Path, ShownRun] = {}
        self.before = done
        self.done = done
        self.console = console or Console(stderr=True)
        self._began = time.monotonic()
        self.live = Live(
            get_renderable=self.render,
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # it would become stderr
        )

    def __enter__(self) -> Watch:
        with signals_deferred():  # interrupted in the middle, it would leave the cursor hidden
            if self.console.is_terminal:
                self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        with signals_deferred():
            self.look()
            self.live.stop()

    def begins(self, run: PlannedRun) -> None:
        """Take notice of a run that begins."""
        self.runs[run.folder] = ShownRun(run.folder, run.label, trial=run.trial)

    def ends(self, run: PlannedRun, problem: str) -> None:
        """Take notice of how a run has ended, in so far as its folder does not tell.

        Args:
            run: the run.
            problem: why it has failed, or "".
        """
        shown = self.runs[run.folder]
        shown.look()
        if shown.status in ("waiting", "running"):
            shown.status, shown.reason = ("failed", problem) if problem else ("ok", "")
        self.done += 1
        if not self.console.is_terminal or shown.status != "ok":
            line = f"[{self.done}/{self.total}] {shown.line()}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def look(self) -> None:
        """Look at all folders once."""
        for shown in self.runs.values():
            shown.look()
        if self.live.is_started:
            self.live.refresh()

    def left(self) -> float | None:
        """Seconds until all runs will have ended; None before there is a basis for that."""
        progress = sum(run.share for run in self.runs.values())
        seconds = time.monotonic() - self._began
        if progress <= 0 or seconds < 1:
            return None
        return seconds * (self.total - self.before - progress) / progress

    def render(self) -> RenderableType:
        """The lines of the running runs, and the bar."""
        grid = Table.grid(padding=(0, 2))
        running = [run for run in self.runs.values() if run.status == "running"]
        room = max(1, self.console.height - 4)
        for run in running[:room]:
            step = f"round {run.row.get('round', 0)}/{run.rounds}"
            if run.row and run.row["phase"] != "train":
                step = f"{run.row['phase']} {run.row['step']}"
            grid.add_row(
                *(Text(text, no_wrap=True) for text in (run.score(), step, _time(run.seconds))),
                Text(run.label, overflow="ellipsis", no_wrap=True),
            )
        if len(running) > room:
            grid.add_row(Text(f"and {len(running) - room} more"))
        left = self.left()
        bar = Table.grid(padding=(0, 2))
        progress = self.before + sum(run.share for run in self.runs.values())
        bar.add_row(
            Text(f"{self.done}/{self.total}"),
            ProgressBar(total=max(self.total, 1), completed=progress, width=40),
            Text(_time(time.monotonic() - self._began)),
            Text("" if left is None else f"{_time(left)} left"),
        )
        return Group(grid, bar)


def _changed(path: Path) -> int:
    """When a file was last changed, in ns; 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _time(seconds: float) -> str:
    """Seconds as people read them."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
