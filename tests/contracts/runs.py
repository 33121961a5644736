"""What tests of whole runs share: a task with data for every purpose, and what a run recorded."""

from __future__ import annotations

import json
from typing import Any

import torch

from fedhet.core.task import ClientData, Task
from fedhet.data.toy import toy_task

SHORT = ["method=fedavg", "rounds=3", "fraction=0.4", "client.lr=0.1", "client.epochs=1"]


def validated(clients: int = 5, val: int = 12, *, norm: bool = False) -> Task:
    """The toy federation with validation and test data of other sizes, drawn at random."""
    task = toy_task(clients, norm=norm)
    draw = torch.Generator().manual_seed(1)

    def part(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, *task.clients[0].train.x.shape[1:], generator=draw)
        return x, torch.randint(task.classes, (n,), generator=draw)

    task.clients = [
        ClientData(client.train, part(val) if val else None, part(7 + pid))
        for pid, client in enumerate(task.clients)
    ]
    return task


def rows(run: Any) -> list[dict[str, Any]]:
    """The lines of rounds.jsonl."""
    return [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]


def without_seconds(run: Any, *others: str) -> list[dict[str, Any]]:
    """The lines of rounds.jsonl without their times, and without other entries."""
    left_out = {"seconds", *others}
    return [{key: value for key, value in row.items() if key not in left_out} for row in rows(run)]
