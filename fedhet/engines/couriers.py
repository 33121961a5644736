"""Couriers that hand messages to clients of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fedhet.client import FedClient
from fedhet.messages import Broadcast, Reply
from fedhet.server import Clock


class LocalCourier:
    """Calls the clients one after another as the merge asks for their replies: one update is alive
    at a time."""

    def __init__(self, make: Callable[[], FedClient]) -> None:
        self._make = make

    def train(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        for msg in plan:
            with clock("clients"):
                reply = self._make().handle(msg)
            yield reply

    def evaluate(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        for msg in plan:
            yield self._make().assess(msg)
