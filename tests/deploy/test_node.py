"""`deploy node`: what it changes in Flower's programs, without a SuperLink."""

from __future__ import annotations

import hashlib
import importlib
import io
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import fastapi
import pytest

from fedhet.core.errors import ConfigError, RunFailed, WriteError
from fedhet.deploy import app_process, node
from fedhet.flower import private

SECONDS = 60  # on a busy machine; a quiet one needs a hundredth

# Writes its number and each token to the folder, and ends at "die".
STUB = """
import os, sys
for line in sys.stdin:
    with open(sys.argv[-1] + "/served", "a") as file:
        file.write(f"{os.getpid()} {line}")
    with open(sys.argv[-1] + "/homes", "a") as file:
        file.write(os.environ["FLWR_HOME"] + "\\n")
    if line == "die\\n":
        sys.exit(1)
"""


def wait_for(ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := ready()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


IDLE = SimpleNamespace(get_tasks=lambda statuses: [])


def a_start(config: Any = None) -> Any:
    """A function whose module has the names that the node replaces."""
    loop = {"time": time, "get_fused_config_from_fab": config}
    return FunctionType((lambda **_: None).__code__, loop)


class Serving:
    """A node whose processes note what they serve, and a state with the messages that are due."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "served"
        (folder / "stub.py").write_text(STUB)
        self.node = node.ServingNode(a_start(lambda fab_file, run: {}), "any")
        self.node._command = [sys.executable, str(folder / "stub.py"), str(folder)]

    def serve(self, run: int, token: str) -> int:
        """Have a message served; return the number of the process that has done it."""
        self.node._state = SimpleNamespace(
            get_tasks=lambda statuses: [SimpleNamespace(task_id=1, run_id=run)],
            claim_task=lambda task_id: token,
        )
        self.node._sleep(0.5)
        self.node._state = IDLE

        def served() -> list[str]:
            lines = self._file.read_text().splitlines() if self._file.exists() else []
            return [line.split()[0] for line in lines if line.split()[1:] == [token]]

        return int(wait_for(served)[0])

    @property
    def processes(self) -> dict[int, int]:
        return {run: process.pid for run, process in self.node._clients.items()}


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    began = Serving(tmp_path)
    yield began
    began.node._end(*began.processes)


def test_the_process_of_another_app_has_none_that_was_unpacked_earlier(
    serving: Serving, tmp_path: Path
) -> None:
    """Should Flower one day unpack an app only where it is not there yet."""
    known = hashlib.sha256(b"app").hexdigest()
    serving.node._app = known
    for run, app in ((7, b"app"), (8, b"another")):
        serving.node._config_of(app, SimpleNamespace(run_id=run))
        serving.serve(run, "a")
    homes = tmp_path / "homes"
    wait_for(lambda: homes.exists() and len(homes.read_text().splitlines()) == 2)
    assert homes.read_text().splitlines() == [str(tmp_path), os.devnull]


def test_the_messages_of_a_run_have_one_process(serving: Serving) -> None:
    first = serving.serve(7, "a")
    assert serving.serve(7, "b") == first
    assert serving.serve(7, "die") == first
    process = serving.node._clients[7]
    process.wait(SECONDS)
    assert serving.serve(7, "c") != first


def test_two_runs_at_once_keep_their_processes_and_a_third_ends_the_older_one(
    serving: Serving,
) -> None:
    seven, eight = serving.serve(7, "a"), serving.serve(8, "b")
    assert (serving.serve(7, "c"), serving.serve(8, "d")) == (seven, eight)
    ended = serving.node._clients[7]
    nine = serving.serve(9, "e")
    assert ended.wait(SECONDS) == 0
    assert serving.processes == {8: eight, 9: nine}


def test_a_process_that_is_idle_gives_its_memory_back(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.serve(7, "a")
    process = serving.node._clients[7]
    monkeypatch.setattr(node.time, "sleep", lambda seconds: None)
    for pause in (3, 3):
        serving.node._sleep(pause)
    assert serving.processes
    monkeypatch.setattr(node, "IDLE_SECONDS", 0.0)
    serving.node._sleep(3)
    assert not serving.processes and process.wait(SECONDS) == 0


def test_a_process_with_dependencies_of_its_own_ends_after_a_message(serving: Serving) -> None:
    """Flower installs them for each message, and removes them."""
    serving.node._one_message = True
    assert serving.serve(7, "a") != serving.serve(7, "b")
    assert not serving.processes


def test_a_process_that_cannot_be_started_costs_the_message(serving: Serving) -> None:
    serving.node._command = ["/no/such/program"]
    serving.node._serve(7, "a")
    assert not serving.processes


class Clientapp:
    """`flwr-clientapp`, which takes Flower's names for the app and the end, and notes what is done.

    Args:
        content: the archive of the app that each message is for.
    """

    def __init__(self, content: bytes) -> None:
        self.done: list[Any] = []
        self._handlers: list[Callable[[], None]] = []

        def trigger_exit_handlers(run_before_force_exit: bool) -> None:
            while self._handlers and not run_before_force_exit:
                self._handlers.pop()()

        def install_from_fab(fab_file: bytes, skip_prompt: bool) -> None:
            self.done.append(fab_file)

        def flwr_clientapp() -> None:
            self._handlers.append(lambda: self.done.append(sys.argv[1:]))
            try:
                module["install_from_fab"](content, skip_prompt=True)
            except Exception as error:  # noqa: BLE001 -- as Flower does, to tell the server
                self.done.append(str(error))
            module["flwr_exit"](code=0, event_type=None)

        exits = {"trigger_exit_handlers": trigger_exit_handlers}
        module = {
            "install_from_fab": install_from_fab,
            "flwr_exit": FunctionType((lambda: None).__code__, exits),
        }
        run_clientapp = FunctionType((lambda: None).__code__, module)
        code, closure = flwr_clientapp.__code__, flwr_clientapp.__closure__
        names = {**globals(), "run_clientapp": run_clientapp}
        self.load = lambda: FunctionType(code, names, closure=closure)


def served(flower: Clientapp, digest: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is done of two messages in a process that executes the app of a digest."""
    monkeypatch.setattr(app_process, "entry_points", lambda **_: [flower])
    monkeypatch.setattr(sys, "argv", ["client.py", digest, "--insecure"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    before = {one: signal.getsignal(one) for one in signal.Signals}
    try:
        app_process.main()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, before[number])
    return flower.done


TWO = [["--insecure", "--token", token] for token in ("one", "two")]
APP = b"the app"


@pytest.mark.parametrize("digest", ["any", hashlib.sha256(APP).hexdigest()])
def test_clients_are_served_in_one_process_by_flowers_own_code(
    monkeypatch: pytest.MonkeyPatch, digest: str
) -> None:
    """The app is unpacked once, and the status of each message is reported."""
    assert served(Clientapp(APP), digest, monkeypatch) == [APP, *TWO]


# ---- Flower's loops
@pytest.fixture(autouse=True)
def _put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is changed in Flower's modules and in this process."""
    flowers = private.command("flower-supernode").__globals__
    loop = private.private(private.START).__globals__
    for variables, name in (
        (flowers, "start_client_internal"),
        (loop, "time"),
        (loop, "get_fused_config_from_fab"),
    ):
        monkeypatch.setitem(variables, name, variables[name])
    monkeypatch.setattr(fastapi.FastAPI, "__init__", fastapi.FastAPI.__init__)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("FLWR_DISABLE_UPDATE_CHECK", "1")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")


SUPERNODE = """
def flower_supernode():
    began.append((list(sys.argv), start_client_internal))
"""


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Any]]:
    """The command lines with which Flower's SuperNode starts here, and its loop."""
    start, found, command = private.private(private.START), [], private.command
    module = {"sys": sys, "began": found, "start_client_internal": start}
    exec(SUPERNODE, module)
    made = {"flower-supernode": module["flower_supernode"]}
    monkeypatch.setattr(private, "command", lambda name: made.get(name) or command(name))
    return found


