"""A method in Flower's own Server: the run's loop answers the calls to Flower's Strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesIns,
    Parameters,
    ndarrays_to_parameters,
)
from flwr.server import ClientManager
from flwr.server.strategy import Strategy

from fedhet.core.errors import RunFailed, clean, log
from fedhet.core.messages import Broadcast, Failure, Reply, payload
from fedhet.core.server.callbacks import Callback, Row
from fedhet.core.server.evaluation import global_scores
from fedhet.core.server.loop import Loop, Request, recorded_numbers
from fedhet.core.server.strategy import FedStrategy
from fedhet.core.trees import Tree
from fedhet.flower import wire
from fedhet.flower.nodes import Answer, Members, nodes_of

AtEnd = Callable[[Tree, list[Row]], None]
Reader = Callable[[Broadcast, str, Any], Reply]
ClientProxy = Any  # a node in Flower's server; Flower's documented packages lack its class


class Rounds(Callback):
    """A run's loop that Flower drives: Flower fetches the messages of a round, and brings replies.

    Flower runs a fixed number of rounds, including the phases before the training
    (`FedStrategy.num_rounds`). A round past the end of the timetable asks no client. The server and
    the clients evaluate after the rounds for which an evaluation is due. If a step must be repeated
    because of an outlier, the next round repeats it. If the clients' losses undo a step, the
    next round asks the clients to evaluate again, and trains nothing. Nothing is written to a run
    folder, unless `callbacks` do it.

    Args:
        method: the run's strategy.
        callbacks: are called during the run.
        at_end: is called after the last step, see `fedhet.flower.strategy`.

    Attributes:
        nodes: which node hosts which client.
        rows: the steps so far, as in rounds.jsonl.
    """

    def __init__(
        self, method: FedStrategy, callbacks: Sequence[Callback] = (), at_end: AtEnd | None = None
    ) -> None:
        self.nodes = nodes_of(method)
        self.rows: list[Row] = []
        self._at_end = at_end
        self._method = method
        evaluates = method.workspace.evaluation.clients and not method.workspace.noise
        self._loop = Loop(method, [*callbacks, self], evaluates=evaluates)
        self._steps = self._loop.steps()
        self._request: Request | None = None
        self._hosts: dict[int, str | None] = {}
        self._begun = False
        self._row: Row = {}

    def step_ended(self, loop: Loop, row: Row) -> None:
        self._row = row
        self.rows.append(row | recorded_numbers(loop.current))

    def begin(self, server_round: int, members: Members) -> None:
        """Begin one of Flower's rounds.

        Raises:
            RunFailed: too few nodes have joined.
        """
        if not self._begun:
            self._begun = True
            self.nodes.join(members)
            self._request = next(self._steps, None)
        if self._request is None:
            self._row = {}
            log.info("round %d is past the end of the timetable; no client is asked", server_round)

    @property
    def over(self) -> bool:
        """Whether no message is due."""
        return self._request is None

    @property
    def evaluating(self) -> bool:
        """Whether evaluation messages are due."""
        return self._request is not None and self._loop.evaluating

    @property
    def last(self) -> Row:
        """The row of the last step. The step is not over while its evaluation is due."""
        return self._loop.row or self._row

    @property
    def awaited(self) -> dict[int, Broadcast]:
        """The messages that are due, by client."""
        plan, _ = self._request or ([], None)
        return {msg.pid: msg for msg in plan}

    def hosted(self, members: Members) -> list[tuple[str, Broadcast]]:
        """The messages that are due, with the nodes that host their clients."""
        self._hosts = self.nodes.hosts(self.awaited, members)
        return [(node, msg) for pid, msg in self.awaited.items() if (node := self._hosts[pid])]

    def in_order(
        self, arrived: Mapping[str, Any], read: Reader, silent: str = "no reply to Flower"
    ) -> Iterator[Reply]:
        """Yield one reply for each client with a message; each client has a node of its own.

        Args:
            arrived: node -> its result in Flower's form.
            read: a function of (message, node, Flower's result) that returns the reply.
            silent: the cause of failure for clients without a result.
        """
        for pid, msg in self.awaited.items():
            node = self._hosts.get(pid) or ""
            missing = Failure(pid, msg.phase, msg.step, silent, "no reply")
            yield read(msg, node, arrived[node]) if node in arrived else missing

    def answer(self, replies: Iterable[Reply]) -> None:
        """Continue the run with the replies to the messages that are due.

        Raises:
            RunFailed: a client failed and on_failure is "stop", or no client succeeded.
        """
        if not self.evaluating:
            self._row = {}  # stays empty if the step must be repeated
        try:
            self._request = self._steps.send(replies)
        except StopIteration:
            self._request = None
            if self._at_end:
                self._at_end(final_weights(self._method), self.rows)


def final_weights(method: FedStrategy) -> Tree:
    """Return the global model's tensors; without a global model, the tensors that clients share."""
    known = method.weights["model"] if "global" in method.views else method.sent("model")
    return {name: t.detach().cpu().clone() for name, t in known.items()}


def means_of(method: FedStrategy, row: Row) -> dict[str, float]:
    """Return a row's scores on the clients' data, by the row's names, and the deciding score."""
    target = method.workspace.task.scoring
    scored = ("acc_", "loss_", *(f"{key}_" for key in target.keys.values()))
    means = {
        name: value
        for name, value in row.items()
        if name.startswith(scored) and not name.endswith("_global") and value is not None
    }
    if (key := target.key("clients_weighted")) in means:
        means[target.score()] = means[key]
    return means


def global_of(method: FedStrategy, row: Row) -> dict[str, float]:
    """Return a row's loss and scores on the global test set; {} without such a set."""
    keys = {**method.workspace.task.scoring.keys, "loss": "loss"}
    found = {score: row.get(f"{key}_global") for score, key in keys.items()}
    return {score: value for score, value in found.items() if value is not None}


@dataclass(frozen=True)
class ManagerMembers:
    """The connected nodes, from the ClientManager of Flower's own Server.

    Attributes:
        manager: the ClientManager.
    """

    manager: ClientManager

    def ids(self) -> set[str]:
        """The nodes that are connected now."""
        self.manager.num_available()  # asks Flower for new nodes, which all() does not
        return set(self.manager.all())

    def ask(self, ids: Collection[str], seconds: float) -> Iterator[tuple[str, Answer]]:
        """Yield each node's properties. Flower waits `seconds` for each node."""
        nodes = self.manager.all()

        def properties_of(cid: str) -> Answer:
            try:
                answer = nodes[cid].get_properties(
                    GetPropertiesIns({}), timeout=seconds, group_id=0
                )
            # Flower raises this if the node has failed or left, or if its answer is unreadable.
            except Exception as error:  # noqa: BLE001
                return f"{type(error).__name__}: {error}"
            return (
                dict(answer.properties) if answer.status.code is Code.OK else answer.status.message
            )

        with ThreadPoolExecutor(len(ids)) as threads:
            yield from zip(ids, threads.map(properties_of, ids), strict=True)


class StrategyAdapter(Rounds, Strategy):
    """Implements the six methods of a Strategy that Flower's Server calls, for a run's strategy.

    Args:
        method: the run's strategy; the adapter attaches itself to it.
        callbacks, at_end: see `Rounds`.
    """

    def __init__(
        self, method: FedStrategy, callbacks: Sequence[Callback] = (), at_end: AtEnd | None = None
    ) -> None:
        super().__init__(method, callbacks, at_end)
        method.adapter = self
        self._given = _shared(method)  # the parameters that Flower's Server holds

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """The model's shared tensors, in state-dict order."""
        return self._given

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Return the messages of the round; none past the end of the timetable.

        Raises:
            RunFailed: too few nodes have joined; or a strategy around this one has changed the
                parameters that the method returned, which would have no effect.
        """
        self._check_own(parameters)
        self.begin(server_round, ManagerMembers(client_manager))
        packer = wire.MessagePacker()
        return [(proxy, wire.fit_ins(msg, packer)) for proxy, msg in self._asked(client_manager)]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, Any]], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """Return the aggregated model's shared tensors, and the means of the clients' metrics.

        Raises:
            RunFailed: a client failed and on_failure is "stop", or no client succeeded.
        """
        if not self.over:
            self.answer(self._in_order(results, failures))
            self._given = _shared(self._method)
        return self._given, dict(self.last.get("metrics", {}))

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Return messages to all clients with data, if an evaluation is due after this round.

        Under privacy.noise clients evaluate nothing.
        """
        packer = wire.MessagePacker()
        asked = self._asked(client_manager) if self.evaluating else []
        return [(proxy, wire.fit_ins(msg, packer, EvaluateIns)) for proxy, msg in asked]

    def aggregate_evaluate(
        self, server_round: int, results: list[tuple[Any, Any]], failures: list[Any]
    ) -> tuple[float | None, dict[str, Any]]:
        """Return the loss over all clients' test samples, and means named as in rounds.jsonl.

        The deciding score, such as "accuracy", is computed over all clients' test samples.

        Raises:
            RunFailed: a client failed and on_failure is "stop", or no client succeeded.
        """
        if not self.evaluating:
            return None, {}
        self.answer(self._in_order(results, failures))
        means = means_of(self._method, self.last)
        return means.get("loss_clients_weighted"), means

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Any]] | None:
        """Return loss and scores of the global model on the global test set.

        Return None if no evaluation is due after this round, or if there is no global test set or
        no global model. Round 0 scores the initial model.

        Raises:
            RunFailed: a strategy around this one has changed the parameters.
        """
        self._check_own(parameters)
        method = self._method
        scores = global_of(method, self.last) if server_round else global_scores(method)
        return (scores.pop("loss"), dict(scores)) if "loss" in scores else None

    def _asked(self, manager: ClientManager) -> list[tuple[ClientProxy, Broadcast]]:
        """Return the messages that are due, with their nodes.

        If none of these nodes is connected, Flower's Server does not call `aggregate_fit` or
        `aggregate_evaluate`. Then all clients have failed.

        Raises:
            RunFailed: all clients have failed, and the run cannot continue without them.
        """
        hosted = self.hosted(ManagerMembers(manager))
        if not hosted and not self.over:
            self.answer(self._in_order([], []))
        proxies = manager.all()
        return [(proxies[node], msg) for node, msg in hosted]

    def _in_order(self, results: list[tuple[Any, Any]], failures: list[Any]) -> Iterator[Reply]:
        """Yield the replies of the clients that were asked.

        Some of Flower's failures are pairs of a node and its result, and belong to that node's
        client. The other failures are exceptions that name no node. Every client without a reply
        gets these exceptions as the cause of its failure.
        """
        pairs = [*results, *(failed for failed in failures if isinstance(failed, tuple))]
        arrived = {proxy.cid: res for proxy, res in pairs}
        raised = {clean(str(error)) for error in failures if not isinstance(error, tuple)}
        causes = "; ".join(sorted(raised)) or "Flower reports none"
        more_bytes = self._method.setup.replies.max_bytes

        def read(msg: Broadcast, node: str, res: FitRes | EvaluateRes) -> Reply:
            expected = sum(payload(msg.slot, msg.weights, msg.extras).values())
            return wire.read_result(msg, res, 2 * expected + more_bytes)

        silent = sorted(pid for pid in self.awaited if self._hosts.get(pid) not in arrived)
        return self.in_order(arrived, read, f"no reply from clients {silent}: {causes}")

    def _check_own(self, parameters: Parameters) -> None:
        """Refuse parameters that a strategy around the method has changed."""
        if parameters.tensors != self._given.tensors:
            raise RunFailed(CHANGED)


CHANGED = (
    "a strategy around fedhet's has changed Flower's parameters, which has no effect on fedhet's"
    " model; for differential privacy set privacy.noise"
)


def _shared(method: FedStrategy) -> Parameters:
    return ndarrays_to_parameters([t.cpu().numpy() for t in method.sent("model").values()])
