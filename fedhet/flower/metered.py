"""What a SuperNode does, as a text file for Prometheus (fedhet/record/prometheus.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from fedhet.core.messages import Broadcast, Failure, Reply, Update, payload
from fedhet.flower.wire import WireClient
from fedhet.record import prometheus

# name -> kind, help, names of the labels
_METRICS = {
    "round": ("gauge", "round of the last message", ()),
    "messages_total": ("counter", "messages served", ("phase",)),
    "failures_total": ("counter", "messages that failed here, by reason", ("reason",)),
    "seconds_total": ("counter", "seconds spent on messages", ("phase",)),
    "bytes_total": ("counter", "bytes of weights and extras", ("direction",)),
    "score": ("gauge", "the last evaluation", ("client", "split", "model", "metric")),
}
Client = TypeVar("Client", bound=WireClient)
Counts = dict[str, float]  # a metric and its labels as JSON -> its value


def measured(client: Client, partition_id: int) -> Client:
    """The client, which now counts what it does in a file, where a file for it is wanted."""
    if file := prometheus.file_of(f"node-{partition_id}"):
        client.observe = Counter(file)
    return client


class Counter:
    """Counts messages in a file. Each message may have a process of its own.

    Args:
        file: the file; the counts so far are in one beside it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, msg: Broadcast, reply: Reply, seconds: float) -> None:
        memory = self._file.with_suffix(".json")
        counts = _read(memory)
        sent = {"down": sum(payload(msg.slot, msg.weights, msg.extras).values()), "up": 0}
        if isinstance(reply, Update):
            sent["up"] = sum(payload(msg.slot, reply.weights, reply.extras).values())

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
