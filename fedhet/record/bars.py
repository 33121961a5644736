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


def bar_on(console: Console, *, lasting: bool = True) -> Progress:
    """Bars with the fields `title` and `count`, and what is told of them last.

    Args:
        console: where to show them.
        lasting: whether they stay when they have ended. Else they are drawn when `refresh` is
            called, and what is printed meanwhile goes to where it would go.
    """
    label = Column(overflow="ellipsis", no_wrap=True)
    return Progress(
        TextColumn("{task.fields[title]}", markup=False, table_column=label),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=not lasting,
        auto_refresh=lasting,
        redirect_stdout=lasting,
        speed_estimate_period=3600,  # a round may take minutes
    )
