"""Flower's Strategy around `plan` and `settle`, so that a method runs in Flower's own Server."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from flwr.common import (
    EvaluateIns,
    FitIns,
    Parameters,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.client_manager import ClientManager
from flwr.server.strategy import Strategy

from fedhet.errors import RunFailed
from fedhet.evaluation import client_means, evaluation_messages, global_scores
from fedhet.flower import wire
from fedhet.flower.nodes import Nodes
from fedhet.messages import Broadcast, Update
from fedhet.phases import locate

if TYPE_CHECKING:
    from fedhet.strategy import FedStrategy

log = logging.getLogger("fedhet")


class FlowerStrategy(Strategy):
    """Flower's six methods. FedServer runs a timetable and uses none of the aggregating ones.

    Under Flower's own Server, which runs a fixed number of rounds, a round past the end of the
    timetable asks nobody, and clients evaluate after the rounds for which `due` holds.

    Attributes:
        nodes: which node hosts which client.
    """

    def __init__(self) -> None:
        self.nodes = Nodes()
        self._awaited: dict[
            int, Broadcast
        ] = {}  # the messages whose replies are awaited, by client

    @property
    def _method(self) -> FedStrategy:
        return cast("FedStrategy", self)  # the only subclass

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """The model's shared tensors, in state-dict order."""
        return self._parameters()

    def _parameters(self) -> Parameters:
        return ndarrays_to_parameters(
            [t.cpu().numpy() for t in self._method.sent("model").values()]
        )

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[Any, FitIns]]:
        """The messages of the round; none past the end of the timetable."""
        self._awaited = {}
        if locate(self._method.timetable, server_round) is None:
            log.info("round %d: the timetable is over, nobody trains", server_round)
            return []
        self._awaited = {msg.pid: msg for msg in self._method.plan(server_round)}
        pack = wire.Packer()
        return [
            (self.nodes.proxy(pid, client_manager), wire.fit_ins(msg, pack))
            for pid, msg in self._awaited.items()
        ]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, Any]], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """The aggregated model's shared tensors, and the means of the clients' metrics."""
        self._method.settle(self.nodes.in_order(self._awaited, results, failures))
        return self._parameters(), dict(self._method.current.metrics)

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[Any, EvaluateIns]]:
        """Evaluation by every client with data, after a round for which it is due."""
        if not self._awaited or not self._method.due:
            return []
        self._awaited = {msg.pid: msg for msg in evaluation_messages(self._method)}
        pack = wire.Packer()
        return [
            (self.nodes.proxy(pid, client_manager), wire.evaluate_ins(msg, pack))
            for pid, msg in self._awaited.items()
        ]

    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[Any, Any]], failures: list[Any]
    ) -> tuple[float | None, dict[str, Any]]:
        """The clients' loss over all their test samples, and the means that a run records.

        `accuracy` is over all test samples; the others are named as in rounds.jsonl.

        Raises:
            RunFailed: a client failed and on_failure is "stop", or no client succeeded.
        """
        if not self._awaited:
            return None, {}
        updates: list[Update] = []
        causes: list[str] = []
        for reply in self.nodes.in_order(self._awaited, results, failures):
            if isinstance(reply, Update):
                updates.append(reply)
                continue
            log.warning("%s", reply)
            causes.append(str(reply))
            if self._method.setting.on_failure == "stop":
                raise RunFailed(str(reply))
        if not updates:
            raise RunFailed("; ".join(causes))
        means: dict[str, Any] = client_means(updates, self._method.views)
        if "acc_clients_weighted" in means:
            means["accuracy"] = means["acc_clients_weighted"]
        return means.get("loss_clients_weighted"), means

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Any]] | None:
        """Loss and scores of these parameters on the global test set."""
        tensors = [torch.from_numpy(array) for array in parameters_to_ndarrays(parameters)]
        shared = dict(zip(self._method.sent("model"), tensors, strict=True))
        scores = global_scores(self._method, {**self._method.weights["model"], **shared})
        return (scores.pop("loss"), dict(scores)) if scores else None
