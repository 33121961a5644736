"""Flower's own differential privacy and secure aggregation, around methods: refused, not ignored.

Their wrappers and mods change parameters on the way. A reply is sealed by a digest, and a method
keeps its weights itself.
"""

from __future__ import annotations

from typing import Any

import pytest
from composing import composed
from contracts.test_flower_server import LINES, FlowerRun
from flwr.client import ClientApp
from flwr.client.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    fixedclipping_mod,
    secaggplus_mod,
)
from flwr.common import Context, RecordDict
from flwr.server import Server
from flwr.server.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from flwr.supercore.task_identity import TaskIdentity

from fedhet.data.toy import toy_task
from fedhet.errors import RunFailed
from fedhet.flower import wire
from fedhet.flower.server import _message, _result
from fedhet.job import Job
from fedhet.messages import Failure, Reply, Update
from fedhet.state import MemoryStore

FIXED = {"noise_multiplier": 0.1, "clipping_norm": 5.0, "num_sampled_clients": 2}
ADAPTIVE = {"noise_multiplier": 0.1, "num_sampled_clients": 2, "clipped_count_stddev": 1.0}
WRAPPERS = [
    (DifferentialPrivacyServerSideFixedClipping, FIXED, "has changed them"),
    (DifferentialPrivacyClientSideFixedClipping, FIXED, "has changed them"),
    (DifferentialPrivacyServerSideFixedClipping, {**FIXED, "clipping_norm": 1e-3}, "the digest"),
    (DifferentialPrivacyServerSideAdaptiveClipping, ADAPTIVE, "has changed them"),
]


@pytest.mark.parametrize(("wrapper", "how", "problem"), WRAPPERS)
def test_a_strategy_around_a_method(wrapper: Any, how: dict[str, Any], problem: str) -> None:
    """Noise that would be lost, and replies that have been clipped, end the run."""
    run = FlowerRun("method=fedavg", *LINES, "rounds=2")
    server = Server(client_manager=run.nodes, strategy=wrapper(run.job.strategy, **how))
    with pytest.raises(RunFailed, match=problem):
        server.fit(2, None)


def test_adaptive_clipping_at_clients() -> None:
    """It needs a metric of its mod, without which Flower itself refuses the replies."""
    run = FlowerRun("method=fedavg", *LINES, "rounds=2")
    strategy = DifferentialPrivacyClientSideAdaptiveClipping(run.job.strategy, **ADAPTIVE)
    with pytest.raises(KeyError, match="norm_bit"):
        Server(client_manager=run.nodes, strategy=strategy).fit(2, None)


def reply_through(monkeypatch: pytest.MonkeyPatch, *mods: Any) -> Reply:
    for name, value in {"_run_id": 1, "_node_id": 1, "_task_id": 1}.items():
        monkeypatch.setattr(TaskIdentity, name, value)
    job = Job(composed("method=fedavg", *LINES), toy_task())
    (msg, *_) = job.strategy.plan(1)
    message = _message(msg, wire.Packer({}), 1)
    message.metadata.__dict__["_message_id"] = "a"
    store = MemoryStore()
    app = ClientApp(client_fn=lambda context: job.client(store).to_client(), mods=list(mods))
    node = {"partition-id": 0, "num-partitions": 1}
    answer = app(message, Context(1, 1, node, RecordDict(), {}))
    return wire.read_result(msg, _result(msg, answer), 10**9)


def test_noise_of_a_mod_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(reply_through(monkeypatch), Update)
    reply = reply_through(monkeypatch, LocalDpMod(1.0, 1.0, 1.0, 1e-5))
    assert isinstance(reply, Failure)
    assert reply.reason == "corrupt"
    assert "does not have the digest in the header" in reply.cause


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
