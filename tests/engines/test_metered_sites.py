"""The text files for Prometheus of nodes with data of their own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
from own_sites import Sites, as_sent

from fedhet.core.messages import Failure, payload
from fedhet.flower import apps, wire

TRAIN = 'fedhet_node_messages_total{phase="train"}'


def counts(folder: Path, pid: int) -> dict[str, float]:
    lines = (folder / f"fedhet-node-{pid}.prom").read_text().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_each_site_counts_its_messages_bytes_failures_and_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node says is what was sent to it and what it sent, and what the server recorded."""
    monkeypatch.setenv("FEDHET_METRICS_DIR", str(tmp_path / "prom"))
    sites = Sites(tmp_path, monkeypatch)  # SCAFFOLD sends extras both ways
    summary = sites.run()
    (msg, _) = sites.served[0]
    sites.serve(replace(msg, phase="nonsense"))
    frame = pandas.read_parquet(tmp_path / "run" / "clients" / "round-000002.parquet")
    total: Counter[str] = Counter()
    for pid in range(3):
        own = [(sent, reply) for sent, reply in sites.served if sent.pid == pid]
        found = counts(tmp_path / "prom", pid)
        assert found[TRAIN] == 2
        assert found['fedhet_node_messages_total{phase="evaluate"}'] == 2
        failed = 'fedhet_node_failures_total{reason="failed"}'
        assert found.get(failed, 0) == (1 if pid == msg.pid else 0)
        sizes = {"down": [sent for sent, _ in own], "up": [reply for _, reply in own]}
        for way, messages in sizes.items():
            expected = sum(
                sum(payload("model", one.weights, one.extras).values())
                for one in messages
                if not isinstance(one, Failure)
            )
            assert found[f'fedhet_node_bytes_total{{direction="{way}"}}'] == expected
            total[way] += expected
        scores = {name: value for name, value in found.items() if "node_score{" in name}
        rows = frame[frame.client == pid]
        assert len(scores) == len(rows)
        for row in rows.itertuples():
            labels = f'client="{pid}",split="{row.split}",model="{row.model}",metric="{row.metric}"'
            assert scores[f"fedhet_node_score{{{labels}}}"] == row.value
    assert total["up"] == sum(summary["bytes"]["up"].values())  # evaluations send up no tensors


def test_a_message_is_decoded_and_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDHET_METRICS_DIR", str(tmp_path / "prom"))
    sites = Sites(tmp_path, monkeypatch)
    msg = sites.job.strategy.plan(1)[0]
    unpacked = []
    original = wire.unpack

    def unpack(*arguments: Any) -> Any:
        unpacked.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(wire, "unpack", unpack)
    sites.serve(msg)
    assert len(unpacked) == 2  # the message by the node, and its reply by the server
    assert counts(tmp_path / "prom", msg.pid)[TRAIN] == 1


def test_a_message_that_the_machine_cannot_serve_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lacks the data of the run, for example."""
    from flwr.common import Context, RecordDict

    from fedhet.flower.apps import client_for
    from fedhet.stores import MemoryStore

    monkeypatch.setenv("FEDHET_METRICS_DIR", str(tmp_path / "prom"))
    sites = Sites(tmp_path, monkeypatch)
    msg = sites.job.strategy.plan(1)[0]
    run_config = {"overrides": f"dataset=cifar10 data_dir={tmp_path}"}
    node = {"partition-id": 0, "num-partitions": 1}
    context = Context(1, 1, node, RecordDict(), run_config)
    client: Any = client_for(context, MemoryStore()).numpy_client
    reply = wire.read_reply(msg, client.fit(*wire.write_broadcast(msg)))
    assert isinstance(reply, Failure) and "cannot serve this run" in reply.cause
    assert counts(tmp_path / "prom", 0)['fedhet_node_failures_total{reason="failed"}'] == 1


def test_a_message_that_a_site_cannot_serve_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is gone, for example."""
    monkeypatch.setenv("FEDHET_METRICS_DIR", str(tmp_path / "prom"))
    sites = Sites(tmp_path, monkeypatch)
    msg = next(msg for msg in sites.job.strategy.plan(1) if msg.pid == 1)
    node: Any = sites.deployment.nodes.proxies([1], sites.deployment.manager)[1]
    (tmp_path / "b.npz").unlink()
    apps._cached_site.cache_clear()  # whichever site was asked last
    reply = wire.read_reply(msg, node.client.fit(*as_sent(msg, sites.deployment.nodes.agreed)))
    assert isinstance(reply, Failure) and "no such file" in reply.cause
    assert counts(tmp_path / "prom", 1)['fedhet_node_failures_total{reason="failed"}'] == 1
