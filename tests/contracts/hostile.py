"""Replies as they come from another process, and what an attacker does to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from flwr.client import Client
from flwr.common import FitRes

from fedhet.core.messages import Broadcast, Failure
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold

Federation = Callable[..., Any]
Header = dict[str, Any]
LIMIT = 2**20  # bytes of a reply


def served(run: Any) -> Client:
    """A client of the run, as Flower calls it."""
    return wire.Adapter(run.client()).to_client()


def result(run: Any, position: int = 0) -> tuple[Broadcast, FitRes]:
    msg = run.strategy.plan(run.round + 1).messages[position]
    return msg, served(run).fit(wire.fit_ins(msg, wire.MessagePacker()))


def forge(res: FitRes, change: Callable[[Header], Any]) -> None:
    """Change the header as an attacker would, who seals it again."""
    header = json.loads(str(res.metrics["fedhet"]))
    del header["digest"]
    change(header)
    res.metrics["fedhet"] = json.dumps({**header, "digest": wire.seal(header)})


def skipping(federation: Federation, **setup: Any) -> Any:
    return federation(
        toy_task(3),
        Scaffold,
        plugins=lambda: [FedNormPlugin()],
        on_failure="skip",
        rounds=1,
        **setup,
    )


def exchange(run: Any) -> tuple[list[Broadcast], list[FitRes]]:
    plan = run.plan()
    packer = wire.MessagePacker()
    return plan, [served(run).fit(wire.fit_ins(msg, packer)) for msg in plan]


def finish_step(run: Any, plan: list[Broadcast], replies: list[FitRes]) -> None:
    pairs = zip(plan, replies, strict=True)
    run.finish_step(wire.read_result(msg, res, LIMIT) for msg, res in pairs)


def without(run: Any, pids: list[int]) -> str:
    """The weights after the step in which only these clients reply."""
    run.step(
        alter=lambda plan, replies: [
            reply if reply.pid in pids else Failure(reply.pid, "train", 1, "gone")
            for reply in replies
        ]
    )
    sha256: str = run.sha256
    return sha256
