"""Failures and clients' states: what ends the run, what starts afresh, what must be kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fedhet.messages import LOST, STATE_BYTES, Failure, Update
from fedhet.privacy.account import planned_releases

if TYPE_CHECKING:
    from fedhet.setting import Setting
    from fedhet.strategy import FedStrategy

log = logging.getLogger("fedhet")


def starts_afresh(reason: str, setting: Setting) -> bool:
    """Whether a failure is a lost state, and the run lets its client begin again without one."""
    return reason == LOST and setting.on_lost_state == "restart"


def ends_run(failure: Failure, setting: Setting) -> bool:
    """Whether the run does not go on without the client."""
    return setting.on_failure == "stop" and not starts_afresh(failure.reason, setting)


def forget_lost(strategy: FedStrategy, failures: Iterable[Failure]) -> None:
    """Let each client whose state is lost start afresh, like one that takes part the first time."""
    for failure in failures:
        if starts_afresh(failure.reason, strategy.setting) and failure.pid in strategy.versions:
            version = strategy.versions.pop(failure.pid)
            for by_client in (strategy.state_bytes, *strategy.pinned.values()):
                by_client.pop(failure.pid, None)
            log.warning(
                "client %d starts afresh: its state of round %d is lost", failure.pid, version
            )


def needed_versions(strategy: FedStrategy, pid: int) -> list[int]:
    """Earlier states that the client must keep: of the best evaluations, and for checkpoints."""
    best = [versions[pid] for versions in strategy.pinned.values() if pid in versions]
    return sorted({*best, *strategy.kept_back.get(pid, ())})


def registered(strategy: FedStrategy, updates: Iterable[Update]) -> Iterator[Update]:
    """Note what the clients of admitted updates report, and pass the updates on."""
    planned = planned_releases(strategy)
    for update in updates:
        strategy.account.told(update, planned)
        size = int(update.metrics.pop(STATE_BYTES, 0))
        if update.keeps:
            strategy.versions[update.pid] = strategy.current.round
            strategy.state_bytes[update.pid] = size
        strategy.current.accepted += 1
        strategy.current.measure(update.metrics)
        yield update


def log_failures(failures: Iterable[Failure]) -> None:
    """Log who is left out of a step."""
    for failure in failures:
        log.warning("%s", failure)
