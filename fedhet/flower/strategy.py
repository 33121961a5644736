"""Flower's Strategy around `plan` and `settle`, so that a method runs in Flower's own Server."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
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
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    DPFedAvgFixed,
    Strategy,
)

from fedhet.core.errors import RunFailed
from fedhet.core.evaluation import client_means, evaluation_messages, global_scores, received
from fedhet.core.messages import Broadcast, Reply
from fedhet.core.phases import locate
from fedhet.core.setting import ReplyLimits
from fedhet.flower import wire
from fedhet.flower.nodes import Nodes

if TYPE_CHECKING:
    from fedhet.core.strategy import FedStrategy

log = logging.getLogger("fedhet")
# Flower's strategies that add noise to what another one returns; DPFedAvgAdaptive is a subclass.
NOISING = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    DPFedAvgFixed,
)


class FlowerStrategy(Strategy):
    """The six methods that Flower's Server calls; FedServer (server.py) needs none of them.

    Flower's Server runs a fixed number of rounds, the phases before the training among them. A
    round past the end of the timetable asks no client. The server and the clients evaluate after
    the rounds for which `due` holds. What needs a run folder does not happen: no round is
    recorded, no best model is kept, and the training does not stop early.

    Attributes:
        nodes: which node hosts which client.
    """

    def __init__(self, limits: ReplyLimits) -> None:
        self.nodes = Nodes(limits)
        self._awaited: dict[int, Broadcast] = {}  # by client; empty past the end of the timetable

    @property
    def _method(self) -> FedStrategy:
        return cast("FedStrategy", self)  # the only subclass

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """The model's shared tensors, in state-dict order.

        Raises:
            RunFailed: one of Flower's strategies for differential privacy is around this one.
        """
        _refuse_noising()
        return _shared(self._method)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """The messages of the round; none past the end of the timetable.

        Raises:
            RunFailed: the parameters are not those that the method returned: a strategy around it
                has changed them, and that would have no effect.
        """
        _check_own(parameters, self._method)
        if locate(self._method.timetable, server_round) is None:
            log.info("round %d is past the end of the timetable; no client is asked", server_round)
            self._awaited = {}
            return []
        self._awaited = {msg.pid: msg for msg in self._method.plan(server_round)}
        packer = wire.Packer(self.nodes.agreed)
        proxies = self.nodes.proxies(self._awaited, client_manager)
        return [
            (proxy, wire.fit_ins(msg, packer))
            for pid, msg in self._awaited.items()
            if (proxy := proxies[pid])
        ]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, Any]], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """The aggregated model's shared tensors, and the means of the clients' metrics.

        Raises:
            RunFailed: a client failed and on_failure is "stop", or no client succeeded.
        """
        self._method.settle(self._in_order(results, failures))
        return _shared(self._method), dict(self._method.current.metrics)

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Messages to all clients with data after a round for which an evaluation is due.

        Under privacy.noise clients evaluate nothing.
        """
        if not self._evaluation_due or self._method.site.noise:
            return []
        self._awaited = {msg.pid: msg for msg in evaluation_messages(self._method)}
        packer = wire.Packer(self.nodes.agreed)
        proxies = self.nodes.proxies(self._awaited, client_manager)
        return [
            (proxy, wire.evaluate_ins(msg, packer))
            for pid, msg in self._awaited.items()
            if (proxy := proxies[pid])
        ]

    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[Any, Any]], failures: list[Any]
    ) -> tuple[float | None, dict[str, Any]]:
        """The loss over all clients' test samples, and means named as in rounds.jsonl.

        The deciding score, such as "accuracy", is that over all clients' test samples.

        Raises:
            RunFailed: a client failed and on_failure is "stop", or no client succeeded.
        """
        target = self._method.site.task.scoring
        updates = received(self._in_order(results, failures), self._method)
        means: dict[str, Any] = client_means(updates, self._method.views, target)
        if (key := target.key("clients_weighted")) in means:
            means[target.score()] = means[key]
        return means.get("loss_clients_weighted"), means

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Any]] | None:
        """Loss and scores of these parameters on the global test set.

        None after a round for which no evaluation is due, and where there is no global test set or
        no global model. Round 0 is the initial model.

        Raises:
            RunFailed: the parameters are not those that the method returned.
        """
        _check_own(parameters, self._method)
        if server_round and not self._evaluation_due:
            return None
        tensors = [torch.from_numpy(array) for array in parameters_to_ndarrays(parameters)]
        shared = dict(zip(self._method.sent("model"), tensors, strict=True))
        scores = global_scores(self._method, {**self._method.weights["model"], **shared})
        return (scores.pop("loss"), dict(scores)) if scores else None

    def _in_order(self, results: list[tuple[Any, Any]], failures: list[Any]) -> Iterator[Reply]:
        """The replies of the clients that were asked."""
        more_bytes = self._method.setting.replies.max_bytes
        return self.nodes.in_order(self._awaited, results, failures, more_bytes)

    @property
    def _evaluation_due(self) -> bool:
        """Whether an evaluation follows the round in progress."""
        return bool(self._awaited) and self._method.due


def _refuse_noising() -> None:
    """Refuse a wrapper before anything is sent: its noise after the last round would be lost.

    A strategy does not know what is around it, so this looks at who is calling.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, NOISING):
            raise RunFailed(
                f"{type(caller).__name__} has no effect on a method of fedhet, which keeps its"
                " weights itself; for differential privacy set privacy.noise"
            )
        frame = frame.f_back


def _check_own(parameters: Parameters, method: FedStrategy) -> None:
    """Refuse parameters that a strategy around the method has changed."""
    if parameters.tensors != _shared(method).tensors:
        raise RunFailed(
            "Flower's parameters are not the method's: a strategy around it has changed them,"
            " which has no effect on fedhet's model; for differential privacy set privacy.noise"
        )


def _shared(method: FedStrategy) -> Parameters:
    tensors = method.sent("model").values()
    return ndarrays_to_parameters([t.cpu().numpy() for t in tensors])