@pytest.mark.parametrize("name", private.OF_NODES)
def test_without_a_name_of_flower_its_own_supernode_serves_where_any_code_may(
    name: str,
    began: list[tuple[list[str], Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start = private.private(private.START)
    monkeypatch.setitem(private.NAMES, name, "colour")
    with pytest.raises(RunFailed, match=rf"Flower's {name} .*colour, .*flwr \d"):
        node.node([f"--code={'a' * 64}", "--insecure"])
    assert not began
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    node.node(["--code=any", "--isolation=subprocess", "--insecure"])
    assert began == [(["python -m fedhet deploy node", "--insecure"], start)]
    assert (
        f"Flower's own SuperNode starts; its rounds take longer: fedhet needs Flower's {name}"
        in (caplog.text)
    )


def test_with_all_names_of_flower_the_loop_is_replaced(
    began: list[tuple[list[str], Any]],
) -> None:
    node.node(["--code=any", "--port=9"])
    ((line, start),) = began
    assert line == ["python -m fedhet deploy node", "--port=9"]
    assert isinstance(start.__self__, node.ServingNode)


@pytest.mark.parametrize("name", ["flwr.superlink.main", "flwr.supernode.main"])
def test_flowers_servers_do_not_describe_themselves(name: str) -> None:
    module = importlib.import_module(name)

    def paths() -> set[str]:
        return {getattr(route, "path", "") for route in module.create_app().routes}

    assert {"/docs", "/openapi.json"} <= paths()
    private.without_docs()
    assert not {"/docs", "/openapi.json"} & paths()


def test_the_superlink_starts_in_its_folder_with_flowers_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir()
    with pytest.raises(SystemExit):
        node.link([str(tmp_path / "state"), "--help"])
    assert Path.cwd() == tmp_path / "state" and "--enable-supernode-auth" in capsys.readouterr().out
    for wrong in ([], ["no such folder", "--help"]):
        with pytest.raises((ConfigError, WriteError), match="folder"):
            node.link(wrong)


@pytest.mark.parametrize("options", [["--help"], ["--code=any", "--port=x"]])
def test_the_usage_names_the_command(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit):
        node.node(options)
    printed = "".join(capsys.readouterr())
    assert "usage: python -m fedhet deploy node [" in printed, printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "required: --code; see python -m fedhet deploy node --help"),
        (["--code=all"], "--code='all': .*SHA-256"),
        ([f"--code={'A' * 64}"], "--code='AAAA.* SHA-256"),
        (["--code=any", "--isolation=process"], "--isolation: invalid choice: 'process'"),
    ],
)
def test_a_node_does_not_start_unless_it_is_said_what_it_executes(
    options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        node.node(["--insecure", *options])


@pytest.mark.parametrize("app", [APP, b"another app"])
def test_an_app_of_another_digest_reaches_nothing(
    app: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is it unpacked, nor are its settings read; and the server learns why."""
    read: list[bytes] = []

    def config(fab_file: bytes, run: Any) -> dict[str, int]:
        read.append(fab_file)
        return {"a": 1}

    digest, found = (hashlib.sha256(one).hexdigest() for one in (APP, app))
    start = a_start(config)
    node.ServingNode(start, digest)
    run = SimpleNamespace(run_id=12)
    settings = start.__globals__["get_fused_config_from_fab"](app, run)
    assert (read, settings) == (([app], {"a": 1}) if app == APP else ([], {}))
    said, *done = served(Clientapp(app), digest, monkeypatch)
    if app == APP:
        assert (said, done) == (app, TWO)
    else:
        assert re.search(f"executes the app with the SHA-256 {digest}, and not {found};", said)
        assert done == [TWO[0], said, TWO[1]]


def test_pauses_grow_with_the_wait_up_to_those_of_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(round(seconds, 3))

    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    start, served = a_start(), []
    serving = node.ServingNode(start, "any")
    pause = start.__globals__["time"].sleep
    monkeypatch.setattr(serving, "_serve", lambda run, token: served.append(token))
    serving._state = IDLE
    for _ in range(60):
        pause(3)
    assert slept[0] == 0.1
    assert slept == sorted(slept)
    assert slept[-1] == 3
    arrived = [SimpleNamespace(task_id=1, run_id=7), SimpleNamespace(task_id=2, run_id=7)]
    tokens = {1: "a"}  # the other one is somebody else's
    for _ in range(2):  # Flower waits for a reply, at once for the next, and for a message
        serving._state = SimpleNamespace(get_tasks=lambda statuses: arrived, claim_task=tokens.get)
        pause(0.5)
        assert slept[-1] == 0.02
        serving._state = IDLE
        now += 10
        pause(0.5)
        assert slept[-1] == 0.2
    assert served == ["a", "a"]
    pause(3)
    assert slept[-1] == 0.1
    pause(7)
    assert slept[-1] == 1
