"""Counts the privacy spent, on the server and at a client (privacy.delta, privacy.budget).

Each kind of value in a reply is one release. A release is a Gaussian mechanism; its sensitivity is
the clipping norm. There is no amplification by sampling, because the server sees who takes part.

If its owner sets FEDHET_MAX_EPSILON, a machine also counts its releases in all runs together. A
client stores the count of one run with its states of this run. The server chooses the run's name,
so the owner's count is stored elsewhere, and is never removed. The server also chooses the clients'
numbers, and with them the part of a data set that a client has. So a machine counts all of its
clients together. A site with its own data has its own count, because its operator chose its name.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from fedhet.core.client.client import FedClient
from fedhet.core.client.state import Store
from fedhet.core.errors import ConfigError, log
from fedhet.core.groups import Noise
from fedhet.core.limits import demanded
from fedhet.core.messages import Broadcast, Upload
from fedhet.core.noise import MAX_EPSILON, Content, Draw, most_delta, seeded, unpredictable
from fedhet.core.owners import releases_in
from fedhet.core.server.callbacks import Callback, Row
from fedhet.core.server.loop import Loop
from fedhet.core.server.phases import TimetableEntry, sample_cohort
from fedhet.core.server.strategy import FedStrategy
from fedhet.data.storage import write_json
from fedhet.runs.stores import own_folder

RELEASES = "privacy.releases"  # extra down: how many releases the server expects in the reply
SPENT = "privacy.spent"  # extra down and metric up: a client's releases so far
COUNT = "releases"
History = tuple[tuple[float, int], ...]  # (noise multiplier, number of releases) pairs


def composed(history: History, delta: float) -> float:
    """Return the epsilon of all releases together, computed by opacus' accountant.

    The accountant composes Rényi divergences (Mironov 2017). The result is an upper bound of the
    exact value.

    Args:
        history: the releases; each multiplier is the noise's standard deviation over the
            sensitivity, > 0.
        delta: in (0, 1).
    """
    if not any(releases for _, releases in history):
        return 0.0
    from opacus.accountants import RDPAccountant  # here: the import takes seconds

    accountant = RDPAccountant()
    accountant.history = [(multiplier, 1.0, releases) for multiplier, releases in history]
    with warnings.catch_warnings():
        # The best order may be beyond the orders that it tries. The bound is then valid, but loose.
        warnings.filterwarnings("ignore", "Optimal order", UserWarning)
        return float(accountant.get_epsilon(delta))


@cache
def epsilon(multiplier: float, delta: float, releases: int) -> float:
    """Return the epsilon of several releases with the same noise; see `composed`.

    Args:
        multiplier: the standard deviation of the noise over the sensitivity, > 0.
        delta: in (0, 1).
        releases: the number of releases.
    """
    return composed(((multiplier, releases),), delta)


# ---- at a client
def release(client: FedClient, update: Upload, public: set[str]) -> None:
    """Clip a client's update, add the noise, and count its releases, before it leaves the client.

    Args:
        client: the client.
        update: its update; it is changed.
        public: the names of extras, and of tensors in them, that need no noise.

    Raises:
        ValueError: the update has a value that noise cannot cover, the server does not account for
            all releases, or they would exceed the budget. Then nothing may be sent.
    """
    msg, noise = client.msg, client.workspace.noise
    content = Content.of(update, msg.weights, public)
    if content.releases > msg.integer(RELEASES):
        raise ConfigError(
            f"privacy.noise: the reply has {content.releases} releases, and the server accounts for"
            f" {msg.integer(RELEASES)}: `expects` must name each of them"
        )
    spent = _count_releases(client, content.releases)  # before anything leaves
    draw: Draw = unpredictable
    if client.workspace.simulated:
        draw = seeded(client.workspace.seed, msg.phase, msg.step, msg.pid)
    content.noised(noise, draw).write(update, msg.weights)
    update.metrics = {SPENT: spent}


def _count_releases(client: FedClient, releases: int) -> int:
    """Count the releases of a reply before it is sent; return the client's count in the run.

    Raises:
        ValueError: they would exceed the run's budget, or the limit of the machine's owner.
    """
    msg, noise = client.msg, client.workspace.noise
    # The run chooses the numbers of clients, but not the name of a site.
    name = "this machine" if client.site_name is None else f"site {client.site_name!r}"
    # A simulated client needs no lock and no ledger: one process at a time serves it, and its noise
    # protects nobody.
    with nullcontext() if client.workspace.simulated else locked(name) as path:
        store = client.state.store
        spent = max(spent_by(store, msg.pid), msg.integer(SPENT))
        check_budget(noise, msg.pid, spent, releases)
        if path is not None:
            spend(path, name, noise.multiplier, releases)
        write_spent(store, msg.pid, spent + releases)
    return spent + releases


def check_budget(noise: Noise, pid: int, spent: int, more: int) -> None:
    """Refuse releases beyond the budget.

    Raises:
        ValueError: `more` releases would exceed it; the message has both values of epsilon.
    """
    if noise.budget is None or not more:
        return
    after = epsilon(noise.multiplier, noise.delta, spent + more)
    if after > noise.budget:
        before = epsilon(noise.multiplier, noise.delta, spent)
        raise ConfigError(
            f"privacy.budget={noise.budget:g}: client {pid} has spent epsilon {before:.4g}, and"
            f" this reply would make it {after:.4g}; nothing was sent"
        )


def spent_by(store: Store, pid: int) -> int:
    """Return a client's count of its releases, stored with its states but without versions."""
    stored = store.load(-1 - pid, 0)  # no client has a negative number
    return int(stored[COUNT]) if stored else 0


