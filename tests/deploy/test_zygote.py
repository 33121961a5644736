"""`deploy node`: how its processes fork, without a SuperLink."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fedhet.deploy.node import forked_client, forker, zygote

SECONDS = 60  # on a busy machine; a quiet one needs a hundredth
APP = """
import os, pathlib, threading, time, traceback
here = pathlib.Path(__file__).parent
def prepare(context):
    if (here / "broken").exists():
        raise OSError("the disk is full")
    if (here / "threads").exists():  # what decodes here starts a thread
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        if (here / "cache").exists():
            (here / "threads").unlink()
    if "_decode" in {frame.name for frame in traceback.extract_stack()}:
        return
    with (here / "prepared").open("a") as file:
        file.write(f"{os.getpid()} {context.run_id}\\n")
app = None
"""

PROJECT = """
[project]
name = "warm"
version = "1.0.0"
license = "MIT"
[tool.flwr.app]
publisher = "me"
[tool.flwr.app.components]
serverapp = "warm_app:app"
clientapp = "warm_app:app"
"""


def wait_for(ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := ready()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


class Running:
    """A zygote in another process, whose clients leave a file and then wait for its removal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warned = folder / "warned"
        (folder / "app").mkdir()
        (folder / "app" / "warm_app.py").write_text(APP)
        (folder / "app" / "pyproject.toml").write_text(PROJECT)
        self.orders, there = Pipe()
        self.process = get_context("fork").Process(target=self.serve, args=(there,))
        self.process.start()
        there.close()

    def serve(self, there: Connection) -> None:
        self.orders.close()
        zygote.forked_client.serve = self.client
        zygote._warn = lambda text, *values: self.warned.write_text(text % values)
        zygote.ClientZygote(there, os.getppid()).serve()

    def client(self, order: forker.Order, report: Connection | None, superexec: int) -> None:
        run, (name,), _ = order
        path = self.folder / name
        path.write_text(json.dumps([os.getpid(), os.getppid()]))
        if report:
            report.send((SimpleNamespace(run_id=run), self.folder / "app", ""))
            report.close()
        while path.exists():
            time.sleep(0.01)

    def launch(self, run: int, name: str) -> tuple[int, int]:
        """Have a client started; return its process id and that of its parent."""
        self.orders.send((run, [name], False))
        assert self.orders.recv() == ""
        path = self.folder / name
        pid, parent = json.loads(wait_for(lambda: path.exists() and path.read_text()))
        return pid, parent

    def prepared(self) -> list[list[int]]:
        """The process id and the run of each template that was prepared."""
        path = self.folder / "app" / "prepared"
        lines = path.read_text().splitlines() if path.exists() else []
        return [[int(word) for word in line.split()] for line in lines]

    def launch_until(self, run: int, parent: Callable[[int], bool]) -> int:
        """Have clients started until one has such a parent, which is returned."""
        for number in range(200):
            _, found = self.launch(run, f"{run}-{number}")
            (self.folder / f"{run}-{number}").unlink()
            if parent(found):
                return found
            time.sleep(0.1)
        raise AssertionError("no client has such a parent")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    began = Running(tmp_path)
    yield began
    for path in tmp_path.iterdir():
        if path.is_file():
            path.unlink()
    began.orders.close()
    began.process.join(SECONDS)
    assert began.process.exitcode == 0


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_run_is_prepared_once_and_its_later_clients_begin_with_that(running: Running) -> None:
    first, parent = running.launch(7, "first")
    assert parent == running.process.pid
    template = running.launch_until(7, lambda parent: parent != running.process.pid)
    assert running.prepared() == [[template, 7]]
    assert running.launch(7, "later")[1] == template
    assert running.prepared() == [[template, 7]]
    assert not gone(first)


def test_another_run_begins_without_what_the_run_before_has_loaded(running: Running) -> None:
    running.launch(7, "first")
    template = running.launch_until(7, lambda parent: parent != running.process.pid)
    slow, _ = running.launch(7, "slow")
    assert running.launch(8, "other")[1] == running.process.pid
    other = running.launch_until(8, lambda parent: parent != running.process.pid)
    assert other != template
    assert running.prepared() == [[template, 7], [other, 8]]
    assert not gone(slow)  # a client of the run before goes on
    (running.folder / "slow").unlink()
    wait_for(lambda: gone(template))


def test_what_cannot_be_prepared_is_left_to_the_clients(running: Running) -> None:
    (running.folder / "app" / "broken").touch()
    running.launch(7, "first")
    said = wait_for(lambda: running.warned.exists() and running.warned.read_text())
    assert "Run 7 has no template" in said
    assert "OSError: the disk is full" in said
    for name in ("second", "third"):
        assert running.launch(7, name)[1] == running.process.pid
    assert running.prepared() == []


def test_what_only_decodes_with_threads_is_prepared_without_them(running: Running) -> None:
    for name in ("threads", "cache"):
        (running.folder / "app" / name).touch()
    running.launch(7, "first")
    template = running.launch_until(7, lambda parent: parent != running.process.pid)
    assert not (running.folder / "app" / "threads").exists()
    assert running.prepared() == [[template, 7]]


def test_a_process_with_threads_forks_no_clients(running: Running) -> None:
    (running.folder / "app" / "threads").touch()
    running.launch(7, "first")
    said = wait_for(lambda: running.warned.exists() and running.warned.read_text())
    assert "the app has started threads (1)" in said
    assert running.launch(7, "second")[1] == running.process.pid


@pytest.mark.slow
def test_runs_that_take_turns_do_not_take_the_template_from_each_other(running: Running) -> None:
    running.launch(7, "first")
    running.launch_until(7, lambda parent: parent != running.process.pid)
    running.launch(8, "other")  # a new run takes it
    template = running.launch_until(8, lambda parent: parent != running.process.pid)
    for turn in range(3):
        assert running.launch(7, f"7 in turn {turn}")[1] == running.process.pid
        assert running.launch(8, f"8 in turn {turn}")[1] == template
    assert len(running.prepared()) == 2
    running.launch_until(7, lambda parent: parent not in (running.process.pid, template))
    wait_for(lambda: len(running.prepared()) == 3)  # the run that is alone again


@pytest.mark.parametrize("problem", [None, OSError("the disk is full")])
def test_a_template_that_nobody_waits_for_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, problem: Exception | None
) -> None:
    def prepare(*told: Any) -> None:
        if problem:
            raise problem

    monkeypatch.setattr(forked_client, "prepare", prepare)
    monkeypatch.setattr(forked_client, "keep_installed", lambda folder, digest: None)
    monkeypatch.setattr(zygote.gc, "freeze", lambda: None)
    here, there = Pipe()
    here.close()
    with there:
        zygote._template(there, os.getppid(), (None, None, ""))


def test_a_template_that_is_killed_costs_nothing_but_time(running: Running) -> None:
    running.launch(7, "first")
    template = running.launch_until(7, lambda parent: parent != running.process.pid)
    child, _ = running.launch(7, "child")
    os.kill(template, signal.SIGKILL)
    assert running.launch(7, "next")[1] == running.process.pid
    assert not gone(child)


def test_processes_that_have_ended_are_no_zombies(running: Running) -> None:
    running.launch(7, "first")
    template = running.launch_until(7, lambda parent: parent != running.process.pid)
    killed, _ = running.launch(7, "killed")
    os.kill(killed, signal.SIGKILL)
    (running.folder / "first").unlink()
    wait_for(lambda: not psutil.pid_exists(killed))
    top = psutil.Process(running.process.pid)
    wait_for(lambda: [child.pid for child in top.children(recursive=True)] == [template])
