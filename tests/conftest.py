"""What the tests share: runs in folders of their own, and a federation that is advanced step by
step."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from composing import composed

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported, here and in the processes that tests start
# in a shell's background job; tests interrupt the processes that they start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests that call the classes themselves are held to the same bits as runs, which pin their
    threads."""
    from fedhet.process import pin_threads

    pin_threads(1)
    gc.freeze()  # what is imported by now stays: no collection need look at it


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`fedhet.run` in a folder below tmp_path, without its figures."""
    from fedhet.job import run_job

    monkeypatch.setattr("fedhet.record.figures.draw", lambda *args: [])
    numbers = itertools.count()

    def run(*overrides: str, task: Any = None) -> Any:
        return run_job(
            replace(
                composed(*overrides),
                run_dir=str(tmp_path / f"run-{next(numbers)}"),
                run_dir_given=True,
            ),
            task,
        )

    return run


class Federation:
    """A strategy and its clients in this process, from their constructors: nothing between a test
    and the classes.

    `options` are the strategy's own; `local` further LocalSettings; `setting` those of
    `fedhet.strategy.Setting`."""

    def __init__(
        self,
        task: Any,
        cls: type,
        *,
        plugins: Callable[[], Sequence[Any]] = list,
        seed: int = 0,
        buffers: str = "average",
        options: dict[str, Any] | None = None,
        lr: float = 0.1,
        epochs: int = 1,
        batch_size: int = 4,
        local: dict[str, Any] | None = None,
        **setting: Any,
    ) -> None:
        import torch

        from fedhet.messages import LocalSettings
        from fedhet.setting import Setting
        from fedhet.site import Site
        from fedhet.state import MemoryStore

        self.site = Site(
            task, device=torch.device("cpu"), seed=seed, buffers=buffers, scope=cls.scope
        )
        settings = LocalSettings(lr=lr, epochs=epochs, batch_size=batch_size, **local or {})
        self.strategy = cls(
            Setting(self.site, settings, plugins=plugins(), **setting), **options or {}
        )
        self.store = MemoryStore()
        self.client = lambda: cls.client_cls(self.site, plugins(), self.store)
        self.round = 0

    def step(
        self, alter: Callable[[list[Any], list[Any]], Iterable[Any]] = lambda plan, replies: replies
    ) -> list[Any]:
        """One step; `alter` changes what the server hears. Returns the messages."""
        self.round += 1
        plan = self.strategy.plan(self.round)
        self.strategy.settle(alter(plan, [self.client().handle(msg) for msg in plan]))
        return plan

    def run(self, **how: Any) -> Federation:
        from fedhet.phases import locate

        while locate(self.strategy.timetable, self.round + 1):
            self.step(**how)
        return self

    @property
    def model(self) -> dict[str, Any]:
        return self.strategy.weights["model"]

    @property
    def sha256(self) -> str:
        from fedhet import trees

        return trees.sha256(self.strategy.weights)


@pytest.fixture
def federation() -> type[Federation]:
    return Federation
