"""Flower's own differential privacy and secure aggregation, around methods: refused, not ignored.

Their wrappers and mods change parameters on the way. A reply is sealed by a digest, and a method
keeps its weights itself.
"""

from __future__ import annotations

from typing import Any

import pytest
from composing import composed
from contracts.test_flower_server import LINES, FlowerRun
from flwr.app import Message
from flwr.client import ClientApp
from flwr.client.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    fixedclipping_mod,
    secaggplus_mod,
)
from flwr.common import Context, RecordDict, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common import recorddict_compat
from flwr.server import Server
from flwr.server.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    DPFedAvgAdaptive,
    DPFedAvgFixed,
    FedAvg,
)
from flwr.supercore.task_identity import TaskIdentity

from fedhet.core.errors import RunFailed
from fedhet.core.messages import Failure, Reply, Upload
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.runs.job import Job
from fedhet.runs.stores import MemoryStore

FIXED = {"noise_multiplier": 0.1, "clipping_norm": 5.0, "num_sampled_clients": 2}
ADAPTIVE = {"noise_multiplier": 0.1, "num_sampled_clients": 2, "clipped_count_stddev": 1.0}
WRAPPERS = [
    (DifferentialPrivacyServerSideFixedClipping, FIXED),
    (DifferentialPrivacyClientSideFixedClipping, FIXED),
    (DifferentialPrivacyServerSideFixedClipping, {**FIXED, "clipping_norm": 1e-3}),
    (DifferentialPrivacyServerSideAdaptiveClipping, ADAPTIVE),
    (DifferentialPrivacyClientSideAdaptiveClipping, ADAPTIVE),
    (DPFedAvgFixed, {"num_sampled_clients": 2, "clip_norm": 5.0, "noise_multiplier": 0.1}),
    (DPFedAvgAdaptive, {"num_sampled_clients": 2, "noise_multiplier": 0.1}),
]


class Around(FedAvg):
    """A strategy around another one, to which it passes every call on."""

    def __init__(self, strategy: Any, noise: float = 0.0) -> None:
        super().__init__()
        self.strategy, self.noise = strategy, noise

    def initialize_parameters(self, *args: Any, **how: Any) -> Any:
        return self.strategy.initialize_parameters(*args, **how)

    def configure_fit(self, *args: Any, **how: Any) -> Any:
        return self.strategy.configure_fit(*args, **how)

    def aggregate_fit(self, *args: Any, **how: Any) -> Any:
        parameters, metrics = self.strategy.aggregate_fit(*args, **how)
        arrays = [array + self.noise for array in parameters_to_ndarrays(parameters)]
        return ndarrays_to_parameters(arrays) if self.noise else parameters, metrics

    def configure_evaluate(self, *args: Any, **how: Any) -> Any:
        return self.strategy.configure_evaluate(*args, **how)

    def aggregate_evaluate(self, *args: Any, **how: Any) -> Any:
        return self.strategy.aggregate_evaluate(*args, **how)

    def evaluate(self, server_round: int, parameters: Any) -> Any:
        return self.strategy.evaluate(server_round, parameters)


@pytest.mark.parametrize(
    ("between", "rounds"), [(lambda strategy: strategy, 1), (Around, 2)], ids=["", "between"]
)
@pytest.mark.parametrize(("wrapper", "how"), WRAPPERS)
def test_a_strategy_around_a_method(
    wrapper: Any, how: dict[str, Any], between: Any, rounds: int
) -> None:
    """Its noise would be lost, or it changes what clients have sealed: the run ends at once."""
    run = FlowerRun("method=fedavg", *LINES, f"rounds={rounds}")
    strategy = wrapper(between(run.job.strategy), **how)
    refused = r"has changed .*parameters, .*privacy\.noise|not match .*digest|norm_bit not returned"
    with pytest.raises((RunFailed, KeyError), match=refused):
        Server(client_manager=run.nodes, strategy=strategy).fit(rounds, None)
    assert run.asked("train") == [1]


def test_any_noise_that_would_be_lost_ends_the_run() -> None:
    """After the last round too. A strategy that passes everything on is none of it."""
    run = FlowerRun("method=fedavg", *LINES, "rounds=1")
    Server(client_manager=run.nodes, strategy=Around(run.job.strategy)).fit(1, None)
    run = FlowerRun("method=fedavg", *LINES, "rounds=1")
    with pytest.raises(RunFailed, match=r"has changed .*parameters"):
        Server(client_manager=run.nodes, strategy=Around(run.job.strategy, 0.1)).fit(1, None)


def reply_through(monkeypatch: pytest.MonkeyPatch, *mods: Any) -> Reply:
    for name, value in {"_run_id": 1, "_node_id": 1, "_task_id": 1}.items():
        monkeypatch.setattr(TaskIdentity, name, value)
    job = Job(composed("method=fedavg", *LINES), toy_task())
    (msg, *_) = job.strategy.plan(1).messages
    ins = wire.fit_ins(msg, wire.MessagePacker({}))
    message = Message(recorddict_compat.fitins_to_recorddict(ins, keep_input=True), 1, "train")
    message.metadata.__dict__["_message_id"] = "a"
    store = MemoryStore()
    client = wire.Adapter(job.client(store)).to_client()
    app = ClientApp(client_fn=lambda context: client, mods=list(mods))
    node = {"partition-id": 0, "num-partitions": 1}
    answer = app(message, Context(1, 1, node, RecordDict(), {}))
    result = recorddict_compat.recorddict_to_fitres(answer.content, keep_input=False)
    return wire.read_result(msg, result, 10**9)


def test_noise_of_a_mod_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(reply_through(monkeypatch), Upload)
    reply = reply_through(monkeypatch, LocalDpMod(1.0, 1.0, 1.0, 1e-5))
    assert isinstance(reply, Failure)
    assert reply.reason == "corrupt"
    assert "digest" in reply.cause


@pytest.mark.parametrize(
    ("mod", "problem"),
    [
        (fixedclipping_mod, "clipping_norm"),
        (adaptiveclipping_mod, "clipping_norm"),
        (secaggplus_mod, "secaggplus_configs"),
    ],
    ids=["fixed", "adaptive", "secagg"],
)
def test_mods_that_need_their_own_server_raise(
    monkeypatch: pytest.MonkeyPatch, mod: Any, problem: str
) -> None:
    with pytest.raises((KeyError, ValueError), match=problem):
        reply_through(monkeypatch, mod)
