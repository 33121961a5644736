"""Shows a run on the terminal: live progress, then a table."""

from __future__ import annotations

import html
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from fedhet.core.check import counted
from fedhet.core.errors import LONGEST_REASON, clean, log
from fedhet.core.kinds import KINDS, Kind, OfClasses, of_row
from fedhet.core.server.callbacks import Callback, Row
from fedhet.runs.process import signals_deferred
from fedhet.runs.record.bars import bar_on
from fedhet.runs.record.scores import DETAILS, columns, detailed, method_name, privacy_spent

if TYPE_CHECKING:
    from fedhet.core.server.loop import Loop

Observer = Callable[[Row], object]
NO_GLOBAL_MODEL = "no global model: each client evaluates its own model"
ON_TEST_SET = "(global model, global test set)"


class Output(Console):
    """A console that raises the error of a closed pipe, as in `python -m fedhet | head`.

    rich itself would exit with 1.
    """

    def on_broken_pipe(self) -> None:
        raise  # the error again, since rich calls this in its except block


def step_line(row: Row) -> str:
    """Return a line about one step."""
    parts = [f"{row['phase']} {row['step']}"]
    target = of_row(row)
    # The clients' score, if there is no global model or no global test set.
    keys = [key for key in (target.key("global"), target.clients_key()) if row.get(key) is not None]
    for key in (*keys[:1], "loss_global"):
        if row[key] is not None:
            parts.append(f"{key} {row[key]:.4f}")
    if "privacy" in row:
        parts.append(f"epsilon {row['privacy']['epsilon']:.4g}")
    if row["failures"]:
        parts.append(f"{_failed(row['failures'])} failed")
    return ", ".join(parts)


def _failed(failures: Sequence[Mapping[str, Any]]) -> str:
    """Return how many clients failed; a client that failed several times counts once."""
    return counted(len({failure["pid"] for failure in failures}), "client")


def log_step(row: Row) -> None:
    """Log a step; this is the observer for processes with a log as their only output."""
    seconds = sum(row["seconds"].values())
    log.info("%s, %s, %.2f s", step_line(row), counted(len(row["cohort"]), "client"), seconds)


