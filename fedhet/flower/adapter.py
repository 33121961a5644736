"""A method in Flower's own Server: what its Strategy is asked, answered by the run's loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from flwr.common import EvaluateIns, FitIns, Parameters, ndarrays_to_parameters
from flwr.server import ClientManager
from flwr.server.strategy import Strategy

from fedhet.core.errors import RunFailed
from fedhet.core.messages import Broadcast, Reply
from fedhet.core.server.callbacks import Callback, Row
from fedhet.core.server.evaluation import global_scores
from fedhet.core.server.loop import Loop, Request, recorded_numbers
from fedhet.core.server.strategy import FedStrategy
from fedhet.core.task import HeldClients
from fedhet.core.trees import Tree
from fedhet.flower import wire
from fedhet.flower.nodes import ClientProxy, Nodes

log = logging.getLogger("fedhet")
AtEnd = Callable[[Tree, list[Row]], None]
Ins = TypeVar("Ins", FitIns, EvaluateIns)


class StrategyAdapter(Callback, Strategy):
    """Drives a run's loop by the six methods that Flower's Server calls.

    Flower's Server runs a fixed number of rounds, the phases before the training among them
    (`FedStrategy.num_rounds`). A round past the end of the timetable asks no client. The server and
    the clients evaluate after the rounds for which an evaluation is due. Where a step is taken
    again, because of an outlier, the next round does so. Where the clients' losses undo a step, the
    next round asks them to evaluate again, and trains nothing. What needs a run folder does not
    happen, unless `callbacks` do it.

    Args:
        method: the run's strategy, to which the adapter is attached.
        callbacks: what listens to the run.
        at_end: is called after the last step, see `fedhet.flower.strategy`.

    Attributes:
        nodes: which node hosts which client.
    """

    def __init__(
        self,
        method: FedStrategy,
        callbacks: Sequence[Callback] = (),
        at_end: AtEnd | None = None,
    ) -> None:
        method.adapter = self
        clients = method.workspace.task.clients
        self._clients = clients if isinstance(clients, HeldClients) else None
        self.nodes = Nodes(method.setting.replies, clients=self._clients)
        self._at_end = at_end
        self._rows: list[Row] = []
        self._method = method
        evaluates = method.workspace.evaluation.clients and not method.workspace.noise
        self._loop = Loop(method, [*callbacks, self], evaluates=evaluates)
        self._steps = self._loop.steps()
        self._request: Request | None = None
        self._begun = False
        self._row: Row = {}
        self._given = _shared(method)  # the parameters that Flower's Server holds

    def settled(self, loop: Loop, row: Row) -> None:
        self._row = row
        self._rows.append(row | recorded_numbers(self._loop.current))

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """The model's shared tensors, in state-dict order."""
        return self._given

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """The messages of the round; none past the end of the timetable.

        Raises:
            RunFailed: too few nodes have joined; or the parameters are not those that the method
                returned: a strategy around it has changed them, and that would have no effect.
        """
        self._check_own(parameters)
        if not self._begun:
            self._begun = True
            self.nodes.proxies((), client_manager)  # they tell how many samples their clients have
            if self._clients is not None:
                self._clients.begin()
            self._request = next(self._steps, None)
        if self._request is None:
            self._row = {}
            log.info("round %d is past the end of the timetable; no client is asked", server_round)
        return self._addressed(client_manager, wire.fit_ins)

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, Any]], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """The aggregated model's shared tensors, and the means of the clients' metrics.

        Raises:
            RunFailed: a client failed and on_failure is "stop", or no client succeeded.
        """
        if self._request is None:
            return self._given, {}
        self._row = {}  # remains so if the step is to be taken again
        self._answer(self._in_order(results, failures))
        self._given = _shared(self._method)
        return self._given, dict(self._last.get("metrics", {}))

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Messages to all clients with data after a round for which an evaluation is due.

        Under privacy.noise clients evaluate nothing.
        """
        return self._addressed(client_manager, wire.evaluate_ins) if self._evaluating else []

    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[Any, Any]], failures: list[Any]
    ) -> tuple[float | None, dict[str, Any]]:
        """The loss over all clients' test samples, and means named as in rounds.jsonl.

        The deciding score, such as "accuracy", is that over all clients' test samples.

        Raises:
            RunFailed: a client failed and on_failure is "stop", or no client succeeded.
        """
        if not self._evaluating:
            return None, {}
        self._answer(self._in_order(results, failures))
        target = self._method.workspace.task.scoring
        scored = ("acc_", "loss_", *(f"{key}_" for key in target.keys.values()))
        means = {
            name: value
            for name, value in self._last.items()
            if name.startswith(scored) and not name.endswith("_global") and value is not None
        }
        if (key := target.key("clients_weighted")) in means:
            means[target.score()] = means[key]
        return means.get("loss_clients_weighted"), means

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Any]] | None:
        """Loss and scores of the global model on the global test set.

        None after a round for which no evaluation is due, and where there is no global test set or
        no global model. Round 0 is the initial model.

        Raises:
            RunFailed: the parameters are not those that the method returned.
        """
        self._check_own(parameters)
        if server_round == 0:
            scores = global_scores(self._method)
        else:
            keys = {**self._method.workspace.task.scoring.keys, "loss": "loss"}
            found = {score: self._last.get(f"{key}_global") for score, key in keys.items()}
            scores = {score: value for score, value in found.items() if value is not None}
        return (scores.pop("loss"), dict(scores)) if "loss" in scores else None

    # ---- the loop
    @property
    def _last(self) -> Row:
        """The row of the last step, which is not over while its evaluation is due."""
        return self._loop.row or self._row

    @property
    def _evaluating(self) -> bool:
        return self._request is not None and self._loop.evaluating

    def _answer(self, replies: Iterable[Reply]) -> None:
        try:
            self._request = self._steps.send(replies)
        except StopIteration:
            self._request = None
            if self._at_end:
                method = self._method
                known = (
                    method.weights["model"] if "global" in method.views else method.sent("model")
                )
                weights = {name: t.detach().cpu().clone() for name, t in known.items()}
                self._at_end(weights, self._rows)

    @property
    def _awaited(self) -> dict[int, Broadcast]:
        """The messages that are due, by client."""
        plan, _ = self._request or ([], None)
        return {msg.pid: msg for msg in plan}

    def _addressed(
        self, manager: ClientManager, ins: Callable[[Broadcast, wire.MessagePacker], Ins]
    ) -> list[tuple[ClientProxy, Ins]]:
        """The messages that are due, with the nodes that host their clients.

        Where there is no such node, Flower's Server does not ask for the results: then all clients
        have failed.

        Raises:
            RunFailed: they have, and the run does not go on without them.
        """
        awaited = self._awaited
        proxies = self.nodes.proxies(awaited, manager)
        packer = wire.MessagePacker(self.nodes.agreed)
        hosted = ((proxies[pid], msg) for pid, msg in awaited.items())
        addressed = [(proxy, ins(msg, packer)) for proxy, msg in hosted if proxy]
        if awaited and not addressed:
            self._answer(self._in_order([], []))
        return addressed

    def _in_order(self, results: list[tuple[Any, Any]], failures: list[Any]) -> Iterator[Reply]:
        """The replies of the clients that were asked."""
        more_bytes = self._method.setting.replies.max_bytes
        return self.nodes.in_order(self._awaited, results, failures, more_bytes)

    def _check_own(self, parameters: Parameters) -> None:
        """Refuse parameters that a strategy around the method has changed."""
        if parameters.tensors != self._given.tensors:
            raise RunFailed(
                "Flower's parameters are not the method's: a strategy around it has changed them,"
                " which has no effect on fedhet's model; for differential privacy set privacy.noise"
            )


def _shared(method: FedStrategy) -> Parameters:
    tensors = method.sent("model").values()
    return ndarrays_to_parameters([t.cpu().numpy() for t in tensors])
