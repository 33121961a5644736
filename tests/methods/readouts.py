"""What tests of methods read from a federation: arrays, client states, replies, sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedhet.core.client.context import ClientContext
from fedhet.core.kernel import Component, Message, State
from fedhet.core.messages import Broadcast


def arrays(tree: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The tree as numpy arrays that share its memory."""
    return {name: t.numpy() for name, t in tree.items()}


def copied(tree: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The tree as numpy arrays that later steps do not change."""
    return {name: t.numpy().copy() for name, t in tree.items()}


def client_state(run: Any, pid: int, key: str) -> dict[str, Tensor]:
    """What client `pid` keeps under `key` now; empty where it keeps nothing."""
    state = run.store.load(pid, run.strategy.run.versions.get(pid, 0)) or {}
    prefix = f"{key}/"
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}


def step_and_replies(run: Any) -> tuple[list[Any], list[Any]]:
    """Advance the run by one step; return its messages and the clients' replies."""
    received: list[Any] = []

    def record(plan: list[Any], replies: list[Any]) -> list[Any]:
        received.extend(replies)
        return replies

    return run.step(record), received


def place(run: Any, msg: Broadcast, component: Component) -> tuple[Message, State, ClientContext]:
    """What the client half of a piece gets with this message, before any training."""
    client = run.client()
    client.receive(msg)
    client.ctx.data = client._data(client.plugins)
    return client._seen(component)  # type: ignore[no-any-return]
