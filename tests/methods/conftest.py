"""Fixtures for the tests of methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from methods.by_hand import case
from methods.fedgmm_task import LR, PSI, REG, task

from fedhet.core.kernel import Plugin
from fedhet.core.task import Task
from fedhet.methods.fedgmm import FedGMM, FedGMMPlugin


@pytest.fixture
def fedgmm(federation: Callable[..., Any]) -> Callable[..., Any]:
    """A federation with FedGMM, on the task of fedgmm_task.py unless another is given.

    `options` are the plug-in's, `others` make further plug-ins.
    """

    def make(
        given: Task | None = None,
        cls: type = FedGMM,
        others: tuple[Callable[[], Plugin], ...] = (),
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Any:
        options = {"components": 1, "reg_covar": REG, "psi": PSI, **(options or {})}
        settings = {"lr": LR, "rounds": 3, "batch_size": 1000, **settings}

        def plugins() -> list[Plugin]:
            return [FedGMMPlugin(**options), *(other() for other in others)]

        return federation(given or task(), cls, plugins=plugins, **settings)

    return make


__all__ = ["case", "fedgmm"]
