"""Methods under Flower's own Server, unmodified: its loop over the six methods of its Strategy."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from composing import composed
from contracts.runs import rows, validated
from contracts.tasks import with_dropout
from contracts.test_jumps import attack, deeper
from flwr.client import Client as FlowerClient
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Status,
)
from flwr.server import Server
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.history import History
from flwr.server.server import fit_clients
from torch import nn

from fedhet.core import trees
from fedhet.core.client.client import FedClient
from fedhet.core.client.context import ClientContext
from fedhet.core.errors import RunFailed
from fedhet.core.kernel import Client, Message, State
from fedhet.core.server.evaluation import global_scores
from fedhet.core.task import Task
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.flower.adapter import ManagerMembers, StrategyAdapter
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold
from fedhet.runs.job import Job
from fedhet.runs.privacy.account import Account
from fedhet.runs.stores import MemoryStore

Launch = Callable[..., Any]
MakeClient = Callable[[dict[str, Any]], FedClient]
LINES = ["client.lr=0.1", "client.epochs=1", "fraction=0.5"]


class Node(ClientProxy):
    """A node in this process, as Flower's Server sees it. It notes the messages that it gets."""

    # Flower calls its nodes from several threads, which in one process share torch's generator.
    lock = threading.Lock()

    def __init__(self, cid: str, make: MakeClient, partition: int, total: int) -> None:
        super().__init__(cid)
        self.heard: list[tuple[int, str]] = []  # (round, phase)
        self._make = make
        self._properties = {"partition-id": partition, "num-partitions": total}

    def _client(self, ins: FitIns | EvaluateIns) -> FlowerClient:
        header = wire.read_header(ins.config)
        self.heard.append((header["round"], header["phase"]))
        return self._attached().to_client()

    def _attached(self) -> FedClient:
        client = self._make(self._properties)
        wire.Adapter(client)
        return client

    def get_properties(
        self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None
    ) -> GetPropertiesRes:
        return self._attached().to_client().get_properties(ins)

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        with self.lock:
            return self._client(ins).fit(ins)

    def evaluate(
        self, ins: EvaluateIns, timeout: float | None, group_id: int | None
    ) -> EvaluateRes:
        with self.lock:
            return self._client(ins).evaluate(ins)

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        raise AssertionError("the strategy gives the initial parameters")

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        raise AssertionError("no client is disconnected during a run")


def joined(make: MakeClient, total: int) -> SimpleClientManager:
    """`total` nodes that have joined, under random ids as Flower's are."""
    manager = SimpleClientManager()
    ids = random.Random(5).sample(range(10**6), total)
    for partition, cid in enumerate(ids):
        manager.register(Node(str(cid), make, partition, total))
    return manager


class FlowerRun:
    """A configured run on toy data under Flower's Server, with a node for each client."""

    def __init__(self, *overrides: str, task: Task | None = None) -> None:
        self.job = Job(composed(*overrides), task or toy_task(5))
        noise = self.job.workspace.noise
        StrategyAdapter(self.job.strategy, [Account(noise)] if noise else [])
        store = MemoryStore()
        clients = len(self.job.task.sizes)
        self.nodes = joined(lambda properties: self.job.client(store, properties), clients)

    def fit(self, rounds: int) -> History:
        history, _ = Server(client_manager=self.nodes, strategy=self.job.strategy).fit(rounds, None)
        return history

    @property
    def sha256(self) -> str:
        return trees.sha256(self.job.strategy.weights)

    def asked(self, phase: str) -> list[int]:
        """The rounds in which clients got messages of the phase."""
        heard = [message for node in self.nodes.all().values() for message in node.heard]
        return sorted({number for number, name in heard if name == phase})


@pytest.mark.parametrize(
    ("cls", "plugins"),
    [(FedAvg, list), (Scaffold, lambda: [FedNormPlugin()])],
    ids=["fedavg", "scaffold+fednorm"],
)
def test_the_weights_are_those_of_the_classes_alone(
    federation: Callable[..., Any], cls: type, plugins: Callable[[], Any]
) -> None:
    how = {"plugins": plugins, "rounds": 3, "fraction": 0.7}
    expected = federation(with_dropout(), cls, **how).run()
    run = federation(with_dropout(), cls, **how)
    nodes = joined(
        lambda properties: FedClient(run.workspace, cls(), plugins(), run.store, properties),
        6,
    )
    StrategyAdapter(run.strategy)
    history, _ = Server(client_manager=nodes, strategy=run.strategy).fit(3, None)
    assert run.sha256 == expected.sha256
    assert [number for number, _ in history.losses_centralized] == [0, 1, 2, 3]
    scores = global_scores(expected.strategy)
    assert history.losses_centralized[-1][1] == scores["loss"]
    assert history.metrics_centralized["accuracy"][-1][1] == scores["accuracy"]


