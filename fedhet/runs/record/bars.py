"""The bars of the live progress of a run, and of a sweep, whose process needs no torch for them."""

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

NARROW = 80  # columns; a terminal with fewer shows no bars, and no time but the remaining one


def bar_on(console: Console, *, lasting: bool = True) -> Progress:
    """Bars with the fields `title` and `count`, and what is told of them last.

    Args:
        console: where to show them.
        lasting: whether they stay when they have ended. Else they are drawn when `refresh` is
            called, and what is printed meanwhile goes to where it would go.
    """
    # The others keep their width, and these two share what is left.
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
