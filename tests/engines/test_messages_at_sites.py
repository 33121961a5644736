"""What a site does with a message, and what the server learns of one that it cannot serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_sites import Node, Sites

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
    sites = Sites(tmp_path, monkeypatch)
    msg = sites.job.strategy.plan(1).messages[0]
    lines = ["dataset=cifar10", f"data_dir={tmp_path}"]
    reply = Node(tmp_path, 1, lines, partition_id=0, num_partitions=1).serve(msg)
    assert isinstance(reply, Failure) and "cannot serve this run: NotFound" in reply.cause


def test_a_message_that_a_site_cannot_serve_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is gone, for example."""
    sites = Sites(tmp_path, monkeypatch)
    msg = next(msg for msg in sites.job.strategy.plan(1).messages if msg.pid == 1)
    node: Any = sites.deployment.host(1)
    (tmp_path / "b.npz").unlink()
    apps._cached_site.cache_clear()  # whichever site was asked last
    reply = node.serve(msg, sites.deployment.nodes.agreed)
    assert isinstance(reply, Failure) and "site 'b' cannot serve this run: DataError" in reply.cause
