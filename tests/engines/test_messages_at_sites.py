"""What a site does with a message, and what the server learns of one that it cannot serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_sites import Sites, as_sent

from fedhet.core.messages import Failure
from fedhet.flower import apps, wire


def test_a_message_is_decoded_and_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = Sites(tmp_path, monkeypatch)
    msg = sites.job.strategy.plan(1).messages[0]
    unpacked = []
    original = wire.unpack

    def unpack(*arguments: Any) -> Any:
        unpacked.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(wire, "unpack", unpack)
    sites.serve(msg)
    assert len(unpacked) == 2  # the message by the node, and its reply by the server


def test_a_message_that_the_machine_cannot_serve_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lacks the data of the run, for example."""
    from flwr.common import Context, RecordDict

    from fedhet.flower.apps import client_for
    from fedhet.stores import MemoryStore

    sites = Sites(tmp_path, monkeypatch)
    msg = sites.job.strategy.plan(1).messages[0]
    run_config = {"overrides": f"dataset=cifar10 data_dir={tmp_path}"}
    node = {"partition-id": 0, "num-partitions": 1}
    context = Context(1, 1, node, RecordDict(), run_config)
    client: Any = client_for(context, MemoryStore())
    reply = wire.read_reply(msg, client.fit(*wire.write_broadcast(msg)))
    assert isinstance(reply, Failure) and "cannot serve this run" in reply.cause


def test_a_message_that_a_site_cannot_serve_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is gone, for example."""
    sites = Sites(tmp_path, monkeypatch)
    msg = next(msg for msg in sites.job.strategy.plan(1).messages if msg.pid == 1)
    node: Any = sites.deployment.host(1)
    (tmp_path / "b.npz").unlink()
    apps._cached_site.cache_clear()  # whichever site was asked last
    reply = wire.read_reply(msg, node.client.fit(*as_sent(msg, sites.deployment.nodes.agreed)))
    assert isinstance(reply, Failure) and "no such file" in reply.cause
