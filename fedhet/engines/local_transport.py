"""The transport that serves clients in this process, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fedhet.core.client.client import FedClient
from fedhet.core.client.state import Store
from fedhet.core.messages import Broadcast, Reply
from fedhet.core.server.loop import Clock


class LocalTransport:
    """Serves each message when the merge asks for its reply, so that one update exists at a time.

    Args:
        make: returns a client for one message.
        store: the store of the clients' states.
    """

    def __init__(self, make: Callable[[], FedClient], store: Store) -> None:
        self._make = make
        self.store = store

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        for msg in plan:
            with clock("clients"):
                reply = self._make().handle(msg)
            yield reply
