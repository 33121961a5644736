"""Bars for the live progress of a run or a sweep. They need no torch."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

NARROW = 80  # columns; a narrower terminal shows no bars and no elapsed time


def bar_on(console: Console, *, lasting: bool = True) -> Progress:
    """Return bars with the fields `title` and `count`, followed by their description.

    Args:
        console: where to show them.
        lasting: whether they stay on the terminal after their end. If not, they are only drawn by
            `refresh`, and other output is not redirected.
    """
    # The other columns keep their width; these two share the rest.
    label = Column(overflow="ellipsis", no_wrap=True, ratio=2)
    bar = BarColumn(None, table_column=Column(ratio=1))
    wide = console.width >= NARROW
    return Progress(
        TextColumn("{task.fields[title]}", markup=False, table_column=label),
        *([bar] if wide else []),
        TextColumn("{task.fields[count]}", markup=False),
        *([TimeElapsedColumn()] if wide else []),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        expand=True,
        transient=not lasting,
        auto_refresh=lasting,
        redirect_stdout=lasting,
        speed_estimate_period=3600,  # a round may take minutes
    )