def write_spent(store: Store, pid: int, spent: int) -> None:
    """Store a client's count of its releases, unless the stored count is larger."""
    if spent > spent_by(store, pid):
        store.save(-1 - pid, 0, {COUNT: torch.tensor([spent])}, ())


# ---- at a machine, in all runs
@contextmanager
def locked(name: str) -> Iterator[Path]:
    """Lock a ledger for the block, and yield its path.

    Args:
        name: the owner of the ledger: a site with its own data, or the machine.

    Raises:
        ValueError: the folder belongs to another user, or others may write to it.
    """
    path = own_folder("fedhet-privacy") / f"{sha256(name.encode()).hexdigest()[:16]}.json"
    with FileLock(path.with_suffix(".lock")):
        yield path


def spend(path: Path, name: str, multiplier: float, releases: int) -> None:
    """Write releases into a ledger, if the owner of the machine has set a limit.

    Args:
        path: the ledger, from `locked`.
        name: the owner of the ledger, as for `locked`.
        multiplier: the noise multiplier of the releases, > 0.
        releases: the number of releases.

    Raises:
        ValueError: they would exceed the owner's limit, or the ledger cannot be read. Then nothing
            may be sent.
    """
    most = demanded(MAX_EPSILON)
    if most is None or not releases:
        return
    counts = _read(path)
    before = composed(tuple(counts.items()), most_delta())
    counts[multiplier] = counts.get(multiplier, 0) + releases
    after = composed(tuple(counts.items()), most_delta())
    if not after <= most:
        raise ConfigError(
            f"{MAX_EPSILON}={most:g}: in all runs together, {name} has spent epsilon {before:.4g},"
            f" and this reply would make it {after:.4g}; nothing was sent"
        )
    write_json(path, {"name": name, "releases": [list(pair) for pair in counts.items()]})


def _read(path: Path) -> dict[float, int]:
    """Return noise multiplier -> number of releases."""
    if not path.exists():
        return {}
    try:
        return {float(z): int(n) for z, n in json.loads(path.read_text("utf-8"))["releases"]}
    except (ValueError, KeyError, TypeError) as error:
        log.error("%s cannot be read", path)
        raise ConfigError(f"the ledger of {MAX_EPSILON} is damaged; nothing was sent") from error