class OneLine(logging.Formatter):
    """Formats each message as one line, and indents tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = clean(record.message, LONGEST_REASON)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {clean(line)}" for line in super().formatException(ei).splitlines())


def log_to_stderr(name: str = "fedhet") -> None:
    """Send a logger's messages to stderr.

    A process started by Flower shows the user only its log, so it sends all messages of "fedhet". A
    run sends only the messages of "fedhet.data".
    """
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(OneLine("fedhet: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


class Display(Callback):
    """Shows each step as it ends.

    Args:
        shown: the context of the display; it yields a function that is called with each row.
    """

    def __init__(self, shown: AbstractContextManager[Observer]) -> None:
        self._shown = shown
        self._stack = ExitStack()

    def begun(self, loop: Loop) -> None:
        self._observe = self._stack.enter_context(self._shown)

    def step_ended(self, loop: Loop, row: Row) -> None:
        self._observe(row)

    def ended(self, loop: Loop, status: str, error: BaseException | None) -> None:
        self._stack.close()


@contextmanager
def progress(title: str, steps: int, done: int = 0) -> Iterator[Observer]:
    """Show a live bar on a terminal and in a notebook, and one line per step elsewhere.

    Args:
        title: the name of the run.
        steps: the number of its steps.
        done: how many steps were taken before.
    """
    if in_notebook():
        yield _shown_in_notebook(title, steps, done)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda row: console.print(step_line(row), highlight=False, soft_wrap=True)
        return
    bar = bar_on(console)
    numbers = itertools.count(done + 1)
    task = bar.add_task("", total=steps, completed=done, title=title, count=f"{done}/{steps}")

    def shown(row: Row) -> None:
        bar.update(task, advance=1, count=f"{next(numbers)}/{steps}", description=step_line(row))

    try:
        # An interrupt inside would leave the cursor hidden and the output redirected.
        with signals_deferred():
            bar.start()
        yield shown
    finally:
        with signals_deferred():
            bar.stop()


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _shown_in_notebook(title: str, steps: int, done: int) -> Observer:
    """Show the same bar by IPython's own display, which needs no widgets."""
    from IPython.display import display

    began, numbers = time.perf_counter(), itertools.count(done)

    def shown(line: str) -> dict[str, str]:
        number = next(numbers)
        text = f"{title} {number}/{steps}, {time.perf_counter() - began:.1f} s: {line}"
        bar = f'<progress value="{number}" max="{steps}"></progress>'
        return {"text/plain": text, "text/html": f"{bar} {html.escape(text)}"}

    place = display(shown(""), raw=True, display_id=True)
    return lambda row: place.update(shown(step_line(row)), raw=True)


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """Print the table at the end of a run, with the paths of its figures.

    In a notebook nothing is printed, because the `Run` itself shows the table.
    """
    if in_notebook():
        return
    table = Table(title=method_name(summary), show_header=False)
    rows = summary_rows(summary)
    for name, value in rows:
        table.add_row(Text(name), Text(value))  # no markup, because some names come from clients
    console: Console = Output()
    if not console.is_terminal:
        # In a file or a pipe, no line is folded.
        console = Output(width=max(console.width, 40 + max(len(value) for _, value in rows)))
    console.print(table)
    for path in sorted((folder / "figures").glob("*.png")):
        # Outside of the table, because a table folds long paths in a narrow terminal.
        console.print(f"figure: {path}", soft_wrap=True, highlight=False, markup=False)


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows (name, value) of the table at the end of a run."""
    partition, seconds, state = (summary[key] for key in ("partition", "seconds", "client_state"))
    target = KINDS[summary.get("target", OfClasses.name)]
    has_global = "global" in summary["models"]
    failures, stopped = summary["failures"], summary.get("stopped_early")
    clients = counted(partition["clients"], "client")
    data = (
        f"{summary['dataset']}, {clients}, {partition['name']}"
        if summary["dataset"]
        else f"given as a Task, {clients}"
    )
    rows = {
        "data": f"{data}; model {summary['model']}",
        "rounds": ", ".join(f"{phase['name']} {phase['rounds']}" for phase in summary["phases"]),
        "scores": None if has_global or target.keys else NO_GLOBAL_MODEL,
        **(_scores(summary, target) if target.keys else {}),
        **{place: _details(found) for place, found in detailed(summary).items()},
        "loss_global": f"{_score(summary['loss'])}   {ON_TEST_SET}" if has_global else None,
        "seconds": f"{seconds['total']:.1f} (clients {seconds['train']:.1f},"
        f" evaluation {seconds['evaluate']:.1f})",
        **{
            f"sent {way}": ", ".join(f"{kind} {decimal(n)}" for kind, n in kinds.items())
            or "nothing"
            for way, kinds in summary["bytes"].items()
        },
        "stored by the clients": f"{decimal(state['bytes'])} in total, the largest"
        f" {decimal(state['largest'])}"
        if state["bytes"]
        else None,
        **dict(privacy_spent(summary)),
        "stopped early": stopped and f"after round {stopped['round']}: {stopped['reason']}",
        "failed replies": f"{len(failures)}, of {_failed(failures)}" if failures else None,
    }
    return [(name, value) for name, value in rows.items() if value is not None]


def _scores(summary: dict[str, Any], target: type[Kind]) -> dict[str, str | None]:
    """Return the rows of the scores, including the measures for the comparison of methods."""
    score, view, names = target.score(), summary["models"][0], columns(summary)
    over = "all clients' test data" if target.pooled else "clients' mean"
    clients, worst = (
        _score(summary[key]) for key in (target.clients_key(), target.key("clients_worst_decile"))
    )
    last_k = target.key("last_k")
    last, decides = summary[last_k], names[last_k]
    other = [f"{names[name]} {_score(summary[name])}" for name in list(target.keys)[1:]]
    return {
        names[score]: f"{_at_three(summary[score])}   {ON_TEST_SET}"
        if "global" in summary["models"]
        else NO_GLOBAL_MODEL,
        **{
            names[own]: f"{_at_three(summary[own])}   ({own} models, {over})"
            for own in ("personal", "finetuned")
            if own in summary
        },
        target.clients_key(): f"last {clients}   worst tenth of the clients {worst}"
        f"   ({view} {'model' if view == 'global' else 'models'}, {over})",
        last_k: f"{_score(last['mean'])}, the mean of the last {last['evaluations']} of {decides}",
        "other scores": ", ".join(other) or None,
        **{
            f"until {decides} {wanted[score]:g}": "not reached"
            if wanted["rounds"] is None
            else f"round {wanted['rounds']}, after {decimal(wanted['bytes'])}"
            f" and {wanted['seconds']:.1f} s"
            for wanted in summary["thresholds"]
        },
    }


def _details(found: dict[str, Any]) -> str:
    """Return the scores as text, and for two classes the four counts."""
    parts = [f"{words} {found[name]:.4f}" for name, words in DETAILS.items() if name in found]
    if len(found["confusion"]) == 2:
        (tn, fp), (fn, tp) = found["confusion"]
        parts.append(f"TN {tn}, FP {fp}, FN {fn}, TP {tp}")
    return "   ".join(parts)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _at_three(scores: dict[str, float | None]) -> str:
    return (
        f"last {_score(scores['last'])}   at the best validation {_score(scores['best_val'])}"
        f"   best on test {_score(scores['best_test'])}"
    )
