"""What is shown while runs go on in other processes, read from their folders alone.

So it is the same for every launcher. On a terminal there is a line for each running run and one for
the whole; elsewhere a line is printed when a run ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedhet.core.errors import clean
from fedhet.runs.process import signals_deferred
from fedhet.runs.record.bars import bar_on
from fedhet.runs.record.schema import last_step, read_or_empty

if TYPE_CHECKING:
    from rich.progress import TaskID

    from fedhet.study.executors import PlannedRun

# The ends of the keys of the score that is shown, the first that a run has, as `step_line` does.
ON_TEST = ("_global", "acc_clients_mean", "_clients_weighted")
ON_VALIDATION = ("_val_weighted",)


@dataclass(eq=False)
class ShownRun:
    """A run, as far as its folder tells.

    Attributes:
        folder: its run folder, which need not exist yet.
        label: what it is, for people.
        task: its line on the terminal.
        trial: whether its validation score is shown in place of the one on test data.
        before: when summary.json was last changed before the run began, in ns; 0: there was none.
        rounds: how many it will train.
        row: the last line of rounds.jsonl.
        status: "waiting", "running", or how it has ended.
        reason: why it has failed.
        seconds: how long it took.
    """

    folder: Path
    label: str
    task: TaskID
    trial: bool = False
    before: int = 0
    rounds: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    status: str = "waiting"
    reason: str = ""
    seconds: float = 0.0

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
        return min(1.0, self._trained / self.rounds) if self.rounds else 0.0

    @property
    def _trained(self) -> int:
        """Its rounds of training so far, without phases before them."""
        return self.row["step"] if self.row.get("phase") == "train" else 0

    def look(self) -> None:
        """Read what is new in the folder."""
        path = self.folder / "summary.json"
        if self.ended or _changed(path) == self.before or not (summary := read_or_empty(path)):
            return
        self.status, self.rounds = "running", summary.get("rounds", 0)
        self.row = last_step(self.folder / "rounds.jsonl") or self.row
        if "seconds" in summary:  # which are known in the end
            self.seconds = summary["seconds"]["total"]
            self.status, self.reason = summary["status"], summary["reason"] or ""

    def step(self) -> str:
        """The last step in words."""
        if self.row and self.row["phase"] != "train":
            return f"{self.row['phase']} {self.row['step']}"
        return f"round {self._trained}/{self.rounds}"

    def score(self) -> str:
        """The last score, by its name in rounds.jsonl, or the loss; "" before the first."""
        scores = {key: value for key, value in self.row.items() if value is not None}
        for end in ON_VALIDATION if self.trial else ON_TEST:
            for key, value in scores.items():
                if key.endswith(end) and not key.startswith("loss_"):
                    return f"{key} {value:.4f}"
        return f"loss_global {scores['loss_global']:.4f}" if "loss_global" in scores else ""

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
        self.runs: dict[Path, ShownRun] = {}  # those that have begun and not ended
        self.done = done
        self.console = console or Console(stderr=True)
        self.bar = bar_on(self.console, lasting=False)
        self._whole = self.bar.add_task(
            "", total=max(total, 1), completed=done, title="all runs", count=f"{done}/{total}"
        )

    def __enter__(self) -> Watch:
        with signals_deferred():  # interrupted in the middle, it would leave the cursor hidden
            if self.console.is_terminal:
                self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        with signals_deferred():
            self.look()
            self.bar.live.stop()

    def begins(self, run: PlannedRun) -> None:
        """Take notice of a run that begins, also once more."""
        if before := self.runs.get(run.folder):
            self.bar.remove_task(before.task)
        task = self.bar.add_task("", start=False, visible=False, title=run.label, count="")
        self.runs[run.folder] = ShownRun(run.folder, run.label, task, run.trial)

    def ends(self, run: PlannedRun, problem: str) -> None:
        """Take notice of how a run has ended, in so far as its folder does not tell.

        Args:
            run: the run.
            problem: why it has failed, or "".
        """
        shown = self.runs.pop(run.folder)
        self.bar.remove_task(shown.task)
        shown.look()
        if not shown.ended:
            shown.status, shown.reason = ("failed", problem) if problem else ("ok", "")
        self.done += 1
        if not self.console.is_terminal or shown.status != "ok":
            self.tell(f"[{self.done}/{self.total}] {shown.line()}")
        self.look()

    def tell(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def look(self) -> None:
        """Look once at the folders of the runs that have not ended."""
        for shown in self.runs.values():
            shown.look()
        running = [shown for shown in self.runs.values() if shown.status == "running"]
        room = max(1, self.console.height - 4)
        for shown in self.runs.values():
            self.bar.update(shown.task, visible=shown in running[:room])
        for shown in running[:room]:
            self.bar.start_task(shown.task)
            self.bar.update(
                shown.task,
                total=shown.rounds,
                completed=shown.share * shown.rounds,
                count=shown.step(),
                description=shown.score(),
            )
        self.bar.update(
            self._whole,
            completed=self.done + sum(shown.share for shown in self.runs.values()),
            count=f"{self.done}/{self.total}",
            description=f"and {len(running) - room} more" if len(running) > room else "",
        )
        if self.bar.live.is_started:
            self.bar.refresh()


def _changed(path: Path) -> int:
    """When a file was last changed, in ns; 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
