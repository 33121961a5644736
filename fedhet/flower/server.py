"""Flower's transport of a step, and the small subclass of its Server that runs the timetable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from flwr.server import Server
from flwr.server.client_manager import SimpleClientManager
from flwr.server.history import History
from flwr.server.server import evaluate_clients, fit_clients

from fedhet.flower import wire
from fedhet.messages import Broadcast, Reply
from fedhet.record.run_folder import Recorder
from fedhet.server import Clock, Observer, run_rounds
from fedhet.strategy import FedStrategy


class FlowerCourier:
    """Flower's own transport: a thread per message of the cohort, else only cpus + 4 clients would
    train at a time."""

    def __init__(self, server: Server, strategy: FedStrategy) -> None:
        self._server, self._strategy = server, strategy

    def train(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        return self._exchange(plan, clock, wire.fit_ins, fit_clients)

    def evaluate(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        return self._exchange(plan, clock, wire.evaluate_ins, evaluate_clients)

    def _exchange(
        self,
        plan: list[Broadcast],
        clock: Clock,
        pack: Callable[..., Any],
        carry: Callable[..., Any],
    ) -> Iterator[Reply]:
        with clock("broadcast"):
            packer, manager = wire.Packer(), self._server.client_manager()
            instructions = [
                (self._strategy.roster.proxy(msg.pid, manager), pack(msg, packer)) for msg in plan
            ]
        with clock("clients"):
            results, failures = carry(
                instructions, max_workers=len(plan), timeout=None, group_id=plan[0].round
            )
        replies = self._strategy.roster.in_order({msg.pid: msg for msg in plan}, results, failures)
        while True:
            with clock("upload"):
                reply = next(replies, None)
            if reply is None:
                return
            yield reply


class FedServer(Server):
    """Runs the timetable instead of a fixed number of rounds, so that a phase can end early, and
    records the run."""

    def __init__(
        self,
        strategy: FedStrategy,
        recorder: Recorder,
        *,
        evaluate_clients: bool,
        observe: Observer,
    ) -> None:
        super().__init__(client_manager=SimpleClientManager(), strategy=strategy)
        self._fed, self._recorder, self._evaluate_clients, self._observe = (
            strategy,
            recorder,
            evaluate_clients,
            observe,
        )

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        """Flower calls this with its own number of rounds, which the timetable replaces."""
        began = time.perf_counter()
        with self._recorder.ending(self._fed):
            run_rounds(
                self._fed,
                FlowerCourier(self, self._fed),
                self._recorder,
                self._evaluate_clients,
                self._observe,
            )
        return History(), time.perf_counter() - began

    def disconnect_all_clients(self, timeout: float | None) -> None:
        """Flower's nodes outlive a run; there is nobody to send away."""
