"""The fixtures of all tests: `federation`, the classes alone, and `launch`, whole runs."""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from composing import composed

from fedhet.runs.config import components

if TYPE_CHECKING:
    from fedhet.core.task import Task
    from fedhet.runs.record.outcome import Run
    from fedhet.testing import Federation

# What runs import when they first need it. Here it belongs to no single test.
LATE = ("torch._dynamo", "sklearn.mixture", "matplotlib.pyplot", "pyarrow.dataset", "flwr.server")
LATE += ("sklearn.datasets", "sklearn.model_selection", "pyarrow.parquet", "hydra.core.utils")
LATE += ("fedhet.engines.dispatch", "fedhet.study.report.results")
# Before torch is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell's background job ignores interrupts, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Pieces of one's own on this machine are no concern of these tests; papers/ belongs to the clone.
os.environ.pop(components.SEARCH_PATH, None)
PAPERS = Path(__file__).parents[1] / "papers" / "conf"
_on_this_machine = {one for one in components.installed() if one.folder != PAPERS}
_found = components.installed
components.installed = lambda: tuple(one for one in _found() if one not in _on_this_machine)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Compute with one thread, as runs do, so that all results can be compared bit for bit."""
    from fedhet.runs.process import pin_threads

    for name in LATE:
        importlib.import_module(name)
    pin_threads(1)
    gc.freeze()  # what is imported by now stays, so no collection needs to look at it


@pytest.fixture(autouse=True)
def _logs_of_this_test() -> Iterator[None]:
    """Take down the handlers that a test has added: their stream may be closed with the test."""
    yield
    for log in map(logging.getLogger, ("fedhet", "fedhet.data")):
        log.handlers.clear()
        log.setLevel(logging.NOTSET)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the file that waits longest for other processes: no worker ends with it."""
    items.sort(key=lambda item: item.path.name != "test_end_to_end.py")


@pytest.fixture
def federation() -> type[Federation]:
    """The class Federation: a method and its clients, advanced step by step."""
    from fedhet.testing import Federation

    return Federation


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """`fedhet.run` with a run folder below tmp_path and without figures.

    It takes overrides, and a task in place of the configured data and model:

        run = launch("method=fedavg", "rounds=2", task=toy_task())
        assert run.summary["status"] == "ok"
    """
    from fedhet.engines.dispatch import run_job

    monkeypatch.setattr("fedhet.runs.record.figures.draw", lambda *args: [])
    numbers = itertools.count()

    def run(*overrides: str, task: Task | None = None) -> Run:
        folder = str(tmp_path / f"run-{next(numbers)}")
        return run_job(replace(composed(*overrides), run_dir=folder, run_dir_given=True), task)

    return run


@pytest.fixture
def own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore what `main` changes in its process, and run it in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDHET_TRACEBACK", raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
