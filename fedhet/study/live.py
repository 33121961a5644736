"""Shows the progress of runs in other processes. It reads only their folders.

The display is therefore the same for every launcher. Without a terminal, a line is printed when a
run ends. On a terminal, a bar shows the progress of all runs, and only failed runs get a line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedhet.core.errors import clean
from fedhet.runs.process import signals_deferred
from fedhet.runs.record.bars import bar_on
from fedhet.runs.record.schema import last_step, read_or_empty

if TYPE_CHECKING:
    from fedhet.study.executors import PlannedRun

# Ends of the keys of scores. The first key that a run has is shown, as `step_line` does.
ON_TEST = ("_global", "acc_clients_mean", "_clients_weighted")
ON_VALIDATION = ("_val_weighted",)


class Watch:
    """Reads the runs' folders and shows their progress. On a terminal, the bar needs a with block.

    Args:
        total: number of all runs.
        done: number of runs that had ended before.
        console: the console to write to; None: stderr.
    """

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self.total, self.done = total, done
        self.running: set[Path] = set()  # the folders of runs that have begun and not ended
        self.console = console or Console(stderr=True)
        self.bar = bar_on(self.console, lasting=False)
        self._whole = self.bar.add_task("", total=max(total, 1), title="all runs", count="")
        self.look()

    def __enter__(self) -> Watch:
        with signals_deferred():  # an interrupt in the middle would leave the cursor hidden
            if self.console.is_terminal:
                self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        with signals_deferred():
            self.bar.live.stop()

    def begins(self, run: PlannedRun) -> None:
        """Note that a run begins, or begins again."""
        self.running.add(run.folder)

    def ends(self, run: PlannedRun, problem: str) -> None:
        """Note that a run has ended, and print its line.

        Args:
            run: the run.
            problem: why the run has failed, or "".
        """
        self.running.discard(run.folder)
        self.done += 1
        place = f"[{self.done}/{self.total}]"
        if problem:
            self.tell(f"{place} {run.label}: failed: {clean(problem)}")
        elif not self.console.is_terminal:
            seconds = read_or_empty(run.folder / "summary.json").get("seconds", {"total": 0.0})
            reached = score(last_step(run.folder / "rounds.jsonl"), trial=run.trial)
            self.tell(f"{place} {reached} ({seconds['total']:.1f} s): {run.label}")
        self.look()

    def tell(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def look(self) -> None:
        """Read the folders of the runs that have not ended, and update the bar."""
        completed = self.done + sum(map(share, self.running))
        self.bar.update(self._whole, completed=completed, count=f"{self.done}/{self.total}")
        self.bar.refresh()


def share(folder: Path) -> float:
    """Return the completed fraction of a run's training, in [0, 1], from its folder."""
    step = last_step(folder / "rounds.jsonl")
    rounds = read_or_empty(folder / "summary.json").get("rounds")
    return min(1.0, step["step"] / rounds) if rounds and step.get("phase") == "train" else 0.0


def score(row: dict[str, Any], *, trial: bool) -> str:
    """Format the score of a line of rounds.jsonl with its key; else the loss; else "ok".

    Args:
        row: the line.
        trial: whether to use the score on validation data, and not the score on test data.
    """
    scores = {key: value for key, value in row.items() if value is not None}
    for end in ON_VALIDATION if trial else ON_TEST:
        for key, value in scores.items():
            if key.endswith(end) and not key.startswith("loss_"):
                return f"{key} {value:.4f}"
    return f"loss_global {scores['loss_global']:.4f}" if "loss_global" in scores else "ok"
