"""What a run shows on the terminal: live progress, then a table."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedhet.check import counted

if TYPE_CHECKING:
    from fedhet.record.summary import Row
    from fedhet.server import Observer

log = logging.getLogger("fedhet")


class Output(Console):
    """A console whose reader may leave, as in `python -m fedhet | head`: rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise  # again: rich calls this where it has caught the error


def step_line(row: Row) -> str:
    """Return one step in one line."""
    parts = [f"{row['phase']} {row['step']}"]
    if row["acc_global"] is not None:
        parts.append(f"accuracy {row['acc_global']:.4f}")
    elif row["acc_clients_mean"] is not None:
        # The method has no global model, or there is no global test set.
        parts.append(f"clients' accuracy {row['acc_clients_mean']:.4f}")
    if row["loss_global"] is not None:
        parts.append(f"loss {row['loss_global']:.4f}")
    if row["failures"]:
        parts.append(f"{counted(len(row['failures']), 'client')} failed")
    return ", ".join(parts)


def log_step(row: Row) -> None:
    """Log a step: the observer for processes whose output is a log."""
    seconds = sum(row["seconds"].values())
    clients = counted(len(row["cohort"]), "client")
    log.info("%s, %s, %.2f s", step_line(row), clients, seconds)


def log_to_stderr(name: str = "fedhet") -> None:
    """Send a logger's messages to stderr.

    A process started by Flower shows the user nothing but its log, so it sends all of them. A run
    sends those of "fedhet.data".
    """
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fedhet: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


@contextmanager
def progress(title: str, rounds: Sequence[int]) -> Iterator[Observer]:
    """Show a live bar over all steps on a terminal, and one line per step elsewhere."""
    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield lambda row: console.print(step_line(row), highlight=False, soft_wrap=True)
        return
    columns = (
        TextColumn("{task.fields[title]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=False) as bar:
        task = bar.add_task("", total=sum(rounds), title=title)
        yield lambda row: bar.update(task, advance=1, description=step_line(row))


def readable_size(n: float) -> str:
    """Return a number of bytes in a readable unit."""
    if n < 1000:
        return f"{n:.0f} B"
    for unit in ("kB", "MB"):
        n /= 1000
        if n < 1000:
            return f"{n:.1f} {unit}"
    return f"{n / 1000:.1f} GB"


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """Print the table at the end of a run, with the paths of its figures."""
    names = [summary["method"], *(p for p in summary["plugins"] if p != summary["method"])]
    table = Table(title=" + ".join(names), show_header=False)
    rows = _summary_rows(summary)
    rows += [
        (f"figure: {path.stem}", str(path)) for path in sorted((folder / "figures").glob("*.png"))
    ]
    for name, value in rows:
        table.add_row(name, value)
    console: Console = Output()
    if not console.is_terminal:
        # Paths must not be folded where the output is a file or a pipe.
        width = max(console.width, 40 + max(len(value) for _, value in rows))
        console = Output(width=width)
    console.print(table)


def _summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    partition = summary["partition"]
    seconds = summary["seconds"]
    state = summary["client_state"]
    rows = [
        (
            "data",
            f"{summary['dataset'] or 'given'}, {counted(partition['clients'], 'client')},"
            f" {partition['name']}; model {summary['model']}",
        ),
        ("rounds", ", ".join(f"{phase['name']} {phase['rounds']}" for phase in summary["phases"])),
    ]
    if "global" in summary["models"]:
        rows.append(("accuracy, global test set", _accuracy(summary["accuracy"])))
    else:
        rows.append(("accuracy", "no global model: each client evaluates a model of its own"))
    for view in ("personal", "finetuned"):
        if view in summary:
            value = f"{_accuracy(summary[view])}   (mean over the clients' test data)"
            rows.append((f"accuracy, {view} models", value))
    rows += _measures(summary)
    if "global" in summary["models"]:
        rows.append(("loss, global test set", _score(summary["loss"])))
    spent = f"clients {seconds['train']:.1f}, evaluation {seconds['evaluate']:.1f}"
    rows.append(("seconds", f"{seconds['total']:.1f} ({spent})"))
    for way, kinds in summary["bytes"].items():
        sizes = ", ".join(f"{kind} {readable_size(n)}" for kind, n in kinds.items())
        rows.append((f"sent {way}", sizes))
    if state["bytes"]:
        total, largest = readable_size(state["bytes"]), readable_size(state["largest"])
        rows.append(("stored by the clients", f"{total} in total, the largest {largest}"))
    if summary["failures"]:
        rows.append(("failed clients", str(len(summary["failures"]))))
    return rows


def _measures(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of what every method is compared by."""
    view = summary["models"][0]
    clients = (
        f"last {_score(summary['acc_clients_mean'])}"
        f"   worst tenth of the clients {_score(summary['acc_clients_worst_decile'])}"
        f"   ({view} {'model' if view == 'global' else 'models'})"
    )
    mean, evaluations = summary["acc_last_k"]["mean"], summary["acc_last_k"]["evaluations"]
    rows = [
        ("accuracy, clients' test data", clients),
        ("accuracy, last evaluations", f"mean of {evaluations}: {_score(mean)}"),
    ]
    for target in summary["targets"]:
        reached = "not reached"
        if target["rounds"] is not None:
            size = readable_size(target["bytes"])
            reached = f"round {target['rounds']}, after {size} and {target['seconds']:.1f} s"
        rows.append((f"until accuracy {target['accuracy']:g}", reached))
    return rows


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _accuracy(accuracy: dict[str, float | None]) -> str:
    return (
        f"last {_score(accuracy['last'])}   at the best validation {_score(accuracy['best_val'])}"
        f"   best on test {_score(accuracy['best_test'])}"
    )
