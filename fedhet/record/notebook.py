"""Live progress in a notebook, by IPython's own display: it needs no widgets."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedhet.core.callbacks import Row
    from fedhet.record.terminal import Observer


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


@dataclass
class Bar:
    """The progress of a run, as HTML and as text."""

    title: str
    total: int
    done: int = 0
    line: str = ""
    began: float = field(default_factory=time.perf_counter)

    def __repr__(self) -> str:
        seconds = time.perf_counter() - self.began
        return f"{self.title} {self.done}/{self.total}, {seconds:.1f} s: {self.line}"

    def _repr_html_(self) -> str:
        bar = f'<progress value="{self.done}" max="{self.total}"></progress>'
        return f"{bar} {html.escape(repr(self))}"


@contextmanager
def progress(
    title: str, total: int, describe: Callable[[Row], str], done: int = 0
) -> Iterator[Observer]:
    """Show a bar that each step advances, with its line.

    Args:
        title: what runs.
        total: the number of steps.
        describe: makes the line of a step.
        done: how many of the steps were taken before.
    """
    from IPython.display import display

    bar = Bar(title, total, done)
    shown = display(bar, display_id=True)

    def observe(row: Row) -> None:
        bar.done += 1
        bar.line = describe(row)
        shown.update(bar)

    yield observe
