"""FEDHET_MAX_EPSILON: what a machine releases in all runs, whatever a server names them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import composing
import pytest

from fedhet.core.groups import Noise
from fedhet.core.messages import Failure, Reply
from fedhet.core.server.loop import Loop
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.runs.job import Job
from fedhet.runs.privacy.account import Account, composed, epsilon, locked, spend
from fedhet.runs.stores import state_folder, store_at_site

Federation = Callable[..., Any]
DELTA = 1e-5


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The state folder of a machine whose owner allows three releases with a multiplier of 1."""
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("FEDHET_MAX_EPSILON", str(epsilon(1.0, DELTA, 3)))
    return tmp_path


class Machine:
    """A node whose server chooses the run_id, the noise and the number of a site."""

    def __init__(self, federation: Federation, site: str | None = None) -> None:
        self._federation, self._site = federation, site

    def serve(self, run_id: str, multiplier: float = 1.0, pid: int = 0) -> Reply:
        run = self._federation(toy_task(), FedAvg, noise=Noise(multiplier, budget=1e6))
        run.workspace.simulated = False
        client = run.client()
        client.store, client.site_name = store_at_site, self._site
        (msg,) = [msg for msg in run.plan() if msg.pid == pid]
        return client.handle(replace(msg, run_id=run_id))


def refused(reply: Reply) -> bool:
    if not isinstance(reply, Failure):
        return False
    assert re.search(r"FEDHET_MAX_EPSILON=.* and this reply .* nothing was sent", reply.cause)
    return True


def test_a_server_that_renames_its_run_gets_no_more(federation: Federation) -> None:
    machine = Machine(federation)
    assert [refused(machine.serve(f"e{k}")) for k in range(5)] == [False] * 3 + [True] * 2
    assert refused(machine.serve("e9", pid=1))


def test_a_server_that_numbers_its_clients_anew_gets_no_more() -> None:
    """Which part of a data set a client is follows from settings, which the server chooses."""
    served = []
    for seed in range(3):
        lines = [f"partition.clients={5 + seed}", f"seed={seed}", "eval.clients=false", "rounds=1"]
        budget = f"privacy.budget={epsilon(1.0, DELTA, 3)}"
        settings = composing.composed("method=fedavg", "privacy.noise=1", budget, *lines)
        job = Job(settings, engine="flwr")
        step = job.strategy.plan(1)
        Loop(job.strategy, [Account(job.workspace.noise)]).begin(step)
        plan = step.messages
        for msg in plan[seed : seed + 2]:
            client = job.client(store_at_site, {"partition-id": 0, "num-partitions": 1})
            served.append(not refused(client.handle(msg)))
    assert served == [True] * 3 + [False] * 3


def test_a_site_is_itself_under_any_number(federation: Federation) -> None:
    machine = Machine(federation, site="ward a")
    assert [refused(machine.serve("e", pid=pid)) for pid in range(4)] == [False] * 3 + [True]
    assert not refused(Machine(federation, site="ward b").serve("e"))


def test_the_ledger_outlives_the_states_of_a_run(federation: Federation, folder: Path) -> None:
    machine = Machine(federation)
    for _ in range(3):
        machine.serve("old")
    os.utime(state_folder("old") / ".fedhet", (0, 0))
    state_folder("new")
    assert not (folder / "fedhet-state" / "old").exists()
    assert refused(machine.serve("new"))


def test_runs_with_other_noise_are_composed(federation: Federation) -> None:
    machine = Machine(federation)
    assert not refused(machine.serve("a"))
    assert refused(machine.serve("b", multiplier=0.5))  # four releases with twice the noise
    assert not refused(machine.serve("b", multiplier=2.0))
    assert composed(((1.0, 1), (0.5, 1)), DELTA) == pytest.approx(epsilon(1.0, DELTA, 5))


def test_a_damaged_ledger_sends_nothing(federation: Federation, folder: Path) -> None:
    machine = Machine(federation)
    machine.serve("a")
    (path,) = (folder / "fedhet-privacy").glob("*.json")
    path.write_text('{"releases": 3}')
    reply = machine.serve("a")
    assert isinstance(reply, Failure) and "is damaged; nothing was sent" in reply.cause


def test_messages_at_the_same_time_are_all_counted(folder: Path) -> None:
    def release(_: int) -> bool:
        try:
            with locked("this machine") as path:
                spend(path, "this machine", 1.0, 1)
        except ValueError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(release, range(8))) == 3


def test_a_process_that_dies_in_between_has_counted_too_much(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the owner's ledger and before the run's own, or before anything is sent."""

    def dies(*args: object) -> None:
        raise KeyboardInterrupt

    machine = Machine(federation)
    for place in ("fedhet.runs.privacy.account.write_spent", "fedhet.core.noise.mechanism"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(place, dies)
            machine.serve("a")
    assert [refused(machine.serve("a")) for _ in range(2)] == [False, True]
