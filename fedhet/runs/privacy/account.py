"""How much privacy has been spent, on the server and at a client (privacy.delta, privacy.budget).

Each kind of value in a reply is one release. A release is a Gaussian mechanism whose sensitivity is
the clipping norm, without amplification by sampling: the server sees who takes part.

Where its owner sets FEDHET_MAX_EPSILON, a machine also counts what it has released in all runs. A
run's own count is in the folder of the run that each message names. The server chooses that name,
so the owner's count is elsewhere, and is never removed. The server chooses the numbers of the
clients too, and so which part of a data set each of them is: a machine counts all of its clients
together, but for a site with data of its own, whose name its operator has chosen.
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
SPENT = "privacy.spent"  # extra down, and metric up: a client's releases so far
COUNT = "releases"
History = tuple[tuple[float, int], ...]  # (noise multiplier, number of releases) pairs


def composed(history: History, delta: float) -> float:
    """Return the epsilon of all of these releases together, by opacus' accountant.

    It composes Rényi divergences (Mironov 2017), and is an upper bound of the exact value.

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
        # The best order may lie beyond those that it tries: still a bound, only less tight.
        warnings.filterwarnings("ignore", "Optimal order", UserWarning)
        return float(accountant.get_epsilon(delta))


@cache
def epsilon(multiplier: float, delta: float, releases: int) -> float:
    """Return epsilon after so many releases with this noise multiplier, by opacus' accountant.

    Args:
        multiplier: the standard deviation of the noise over the sensitivity, > 0.
        delta: in (0, 1).
        releases: how many.
    """
    return composed(((multiplier, releases),), delta)


# ---- at a client
def release(client: FedClient, update: Upload, public: set[str]) -> None:
    """Turn a client's update into what may leave it: clipped, noised and counted.

    Args:
        client: the client.
        update: its update.
        public: the names of extras, and of tensors in them, that need no noise.

    Raises:
        ValueError: the update has something that noise cannot cover, the server does not account
            for all of it, or it would exceed the budget. Nothing may then be sent.
    """
    msg, noise = client.msg, client.workspace.noise
    content = Content.of(update, msg.weights, public)
    if content.releases > msg.integer(RELEASES):
        raise ConfigError(
            f"privacy.noise: the reply is {content.releases} releases, of which the server accounts"
            f" for {msg.integer(RELEASES)}: `expects` has to name each"
        )
    spent = _count_releases(client, content.releases)  # before anything leaves
    draw: Draw = unpredictable
    if client.workspace.simulated:
        draw = seeded(client.workspace.seed, msg.phase, msg.step, msg.pid)
    content.noised(noise, draw).write(update, msg.weights)
    update.metrics = {SPENT: spent}


def _count_releases(client: FedClient, releases: int) -> int:
    """Count the releases of a reply, which may then be sent; return the run's count so far.

    Raises:
        ValueError: they would exceed the run's budget, or what the machine's owner allows.
    """
    msg, noise = client.msg, client.workspace.noise
    # The numbers of clients are the run's choice, the name of a site is not.
    name = "this machine" if client.site_name is None else f"site {client.site_name!r}"
    # Of a simulated client, no two processes serve messages at a time, and its noise hides nothing.
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
        ValueError: it says what was spent, and what it would become.
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
    """A client's count of its releases, beside its states and independent of their versions."""
    stored = store.load(-1 - pid, 0)  # no client has a negative number
    return int(stored[COUNT]) if stored else 0


def write_spent(store: Store, pid: int, spent: int) -> None:
    """Write a client's count of its releases, which never becomes smaller."""
    if spent > spent_by(store, pid):
        store.save(-1 - pid, 0, {COUNT: torch.tensor([spent])}, ())


# ---- at a machine, in all runs
@contextmanager
def locked(name: str) -> Iterator[Path]:
    """Give the block the path of a ledger, and no other process at the same time.

    Args:
        name: of whom: a site with data of its own, or the machine.

    Raises:
        ValueError: the folder belongs to another user, or others may write to it.
    """
    path = own_folder("fedhet-privacy") / f"{sha256(name.encode()).hexdigest()[:16]}.json"
    with FileLock(path.with_suffix(".lock")):
        yield path


def spend(path: Path, name: str, multiplier: float, releases: int) -> None:
    """Write releases into a ledger; it does nothing where the owner has set no limit.

    Args:
        path: the ledger, which `locked` has given.
        name: as for `locked`.
        multiplier: the noise multiplier of the releases, > 0.
        releases: how many.

    Raises:
        ValueError: they would exceed what the owner allows, or the ledger cannot be read. Nothing
            may then be sent.
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
    """The numbers of releases by their noise multipliers."""
    if not path.exists():
        return {}
    try:
        return {float(z): int(n) for z, n in json.loads(path.read_text("utf-8"))["releases"]}
    except (ValueError, KeyError, TypeError) as error:
        log.error("%s cannot be read", path)
        raise ConfigError(f"the ledger of {MAX_EPSILON} is damaged; nothing was sent") from error


# ---- on the server
class Account(Callback):
    """What each client has been asked to release so far.

    Args:
        noise: the settings of the run.

    Attributes:
        releases: client -> its releases, or those that it says it has made if they are more.
    """

    name = "account"
    memory = ("releases",)
    accounts = True

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self.releases: dict[int, int] = {}

    def planned(self, loop: Loop, plan: list[Broadcast]) -> None:
        """Count the releases that each client is asked for, and tell it of that."""
        if loop.evaluating:
            return
        self._planned = planned_releases(loop.method)
        releases = releases_of(loop.method, loop.current.entry)
        for msg in plan:
            spent = self.releases.get(msg.pid, 0)
            self.releases[msg.pid] = spent + releases
            msg.extras = {**msg.extras, SPENT: spent, RELEASES: releases}

    def accepted(self, loop: Loop, update: Upload) -> None:
        """Take over a client's own count where it is larger.

        A run that goes on may repeat rounds that real clients have served already. No client is
        believed beyond the releases of the whole run.
        """
        count = update.metrics.pop(SPENT, 0)
        asked = self.releases.get(update.pid, 0)
        if not count > asked:
            return
        if count > self._planned:
            log.warning(
                "client %d says that it has made %g releases, and the whole run has %d",
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
        # Two clipped values are up to twice as far apart as one is from none.
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
    """How many releases the reply to a step of this entry is."""
    phase = entry.phase
    weights = bool(phase.slot and phase.uploads and strategy.sent(phase.slot))
    return weights + sum(map(releases_in, strategy.expected(entry).values()))


def planned_releases(strategy: FedStrategy) -> int:
    """How many releases a client makes in the run if it takes part in all of its steps."""
    return sum(entry.rounds * releases_of(strategy, entry) for entry in strategy.timetable)


def check_run(strategy: FedStrategy) -> None:
    """Refuse a run that would exceed the budget, before it begins.

    Phases that may end early count with all of their rounds.

    Raises:
        ConfigError: it says after which round the budget is spent.
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
                    f" {planned} rounds: the next would bring epsilon to {after:.4g}; use fewer"
                    " rounds or more noise"
                )
            number += 1
