"""`deploy node`: what it changes in Flower's programs, without a SuperLink."""

from __future__ import annotations

import hashlib
import importlib
import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.supercore.exit.exit_handler import add_exit_handler
from flwr.supercore.task_identity import TaskIdentity

from fedhet.core.errors import ConfigError, RunFailed, WriteError
from fedhet.deploy import client, flower, link, node

SECONDS = 60  # on a busy machine; a quiet one needs a hundredth

# Writes its number and each token to the folder, and ends at "die".
STUB = """
import os, sys
for line in sys.stdin:
    with open(sys.argv[-1] + "/served", "a") as file:
        file.write(f"{os.getpid()} {line}")
    if line == "die\\n":
        sys.exit(1)
"""


def wait_for(ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := ready()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


class Serving:
    """A node whose processes note what they serve, and a state with the messages that are due."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "served"
        (folder / "stub.py").write_text(STUB)
        self.node = node.ServingNode(a_loop(push=lambda **_: None), "any")
        self.node._command = [sys.executable, str(folder / "stub.py"), str(folder)]

    def serve(self, run: int, token: str) -> int:
        """Have a message served; return the number of the process that has done it."""
        state = SimpleNamespace(
            get_tasks=lambda statuses: [SimpleNamespace(task_id=1, run_id=run)],
            claim_task=lambda task: token,
        )
        self.node._push_messages(state=state)

        def served() -> list[str]:
            lines = self._file.read_text().splitlines() if self._file.exists() else []
            return [line.split()[0] for line in lines if line.split()[1:] == [token]]

        return int(wait_for(served)[0])

    @property
    def processes(self) -> dict[int, int]:
        return {run: process.pid for run, process in self.node._clients.items()}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    began = Serving(tmp_path)
    yield began
    began.node._end(*began.processes)


def test_the_messages_of_a_run_have_one_process(serving: Serving) -> None:
    first = serving.serve(7, "a")
    assert serving.serve(7, "b") == first
    assert serving.serve(7, "die") == first
    process = serving.node._clients[7]
    process.wait(SECONDS)
    assert serving.serve(7, "c") != first


def test_runs_that_take_turns_keep_their_processes_and_a_third_ends_the_older_one(
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
    idle = {"receive": lambda: None, "get_fab": None}
    serving.node._pull_and_store_message(**idle)
    assert serving.processes
    monkeypatch.setattr(node, "IDLE_SECONDS", 0.0)
    serving.node._pull_and_store_message(**idle)
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


def test_clients_are_served_in_one_process_by_flowers_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The app is unpacked once, and the status of each message is reported."""
    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    done: list[Any] = []

    def install(content: bytes, skip_prompt: bool) -> Path:
        done.append(content)
        return Path()

    def flwr_clientapp() -> None:
        add_exit_handler(lambda: done.append(sys.argv[1:]))
        module.install_from_fab(b"app", skip_prompt=True)
        module.flwr_exit(code=0, event_type=None)

    monkeypatch.setattr(module, "install_from_fab", install)
    monkeypatch.setattr(module, "flwr_exit", module.flwr_exit)  # is put back
    monkeypatch.setattr(client, "flwr_clientapp", flwr_clientapp)
    monkeypatch.setattr(sys, "argv", ["client.py", "--insecure"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    before = {one: signal.getsignal(one) for one in signal.Signals}
    try:
        client.main()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, before[number])
    tokens = [["--insecure", "--token", token] for token in ("one", "two")]
    assert done == [b"app", *tokens]


# ---- Flower's loops
def test_another_flower_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "flwr.supernode.start_client_internal"
    with pytest.raises(RunFailed, match=r"_insert_message takes msg state store, and not msg;"):
        flower.flower_module(name, _insert_message="msg")
    with pytest.raises(RunFailed, match="no_such_function takes nothing"):
        flower.flower_module(name, no_such_function="x")
    monkeypatch.setattr(flower, "package_version", "1.410.0")
    with pytest.raises(RunFailed, match=r"flwr 1.410.0 is not the one .* write node = "):
        node.main(["--code=any"])


@pytest.mark.parametrize("name", ["flwr.superlink.main", "flwr.supernode.main"])
def test_flowers_servers_do_not_describe_themselves(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "FastAPI", module.FastAPI)  # is put back

    def paths() -> set[str]:
        return {getattr(route, "path", "") for route in module.create_app().routes}

    assert {"/docs", "/openapi.json"} <= paths()
    flower.without_docs(name)
    assert not {"/docs", "/openapi.json"} & paths()


def test_the_superlink_starts_in_its_folder_with_flowers_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("flwr.superlink.main")
    monkeypatch.setattr(module, "FastAPI", module.FastAPI)  # these are put back
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("FLWR_DISABLE_UPDATE_CHECK", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir()
    with pytest.raises(SystemExit):
        link.main([str(tmp_path / "state"), "--help"])
    assert Path.cwd() == tmp_path / "state" and "--enable-supernode-auth" in capsys.readouterr().out
    for wrong in ([], ["no such folder", "--help"]):
        with pytest.raises((ConfigError, WriteError), match="folder"):
            link.main(wrong)


@pytest.mark.parametrize("options", [["--help"], ["--code=any", "--port=x"]])
def test_the_usage_names_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setenv("FLWR_DISABLE_UPDATE_CHECK", "1")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setattr(sys, "argv", [])  # these are put back
    for name in CHANGED:
        module = importlib.import_module(name)
        for key in CHANGED[name]:
            monkeypatch.setattr(module, key, getattr(module, key))
    with pytest.raises(SystemExit):
        node.main(options)
    printed = "".join(capsys.readouterr())
    assert "usage: python -m fedhet deploy node [" in printed, printed


CHANGED = {
    "flwr.supernode.start_client_internal": ("time", "_pull_and_store_message", "_push_messages"),
    "flwr.supernode.cli.flower_supernode": ("start_client_internal",),
    "flwr.supernode.main": ("FastAPI",),
}


def a_loop(pull: Any = lambda **_: None, insert: Any = None, push: Any = None) -> Any:
    """What the node needs of Flower's module."""
    return SimpleNamespace(
        _push_messages=push, _pull_and_store_message=pull, _insert_message=insert
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "required: --code; see python -m fedhet deploy node --help"),
        (["--code=all"], "--code='all': .* SHA-256"),
        ([f"--code={'A' * 64}"], "--code='AAAA.* SHA-256"),
        (["--code=any", "--isolation=process"], "--isolation: invalid choice: 'process'"),
    ],
)
def test_a_node_does_not_start_unless_it_is_said_what_it_executes(
    options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        node.main(["--insecure", *options])


@pytest.mark.parametrize("app", [b"the app", b"another app"])
def test_an_app_of_another_digest_reaches_nothing(
    app: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's loop gets it from `get_fab`, and unpacks it afterwards."""
    with monkeypatch.context() as server:  # a SuperNode has no such identity
        for name in ("_task_id", "_run_id", "_node_id"):
            server.setattr(TaskIdentity, name, 12)
        message = Message(RecordDict(), 7, "train", group_id="1")
    vars(message.metadata)["_message_id"] = "m"
    replies: list[Message] = []
    unpacked: list[bytes] = []

    def pull(receive: Any, get_fab: Any, **_: Any) -> int | None:
        if receive() is None:
            return None
        unpacked.append(get_fab("claimed", 12).content)
        return 12

    loop = a_loop(pull, lambda reply, *_: replies.append(reply))
    node.ServingNode(loop, hashlib.sha256(b"the app").hexdigest())
    given = {
        "receive": lambda: (message, "tree"),
        "get_fab": lambda *_: SimpleNamespace(content=app),
        "state": None,
        "object_store": None,
    }
    assert loop._pull_and_store_message(**given) == 12
    assert loop._pull_and_store_message(**given | {"receive": lambda: None}) is None
    if app == b"the app":
        assert (unpacked, replies) == ([app], [])
    else:
        (reply,) = replies
        assert not unpacked and hashlib.sha256(app).hexdigest() in reply.error.reason
        assert reply.metadata.reply_to_message_id == "m"


def test_pauses_grow_with_the_wait_up_to_those_of_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(round(seconds, 3))

    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    loop = a_loop(lambda **_: 12, push=lambda **_: None)
    node.ServingNode(loop, "any")
    for _ in range(60):
        loop.time.sleep(3)
    assert slept[0] == 0.1
    assert slept == sorted(slept)
    assert slept[-1] == 3
    loop._pull_and_store_message(receive=None, get_fab=None)  # a message
    loop.time.sleep(0.5)
    assert slept[-1] == 0.02
    now += 10
    loop._push_messages(state=SimpleNamespace(get_tasks=lambda statuses: []))
    loop.time.sleep(3)
    assert slept[-1] == 0.1
    loop.time.sleep(7)
    assert slept[-1] == 1
