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

if TYPE_CHECKING:
    from fedhet.server import Observer

log = logging.getLogger("fedhet")


def describe(row: dict[str, Any]) -> str:
    """One step in one line."""
    parts = [f"{row['phase']} {row['step']}"]
    if row["acc_global"] is not None:
        parts.append(f"accuracy {row['acc_global']:.4f}")
    elif (
        row["acc_clients_mean"] is not None
    ):  # a method without a global model, or no global test set
        parts.append(f"clients' accuracy {row['acc_clients_mean']:.4f}")
    if row["loss_global"] is not None:
        parts.append(f"loss {row['loss_global']:.4f}")
    if row["failures"]:
        parts.append(f"{len(row['failures'])} clients failed")
    return ", ".join(parts)


def logged(row: dict[str, Any]) -> None:
    """An observer that logs: for processes whose output is a log."""
    log.info(
        "%s, %d clients, %.2f s", describe(row), len(row["cohort"]), sum(row["seconds"].values())
    )


def log_to_stderr(name: str = "fedhet") -> None:
    """For a process that Flower has started, whose log is what the user sees of it; a run shows
    what "fedhet.data" tells."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fedhet: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


@contextmanager
def progress(title: str, rounds: Sequence[int]) -> Iterator[Observer]:
    """A live bar over all steps on a terminal; a line per step elsewhere."""
    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield lambda row: console.print(describe(row), highlight=False, soft_wrap=True)
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
        yield lambda row: bar.update(task, advance=1, description=describe(row))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _accuracy(found: dict[str, float | None]) -> str:
    return (
        f"last {_share(found['last'])}   at the best validation {_share(found['best_val'])}   best"
        f" on test {_share(found['best_test'])}"
    )


def size(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError


def summary(found: dict[str, Any], folder: Path) -> None:
    """The end of a run, and where its pictures lie."""
    table = Table(
        title=" + ".join([found["method"], *(p for p in found["plugins"] if p != found["method"])]),
        show_header=False,
    )
    partition, seconds, state = found["partition"], found["seconds"], found["client_state"]
    rows = [
        (
            "data",
            (
                f"{found['dataset'] or 'given'}, {partition['clients']} clients,"
                f" {partition['name']}; model {found['model']}"
            ),
        ),
        ("rounds", ", ".join(f"{p['name']} {p['rounds']}" for p in found["phases"])),
        ("accuracy, global test set", _accuracy(found["accuracy"])),
        *(
            (f"accuracy, {view} models", f"{_accuracy(found[view])}   (mean of the clients' tests)")
            for view in ("personal", "finetuned")
            if view in found
        ),
        ("loss, global test set", _share(found["loss"])),
        (
            "seconds",
            (
                f"{seconds['total']:.1f} (clients {seconds['train']:.1f}, evaluation"
                f" {seconds['evaluate']:.1f})"
            ),
        ),
        *(
            (f"sent {way}", ", ".join(f"{kind} {size(n)}" for kind, n in kinds.items()))
            for way, kinds in found["bytes"].items()
        ),
        *(
            [
                (
                    "clients remember",
                    f"{size(state['bytes'])} in all, the largest {size(state['largest'])}",
                )
            ]
            if state["bytes"]
            else []
        ),
        *([("clients that failed", str(len(found["failures"])))] if found["failures"] else []),
        *(
            (f"figure: {path.stem}", str(path))
            for path in sorted((folder / "figures").glob("*.png"))
        ),
    ]
    for name, value in rows:
        table.add_row(name, value)
    # Paths must stay whole where the terminal is narrow or the output is a file.
    console = Console()
    Console(
        width=(
            max(console.width, 40 + max(len(value) for _, value in rows))
            if not console.is_terminal
            else None
        )
    ).print(table)
