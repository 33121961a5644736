"""`deploy node`: what it changes in Flower's programs, without a SuperLink."""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.task_identity import TaskIdentity

from fedhet.core.errors import ConfigError, RunFailed, WriteError
from fedhet.deploy import link
from fedhet.deploy.node import executor, shape, superexec, supernode

SECONDS = 60  # on a busy machine; a quiet one needs a hundredth

STUB = """
import sys, time
from multiprocessing.connection import Connection
orders = Connection(int(sys.argv[1]))
while True:
    run, command, silent = orders.recv()
    if run == 13:
        sys.exit(1)
    orders.send("" if run != 12 else "no memory")
"""


def spec(**changes: Any) -> ExecutionSpec:
    given = {
        "task_type": TaskType.CLIENT_APP,
        "runtime_api_address": "127.0.0.1:1",
        "token": "secret",
        "insecure": False,
        "root_certificates_path": "/ca.crt",
        "runtime_dependency_install": False,
        "parent_pid": 5,
        "suppress_output": False,
        "task_id": 1,
    }
    return ExecutionSpec(**given | changes)


@pytest.fixture
def forking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[executor.ForkExecutor]:
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(executor, "ZYGOTE", tmp_path / "stub.py")
    started = executor.ForkExecutor()
    yield started
    started.close()
    started._process.wait(SECONDS)


def test_the_outcome_of_a_launch_is_true(forking: executor.ForkExecutor) -> None:
    assert forking.launch(spec()) == LaunchResult.accepted()
    forking.run_id = 12
    assert forking.launch(spec()) == LaunchResult.failed("no memory")
    forking.run_id = 13
    assert forking.launch(spec()).status == "unknown"
    forking.run_id = 1
    assert forking.launch(spec()) == LaunchResult.accepted()  # by another process
    forking._process.kill()
    forking._process.wait()
    assert forking.launch(spec()) == LaunchResult.accepted()


def test_a_client_gets_the_command_line_that_flower_would_write(tmp_path: Path) -> None:
    """Flower's own executor writes it, and its parser reads it."""
    from flwr.supernode.cli import flwr_clientapp

    parser = sys.modules[flwr_clientapp.__module__]._parse_args_run_flwr_clientapp()
    args = parser.parse_args(executor._command(spec())[1:])
    assert (args.runtime_api_address, args.token) == ("127.0.0.1:1", "secret")
    assert (args.insecure, args.root_certificates, args.parent_pid) == (False, "/ca.crt", 5)
    assert parser.parse_args(executor._command(spec(insecure=True))[1:]).insecure


@pytest.mark.parametrize(
    "changes", [{"runtime_dependency_install": True}, {"task_type": TaskType.SERVER_APP}]
)
def test_other_tasks_are_left_to_flower(
    forking: executor.ForkExecutor, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    started: list[str] = []
    monkeypatch.setattr(
        "flwr.supercore.superexec.executor.subprocess_executor.subprocess.Popen",
        lambda command, **_: started.append(command[0]),
    )
    forking.launch(spec(**changes))
    assert len(started) == 1


# ---- Flower's loops
def test_another_flower_is_refused_by_name() -> None:
    with pytest.raises(RunFailed, match=r"is not the one .* has no 'time.sleep\(4\)'"):
        shape.flower_module(
            "flwr.supernode.start_client_internal", start_client_internal=("time.sleep(4)",)
        )
    with pytest.raises(RunFailed, match="no_such_function"):
        shape.flower_module("flwr.supernode.start_client_internal", no_such_function=("x",))


def test_a_flower_with_other_clients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the first client of each run would fail."""
    module = "flwr.supernode.runtime.run_clientapp"
    monkeypatch.setattr(f"{module}.pull_task_input", lambda client: client)
    with pytest.raises(RunFailed, match=rf"{module}.pull_task_input has no 'return message, "):
        superexec.main()


@pytest.mark.parametrize("name", ["flwr.superlink.main", "flwr.supernode.main"])
def test_flowers_servers_do_not_describe_themselves(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "FastAPI", module.FastAPI)  # is put back

    def paths() -> set[str]:
        return {getattr(route, "path", "") for route in module.create_app().routes}

    assert {"/docs", "/openapi.json"} <= paths()
    shape.without_docs(name)
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


@pytest.mark.parametrize("options", [["--help"], ["--no-such-option"]])
def test_the_usage_names_the_command(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit):
        supernode.main(options)
    printed = "".join(capsys.readouterr())
    assert printed.startswith("usage: python -m fedhet deploy node ["), printed


def a_loop(pull: Any = None, insert: Any = None) -> Any:
    """What the node needs of Flower's module."""
    return SimpleNamespace(
        start_client_internal=None,
        _push_messages=None,
        _pull_and_store_message=pull,
        _insert_message=insert,
    )


@pytest.mark.parametrize("code", [[], ["--code=all"], [f"--code={'A' * 64}"]])
def test_a_node_does_not_start_unless_it_is_said_what_it_executes(
    code: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        supernode.main(["--insecure", *code])
    error = capsys.readouterr().err
    assert "--code" in error and (not code or "SHA-256" in error)


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
    supernode.Launcher(loop, hashlib.sha256(b"the app").hexdigest())
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


def test_a_superexec_that_has_just_ended_ends_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    def flwr_exit(code: int, message: str) -> None:
        raise Ended(message)

    ends = "import os, time; os.close(0); print(flush=True); time.sleep(.5); os._exit(3)"
    monkeypatch.setattr(supernode, "flwr_exit", flwr_exit)
    started = supernode.Launcher(a_loop(), "any")
    with subprocess.Popen(
        [sys.executable, "-c", ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout
        process.stdout.readline()
        started._superexec = process
        with pytest.raises(Ended, match="with code 3"):
            started._push_messages()


def test_pauses_grow_with_the_wait_up_to_those_of_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(round(seconds, 3))

    fake = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(supernode, "time", fake)
    clock = supernode.PauseClock(lambda: None)
    for _ in range(60):
        clock.sleep(3)
    assert slept[0] == 0.1
    assert slept == sorted(slept)
    assert slept[-1] == 3
    clock.sleep(0.5)
    assert slept[-1] == 0.02
    clock.sleep(3)
    assert slept[-1] == 0.1
    clock.sleep(7)
    assert slept[-1] == 7
