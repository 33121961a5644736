"""The clients' states under Ray, as the process of the server sees them pass by."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flwr.common import RecordDict

from fedhet.core.trees import Tree
from fedhet.stores import ContextStore


class PassingStates:
    """The states in the contexts that Flower's simulation sends along with every message.

    What is saved here joins the context of the client's node with its next message.
    """

    def __init__(self) -> None:
        self._seen: dict[int, RecordDict] = {}  # by client: as its node has sent it back
        self._new: dict[int, RecordDict] = {}  # by client: what its node is yet to receive

    def load(self, pid: int, version: int) -> Tree | None:
        for records in (self._new, self._seen):
            if pid in records and (state := ContextStore(records[pid]).load(pid, version)):
                return state
        return None

    def save(self, pid: int, version: int, state: Tree, keep: Collection[int]) -> None:
        records = self._new.setdefault(pid, RecordDict())
        ContextStore(records).save(pid, version, state, keep)

    # ---- called with the context of a client's node
    def sending(self, context: Any) -> None:
        """Add what has been saved to a context that is about to be sent."""
        new = self._new.get(_client(context))
        if new is not None:
            context.state.update(new)

    def received(self, context: Any) -> None:
        """Take note of a context that has come back."""
        self._seen[_client(context)] = context.state
        self._new.pop(_client(context), None)


def _client(context: Any) -> int:
    """Each node hosts one client, of the node's own number."""
    return int(context.node_config["partition-id"])