# ---- on the server
class Account(Callback):
    """Counts the releases of each client on the server.

    Args:
        noise: the noise settings of the run.

    Attributes:
        releases: client -> the releases that the server asked for, or the client's own count if it
            is larger.
    """

    name = "account"
    memory = ("releases",)
    accounts = True

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self.releases: dict[int, int] = {}

    def planned(self, loop: Loop, plan: list[Broadcast]) -> None:
        """Count the releases that each client is asked for, and send it the counts."""
        if loop.evaluating:
            return
        self._planned = planned_releases(loop.method)
        releases = releases_of(loop.method, loop.current.entry)
        for msg in plan:
            spent = self.releases.get(msg.pid, 0)
            self.releases[msg.pid] = spent + releases
            msg.extras = {**msg.extras, SPENT: spent, RELEASES: releases}

    def accepted(self, loop: Loop, update: Upload) -> None:
        """Use a client's own count if it is larger than the server's.

        A resumed run may repeat rounds that real clients have served already. The count is limited
        to the releases of the whole run.
        """
        count = update.metrics.pop(SPENT, 0)
        asked = self.releases.get(update.pid, 0)
        if not count > asked:
            return
        if count > self._planned:
            log.warning(
                "client %d reports %g releases; the whole run has only %d",
                update.pid,
                count,
                self._planned,
            )
        self.releases[update.pid] = max(asked, int(min(count, self._planned)))

    def step_ended(self, loop: Loop, row: Row) -> None:
        row["privacy"] = self._record()

    def ended(self, loop: Loop, status: str, error: BaseException | None) -> None:
        loop.notes["privacy"] = self._record()

    def _record(self) -> dict[str, Any]:
        noise = self._noise
        most = max(self.releases.values(), default=0)
        # The distance of two clipped values is up to twice the norm of one.
        replaced, spent = (
            epsilon(multiplier, noise.delta, most)
            for multiplier in (noise.multiplier / 2, noise.multiplier)
        )
        return {
            "epsilon_replaced": replaced,
            "epsilon": spent,
            "delta": noise.delta,
            "releases": most,
        }


def releases_of(strategy: FedStrategy, entry: TimetableEntry) -> int:
    """Return the number of releases in the reply to a step of this entry."""
    phase = entry.phase
    weights = bool(phase.slot and phase.uploads and strategy.sent(phase.slot))
    return weights + sum(map(releases_in, strategy.expected(entry).values()))


def planned_releases(strategy: FedStrategy) -> int:
    """Return the number of releases of a client that takes part in all steps of the run."""
    return sum(entry.rounds * releases_of(strategy, entry) for entry in strategy.timetable)


def check_run(strategy: FedStrategy) -> None:
    """Refuse a run that would exceed the budget, before it begins.

    Phases that may end early count with all of their rounds.

    Raises:
        ConfigError: it would; the message says after which round the budget is spent.
    """
    noise = strategy.workspace.noise
    if not noise or noise.budget is None:
        return
    spent: Counter[int] = Counter()
    number = 0
    planned = sum(entry.rounds for entry in strategy.timetable)
    for entry in strategy.timetable:
        releases = releases_of(strategy, entry)
        size = entry.phase.cohort, strategy.setup.share(entry.phase)
        for step in range(1, entry.rounds + 1):
            cohort = sample_cohort(strategy.sizes, *size, strategy.workspace.seed, entry.name, step)
            spent.update(dict.fromkeys(cohort, releases))
            after = epsilon(noise.multiplier, noise.delta, max(spent.values()))
            if after > noise.budget:
                raise ConfigError(
                    f"privacy.budget={noise.budget:g} is spent after {number} of the run's"
                    f" {planned} rounds: the next round would raise epsilon to {after:.4g}; use"
                    " fewer rounds or more noise"
                )
            number += 1