def test_evaluations_follow_the_rounds_for_which_they_are_due(launch: Launch) -> None:
    """Every second round and the last; History has what the in-process engine records."""
    lines = ["method=fedavg", *LINES, "rounds=5", "eval.every=2"]
    expected = launch(*lines, task=toy_task(5))
    run = FlowerRun(*lines)
    history = run.fit(5)
    assert run.sha256 == expected.summary["weights_sha256"]
    assert run.asked("train") == [1, 2, 3, 4, 5]
    assert run.asked("evaluate") == [2, 4, 5]
    evaluated = [row for row in rows(expected) if row["acc_global"] is not None]
    for scores, key in (
        (history.losses_distributed, "loss_clients_weighted"),
        (history.metrics_distributed["accuracy"], "acc_clients_weighted"),
        (history.metrics_distributed["acc_clients_mean"], "acc_clients_mean"),
        (history.losses_centralized[1:], "loss_global"),
        (history.metrics_centralized["accuracy"][1:], "acc_global"),
    ):
        assert scores == [(row["round"], row[key]) for row in evaluated], key
    assert history.losses_centralized[0][0] == 0  # the initial model


def test_rounds_past_the_end_of_the_timetable_ask_no_client(launch: Launch) -> None:
    lines = ["method=scaffold", *LINES, "rounds=2"]
    run = FlowerRun(*lines)
    history = run.fit(4)
    assert run.sha256 == launch(*lines, task=toy_task(5)).summary["weights_sha256"]
    assert run.asked("train") == run.asked("evaluate") == [1, 2]
    assert [number for number, _ in history.losses_centralized] == [0, 1, 2]
    assert [number for number, _ in history.losses_distributed] == [1, 2]


@pytest.mark.parametrize(
    ("phases", "lines"),
    [
        (["fedlex.explore"], ["method=fedlex", "plugin.fedlex.e_exp=2", "plugin.fedlex.c_exp=3"]),
        (["fedgmm.fit", "fedgmm.share"], ["method=fedgmm"]),
        (["collect"], ["method=fedpcl"]),
    ],
    ids=["fedlex", "fedgmm", "fedpcl"],
)
def test_phases_before_the_training_are_rounds_without_evaluation(
    launch: Launch, phases: list[str], lines: list[str]
) -> None:
    lines = [*lines, *LINES, "rounds=2"]
    expected = launch(*lines, task=toy_task(5))
    run = FlowerRun(*lines)
    first = len(phases) + 1  # the first round of the training
    history = run.fit(first + 1)
    assert run.sha256 == expected.summary["weights_sha256"]
    assert [run.asked(phase) for phase in phases] == [[n] for n in range(1, first)]
    assert run.asked("train") == run.asked("evaluate") == [first, first + 1]
    trained = [row for row in rows(expected) if row["phase"] == "train"]
    accuracies = [(row["round"], row["acc_clients_weighted"]) for row in trained]
    assert history.metrics_distributed["accuracy"] == accuracies


class CannotEvaluate(Client):
    """Clients 1 and 3 fail when they evaluate."""

    def views(
        self, msg: Message, state: State, ctx: ClientContext
    ) -> dict[str, Callable[[], nn.Module]]:
        if msg.pid in (1, 3):
            raise OSError("the disk is full")
        return super().views(msg, state, ctx)


@pytest.fixture
def cannot_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAvg, "client", CannotEvaluate)


