"""What tests of methods read from a federation: arrays, client states, replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


def arrays(tree: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The tree as numpy arrays that share its memory."""
    return {name: t.numpy() for name, t in tree.items()}


def copied(tree: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The tree as numpy arrays that later steps do not change."""
    return {name: t.numpy().copy() for name, t in tree.items()}


def client_state(run: Any, pid: int, key: str) -> dict[str, Tensor]:
    """What client `pid` keeps under `key` now; empty where it keeps nothing."""
    state = run.store.load(pid, run.strategy.versions.get(pid, 0)) or {}
    prefix = f"{key}/"
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}


def step_and_replies(run: Any) -> tuple[list[Any], list[Any]]:
    """Advance the run by one step; return its messages and the clients' replies."""
    received: list[Any] = []

    def record(plan: list[Any], replies: list[Any]) -> list[Any]:
        received.extend(replies)
        return replies

    return run.step(record), received
