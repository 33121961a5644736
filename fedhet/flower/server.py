"""Flower's transport of a step, and a small subclass of its Server that runs the timetable."""

from __future__ import annotations

import time
from collections.abc import Iterator

from flwr.server import Server
from flwr.server.client_manager import SimpleClientManager
from flwr.server.history import History
from flwr.server.server import evaluate_clients, fit_clients

from fedhet.client import KEEP
from fedhet.flower import wire
from fedhet.messages import EVALUATE, Broadcast, Reply
from fedhet.record.run_folder import Recorder
from fedhet.server import Clock, Observer, run_rounds
from fedhet.strategy import FedStrategy


class FlowerCourier:
    """Flower's own transport.

    It uses a thread per message of the cohort; by default only cpus + 4 clients would work at a
    time.
    """

    def __init__(self, server: Server, strategy: FedStrategy) -> None:
        self._server = server
        self._nodes = strategy.nodes

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        # Flower's evaluation replies have no room for tensors, such as a client's model.
        if plan[0].phase == EVALUATE and KEEP not in plan[0].extras:
            pack, carry = wire.evaluate_ins, evaluate_clients
        else:
            pack, carry = wire.fit_ins, fit_clients
        with clock("broadcast"):
            packer = wire.Packer()
            manager = self._server.client_manager()
            instructions = [
                (self._nodes.proxy(msg.pid, manager), pack(msg, packer)) for msg in plan
            ]
        with clock("clients"):
            results, failures = carry(
                instructions, max_workers=len(plan), timeout=None, group_id=plan[0].round
            )
        replies = self._nodes.in_order({msg.pid: msg for msg in plan}, results, failures)
        while True:
            with clock("upload"):
                reply = next(replies, None)
            if reply is None:
                return
            yield reply


class FedServer(Server):
    """Runs the timetable and records the run.

    Flower's own Server runs a fixed number of rounds, in which no phase could end early.
    """

    def __init__(
        self,
        strategy: FedStrategy,
        recorder: Recorder,
        *,
        evaluate_clients: bool,
        observe: Observer,
    ) -> None:
        super().__init__(client_manager=SimpleClientManager(), strategy=strategy)
        self._method = strategy
        self._recorder = recorder
        self._evaluate_clients = evaluate_clients
        self._observe = observe

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        """Flower calls this with its own number of rounds, which the timetable replaces."""
        began = time.perf_counter()
        courier = FlowerCourier(self, self._method)
        with self._recorder.ending(self._method):
            run_rounds(self._method, courier, self._recorder, self._evaluate_clients, self._observe)
        return History(), time.perf_counter() - began

    def disconnect_all_clients(self, timeout: float | None) -> None:
        """Flower's nodes outlive a run, so no node is disconnected."""
