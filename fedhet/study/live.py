"""What is shown while runs go on in other processes, read from their folders alone.

So it is the same for every launcher. A line is printed when a run ends; on a terminal, where only
those of runs that have failed are printed, a bar shows how much of the whole is done.
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

# The ends of the keys of the score that is shown, the first that a run has, as `step_line` does.
ON_TEST = ("_global", "acc_clients_mean", "_clients_weighted")
ON_VALIDATION = ("_val_weighted",)


class Watch:
    """Looks at the runs' folders, and shows what has changed; on a terminal inside its block.

    Args:
        total: how many runs there are in all.
        done: how many of them had ended before.
        console: where to show it; stderr if None.
    """

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self.total, self.done = total, done
        self.running: set[Path] = set()  # the folders of those that have begun and not ended
        self.console = console or Console(stderr=True)
        self.bar = bar_on(self.console, lasting=False)
        self._whole = self.bar.add_task("", total=max(total, 1), title="all runs", count="")
        self.look()

    def __enter__(self) -> Watch:
        with signals_deferred():  # interrupted in the middle, it would leave the cursor hidden
            if self.console.is_terminal:
                self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        with signals_deferred():
            self.bar.live.stop()

    def begins(self, run: PlannedRun) -> None:
        """Take notice of a run that begins, also once more."""
        self.running.add(run.folder)

    def ends(self, run: PlannedRun, problem: str) -> None:
        """Take notice of a run that has ended.

        Args:
            run: the run.
            problem: why it has failed, or "".
        """
        self.running.discard(run.folder)
        self.done += 1
        place = f"[{self.done}/{self.total}]"
        if problem:
            self.tell(f"{place} {run.label}: failed: {clean(problem)}")
        elif not self.console.is_terminal:
            seconds = read_or_empty(run.folder / "summary.json").get("seconds", {"total": 0.0})
            told = score(last_step(run.folder / "rounds.jsonl"), trial=run.trial)
            self.tell(f"{place} {told} ({seconds['total']:.1f} s): {run.label}")
        self.look()

    def tell(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def look(self) -> None:
        """Look once at the folders of the runs that have not ended."""
        completed = self.done + sum(map(share, self.running))
        self.bar.update(self._whole, completed=completed, count=f"{self.done}/{self.total}")
        self.bar.refresh()


def share(folder: Path) -> float:
    """How much of a run's training is done, in [0, 1], as far as its folder tells."""
    step = last_step(folder / "rounds.jsonl")
    rounds = read_or_empty(folder / "summary.json").get("rounds")
    return min(1.0, step["step"] / rounds) if rounds and step.get("phase") == "train" else 0.0


def score(row: dict[str, Any], *, trial: bool) -> str:
    """The score in a line of rounds.jsonl by its name there, or the loss; "ok" without either.

    Args:
        row: the line.
        trial: whether the score on validation data is meant, not the one on test data.
    """
    scores = {key: value for key, value in row.items() if value is not None}
    for end in ON_VALIDATION if trial else ON_TEST:
        for key, value in scores.items():
            if key.endswith(end) and not key.startswith("loss_"):
                return f"{key} {value:.4f}"
    return f"loss_global {scores['loss_global']:.4f}" if "loss_global" in scores else "ok"
