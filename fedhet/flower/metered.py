"""What a SuperNode does, as a text file for Prometheus (fedhet/record/prometheus.py)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.client import NumPyClient

from fedhet.flower import wire
from fedhet.messages import Broadcast, Failure, Reply
from fedhet.record import prometheus

# name -> kind, help, names of the labels
_METRICS = {
    "round": ("gauge", "round of the last message", ()),
    "messages_total": ("counter", "messages served", ("phase",)),
    "failures_total": ("counter", "messages that failed here, by reason", ("reason",)),
    "seconds_total": ("counter", "seconds spent on messages", ("phase",)),
    "bytes_total": ("counter", "bytes of weights and tensors", ("direction",)),
    "score": ("gauge", "the last evaluation", ("client", "split", "model", "metric")),
}
Counts = dict[str, float]  # a metric and its labels as JSON -> its value


def measured(client: NumPyClient, partition_id: int) -> NumPyClient:
    """The client, or one that also counts what it does where a file for it is wanted."""
    file = prometheus.file_of(f"node-{partition_id}")
    return client if file is None else Metered(client, file)


class Metered(wire.WireClient):
    """A client that counts its messages in a file. Each message may have a process of its own.

    Args:
        client: serves the messages.
        file: the file; the counts so far are in one beside it.
    """

    def __init__(self, client: NumPyClient, file: Path) -> None:
        self._client = client
        self._file = file

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return self._client.get_properties(config)

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        began = time.perf_counter()
        result: tuple[list[np.ndarray], int, dict[str, Any]] = self._client.fit(parameters, config)
        seconds = time.perf_counter() - began
        msg = wire.read_broadcast(parameters, config)
        sizes = {"down": parameters, "up": result[0]}
        sent = {way: sum(array.nbytes for array in arrays) for way, arrays in sizes.items()}
        self._count(msg, wire.read_reply(msg, result), seconds, sent)
        return result

    def _count(
        self, msg: Broadcast, reply: Reply, seconds: float, sent: Mapping[str, float]
    ) -> None:
        memory = self._file.with_suffix(".json")
        counts = _read(memory)

        def put(name: str, value: float, *labels: str) -> None:
            key = json.dumps([name, *labels])
            total = name.endswith("_total")
            counts[key] = value + (counts.get(key, 0.0) if total else 0.0)

        put("round", msg.round)
        put("messages_total", 1, msg.phase)
        put("seconds_total", seconds, msg.phase)
        for way, size in sent.items():
            put("bytes_total", size, way)
        if isinstance(reply, Failure):
            put("failures_total", 1, reply.reason)
        else:
            for name, value in reply.metrics.items():
                if name.count(".") == 2:  # split.model.metric
                    put("score", value, str(msg.pid), *name.split("."))
        prometheus.write(memory, json.dumps(counts))
        prometheus.write(self._file, _text(counts))


def _read(memory: Path) -> Counts:
    """The counts so far; none where there are none, or where the file is damaged."""
    try:
        content = json.loads(memory.read_text())
        return {
            key: float(value)
            for key, value in content.items()
            if len(json.loads(key)) == 1 + len(_METRICS[json.loads(key)[0]][2])
        }
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}


def _text(counts: Counts) -> str:
    blocks = []
    for name, (kind, help, labels) in _METRICS.items():
        keys = {key: json.loads(key) for key in counts}
        values = [
            (dict(zip(labels, own[1:], strict=True)), counts[key])
            for key, own in keys.items()
            if own[0] == name
        ]
        blocks.append(prometheus.block(f"node_{name}", kind, help, values))
    return "".join(blocks)
