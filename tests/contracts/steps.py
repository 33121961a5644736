"""One step whose replies are altered on their way, and what it has moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedhet.core import trees
from fedhet.core.messages import Broadcast
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg

Federation = Callable[..., Any]
Alter = Callable[[list[Broadcast], list[Any]], list[Any]]
VALUES = {0: 0.5, 1: -2.0, 2: 1.0, 3: 0.25, 4: 900.0, 5: 0.75, 6: 2.0}


def after_a_step(
    federation: Federation, cls: type = FedAvg, *, alter: Any = None, **given: Any
) -> Any:
    """A federation after one step; with `merge`, `clients` and `norm` for the toy task."""
    task = toy_task(given.pop("clients", 7), norm=given.pop("norm", False))
    run = federation(task, cls, rounds=2, **given)
    run.step(alter or (lambda plan, replies: replies))
    return run


def sending(values: dict[int, float]) -> Alter:
    """Each client's weights and buffers are what it received, plus a number of its own.

    To variances its absolute value is added.
    """

    def alter(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        for msg, reply in zip(plan, replies, strict=True):
            for name, t in msg.weights.items():
                if t.is_floating_point():
                    moved = values[reply.pid]
                    reply.weights[name] = t + (abs(moved) if "running_var" in name else moved)
        return replies

    return alter


def scaling(factors: dict[int, float]) -> Alter:
    """The changes of some clients, and their buffers', are multiplied."""

    def alter(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        for msg, reply in zip(plan, replies, strict=True):
            change = trees.Difference(reply.weights, msg.weights)
            new = trees.add(trees.map(lambda t: t, msg.weights), change, factors.get(reply.pid, 1))
            reply.weights = trees.cast(new, msg.weights)
        return replies

    return alter


def moved(run: Any, name: str = "head.bias") -> float:
    """By how much the step has moved a tensor, all of whose entries moved by as much."""
    change = run.model[name].double() - run.workspace.initial[name].double()
    torch.testing.assert_close(change, change.flatten()[0].expand_as(change), rtol=0, atol=1e-6)
    return float(change.flatten()[0])
