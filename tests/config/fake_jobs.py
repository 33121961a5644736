"""Jobs that stand in for real runs in the tests of the command line."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedhet.runs.config import Config

Job = Callable[[Config], Any]


def install_jobs(monkeypatch: pytest.MonkeyPatch, configs: list[Config], job: Job) -> None:
    """Replace the engine by `job`, which is called before the run folder exists.

    Each configuration is appended to `configs`. A run's validation accuracy is its seed.
    """

    def run_job(settings: Config) -> Any:
        configs.append(settings)
        folder = Path(settings.run_dir)
        job(settings)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text("{}")
        summary = {"validation": settings.cfg.seed or None, "accuracy": {"last": -1}}
        return types.SimpleNamespace(summary=summary, dir=folder)

    stub = types.ModuleType("fedhet.engines.dispatch")
    stub.__dict__.update(run_job=run_job)
    monkeypatch.setitem(sys.modules, "fedhet.engines.dispatch", stub)


def failing(error: BaseException, when: Callable[[Config], bool] = lambda settings: True) -> Job:
    """Return a job that raises the error if `when` says so."""

    def job(settings: Config) -> None:
        if when(settings):
            raise error

    return job