@pytest.mark.usefixtures("cannot_evaluate")
def test_a_client_that_cannot_evaluate_is_left_out(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ["method=fedavg", *LINES, "rounds=2", "on_failure=skip"]
    expected = launch(*lines, task=toy_task(5))
    run = FlowerRun(*lines)
    history = run.fit(2)
    losses = [(row["round"], row["loss_clients_weighted"]) for row in rows(expected)]
    assert history.losses_distributed == losses
    assert run.sha256 == expected.summary["weights_sha256"]
    assert "'evaluate', step 2: OSError: the disk is full" in caplog.text


@pytest.mark.usefixtures("cannot_evaluate")
def test_a_client_that_cannot_evaluate_stops_the_run() -> None:
    run = FlowerRun("method=fedavg", *LINES, "rounds=2")
    with pytest.raises(RunFailed, match=r"client 1 .*'evaluate', step 1: OSError"):
        run.fit(2)
    assert run.asked("train") == [1]


@pytest.mark.parametrize("on_failure", ["stop", "skip"])
def test_a_node_that_fails_in_every_evaluation(
    monkeypatch: pytest.MonkeyPatch, on_failure: str
) -> None:
    """Flower reports the exception without its client, so no client has replied."""

    def unreachable(self: Node, *args: Any, **how: Any) -> EvaluateRes:
        raise ConnectionError("the node has left")

    monkeypatch.setattr(Node, "evaluate", unreachable)
    run = FlowerRun("method=fedavg", *LINES, "rounds=2", f"on_failure={on_failure}")
    with pytest.raises(RunFailed, match=r"client 0 .*'evaluate'.*node .*left"):
        run.fit(2)


@pytest.mark.parametrize(
    ("limit", "reason", "cause"),
    [
        (1, "too large", "the reply has 838"),
        (256, "no reply", "FIT_NOT_IMPLEMENTED: out of memory"),
    ],
)
@pytest.mark.parametrize("place", ["tensor", "metric", "message"])
def test_the_content_of_a_failed_reply_is_not_read(
    monkeypatch: pytest.MonkeyPatch, place: str, limit: int, reason: str, cause: str
) -> None:
    """It is counted like any other, and costs no memory."""
    fit = Node.fit
    large = bytes(2**23)

    def failing(self: Node, ins: FitIns, **how: Any) -> FitRes:
        res = fit(self, ins, **how)
        if self._properties["partition-id"] == 1:
            res.status = Status(Code.FIT_NOT_IMPLEMENTED, "out of memory")
            if place == "message":
                res.status.message += " " * len(large)
            elif place == "metric":
                res.metrics["x"] = large
            else:
                res.parameters.tensors.append(large)
        return res

    monkeypatch.setattr(Node, "fit", failing)
    run = FlowerRun(
        *["method=fedavg", "fraction=1", "rounds=1", "on_failure=skip", f"replies.max_mb={limit}"]
    )
    strategy = run.job.strategy
    server = Server(client_manager=run.nodes, strategy=strategy)
    server.parameters = strategy.initialize_parameters(run.nodes)
    asked = strategy.configure_fit(1, server.parameters, run.nodes)
    results, failures = fit_clients(asked, None, None, 1)
    tracemalloc.start()
    strategy.aggregate_fit(1, results, failures)
    assert tracemalloc.get_traced_memory()[1] < len(large) / 4
    tracemalloc.stop()
    found = {f.pid: f for f in strategy.adapter._loop.current.failures}
    assert sorted(found) == [1]
    assert all(f.reason == reason and f.cause.startswith(cause) for f in found.values())


@pytest.mark.parametrize("half", ["fit", "evaluate"])
def test_a_round_in_which_no_node_is_present(half: str) -> None:
    """Flower's Server gives no results then: all clients have failed, and nothing is late."""
    lines = ["rounds=2", "on_failure=skip", "replies.bad_steps=1"]
    run = FlowerRun("method=fedavg", *LINES, *lines)
    strategy = run.job.strategy
    server = Server(client_manager=run.nodes, strategy=strategy)
    server.parameters = strategy.initialize_parameters(run.nodes)
    if half == "evaluate":
        server.fit_round(1, None)
    else:
        strategy.adapter.nodes.hosts([0], ManagerMembers(run.nodes))  # all have joined
    nodes = list(run.nodes.all().values())
    for node in nodes:
        run.nodes.unregister(node)
    if half == "evaluate":
        with pytest.raises(RunFailed, match=r"'evaluate'.*no reply"):
            server.evaluate_round(1, None)
        return
    assert server.fit_round(1, None) is None
    for node in nodes:
        run.nodes.register(node)
    assert server.evaluate_round(1, None)
    assert server.fit_round(2, None) and server.evaluate_round(2, None)
    assert run.asked("train") == [2] and run.asked("evaluate") == [1, 2]


def test_a_step_that_is_undone_after_the_clients_evaluation(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients are asked again in the next round of Flower's, which trains nothing."""
    task = deeper(validated(2))
    task.test = None
    attack(monkeypatch, {1}, trees.LARGEST, pid=1)
    lines = ["method=fedavg", "client.lr=.01", "on_failure=skip", "replies.max_lost=1"]
    expected = launch(*lines, "rounds=2", task=task)
    run = FlowerRun(*lines, "rounds=2", task=task)
    run.fit(3)
    assert run.sha256 == expected.summary["weights_sha256"]
    assert run.asked("train") == run.asked("evaluate") == [1, 2]


def test_a_step_that_is_taken_again(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round of Flower's takes it, with all clients but the one that was far too large."""
    attack(monkeypatch, {1}, 1e6)
    lines = ["method=fedavg", "fraction=1", "rounds=2", "on_failure=skip", "replies.max_lost=1"]
    expected = launch(*lines, task=validated())
    run = FlowerRun(*lines, task=validated())
    history = run.fit(3)
    assert run.sha256 == expected.summary["weights_sha256"]
    assert run.asked("evaluate") == [1, 2]
    assert [number for number, _ in history.losses_distributed] == [2, 3]


def test_noise_under_flowers_own_server() -> None:
    """It is accounted for, and no client is asked for scores."""
    run = FlowerRun("method=fedavg", *LINES, "privacy.noise=1", "eval.clients=false", "rounds=2")
    history = run.fit(2)
    assert run.asked("train") == [1, 2] and run.asked("evaluate") == []
    assert len(history.losses_centralized) == 3
