"""`deploy node`: Flower's SuperNode with short rounds, which executes one app only.

All options, checks and messages are those of flower-supernode. Flower's loop looks for a message
every 3 s and for a reply every .5 s; here the pauses are a tenth and a fiftieth of the time that it
has waited, and never longer than Flower's. Its SuperExec starts a process for each message; here
the messages of a run have one process (client.py), which loads code and data once. And of a run
whose app is not the one that the site executes, nothing is unpacked.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from logging import ERROR
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import (
    ISOLATION_MODE_PROCESS,
    ISOLATION_MODE_SUBPROCESS,
    ErrorCode,
    Status,
)
from flwr.supercore import log
from flwr.supercore.address import resolve_bind_address
from flwr.supercore.tls import get_client_tls_args

from fedhet.cli.errors import Parser
from fedhet.deploy.flower import flower_module, without_docs
from fedhet.flower import code
from fedhet.process import end_with_parent

CLIENT = Path(__file__).with_name("client.py")
PAUSES = {3.0: 0.1, 0.5: 0.02}  # Flower's pause -> its share here of the time waited, 1 s at least
MOST_RUNS = 2  # that have a process
IDLE_SECONDS = 900.0  # without a message, after which processes end and give their memory back


class _OtherApp(Exception):
    """A run has another app than the site executes."""


class ServingNode:
    """Flower's loop with short pauses, a process for each run, and one app.

    Args:
        loop: Flower's module with the SuperNode's loop, of which some functions are replaced.
        app: the digest of the app that the site executes, or "any".
    """

    def __init__(self, loop: ModuleType, app: str) -> None:
        self._flower = SimpleNamespace(**vars(loop))
        self._app = app
        self._command: list[str] = []
        self._one_message = False
        self._since = time.monotonic()  # when the last message or reply was there
        self._clients: dict[int, subprocess.Popen[bytes]] = {}  # run -> its process; last used last
        vars(loop).update(
            time=SimpleNamespace(sleep=self._sleep),
            _pull_and_store_message=self._pull_and_store_message,
            _push_messages=self._push_messages,
        )

    def _sleep(self, seconds: float) -> None:
        waited = time.monotonic() - self._since
        time.sleep(min(seconds, PAUSES.get(float(seconds), 1.0) * max(1.0, waited)))

    # ---- in place of Flower's functions
    def start_client_internal(self, **settings: Any) -> None:
        """Run the loop, which starts no SuperExec."""
        tls = get_client_tls_args(
            insecure=settings["runtime_certificates"] is None,
            root_certificates_path=settings["runtime_root_certificates_path"],
        )
        address = resolve_bind_address(settings["runtime_api_address"])
        self._command = [sys.executable, "-P", str(CLIENT), "--runtime-api-address", address, *tls]
        if settings["runtime_dependency_install"]:  # they are removed after a message
            self._one_message = True
            self._command.append("--allow-runtime-dependency-installation")
        self._flower.start_client_internal(**settings | {"isolation": ISOLATION_MODE_PROCESS})

    def _pull_and_store_message(self, **given: Any) -> int | None:
        """Flower's, but a message of a run with another app is answered with an error."""
        received: list[Message] = []

        def receive() -> Any:
            found = given["receive"]()
            received.extend(found[:1] if found else ())
            return found

        def get_fab(fab_hash: str, run: int) -> Any:
            fab = given["get_fab"](fab_hash, run)
            found = hashlib.sha256(fab.content).hexdigest()
            if self._app not in (found, code.ANY):
                raise _OtherApp(
                    f"this site executes the app with the SHA-256 {self._app}, and not {found}; if"
                    " the site agrees to that code, `deploy code` writes it into its site.toml"
                )
            return fab

        try:
            run: int | None = self._flower._pull_and_store_message(
                **given | {"receive": receive, "get_fab": get_fab}
            )
        except _OtherApp as error:
            run = received[0].metadata.run_id
            log(ERROR, "[RUN %s] %s", run, error)
            reply = Message(Error(ErrorCode.INVALID_FAB, str(error)), reply_to=received[0])
            self._flower._insert_message(reply, given["state"], given["object_store"])
        if run is not None:
            self._since = time.monotonic()
        elif time.monotonic() > self._since + IDLE_SECONDS:
            self._end(*self._clients)
        return run

    def _push_messages(self, *, state: Any, **given: Any) -> None:
        """Have the message served that has arrived, and send the reply."""
        for task in state.get_tasks(statuses=[Status.PENDING]):
            if token := state.claim_task(task.task_id):
                self._serve(task.run_id, token)
        self._flower._push_messages(state=state, **given)
        self._since = time.monotonic()

    # ---- the processes
    def _serve(self, run: int, token: str) -> None:
        """Give a message to the process of its run, or to a new one."""
        client = self._clients.pop(run, None)
        try:
            if client is None or client.poll() is not None:
                client = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    bufsize=0,
                    preexec_fn=partial(end_with_parent, os.getpid()),
                )
            assert client.stdin
            client.stdin.write(f"{token}\n".encode())
        except OSError as error:  # Flower gives the message up, as one whose process has ended
            log(ERROR, "[RUN %s] no process can serve the message: %s", run, error)
            return
        self._clients[run] = client
        self._end(*([run] if self._one_message else list(self._clients)[:-MOST_RUNS]))

    def _end(self, *runs: int) -> None:
        """Let the processes of runs end after their messages."""
        for run in runs:
            stdin = self._clients.pop(run).stdin
            assert stdin
            stdin.close()


def main(options: Sequence[str]) -> None:
    """Run a SuperNode.

    Args:
        options: those of flower-supernode, and `--code`.

    Raises:
        ConfigError: it is not said which code is executed.
        RunFailed: this version of Flower has another SuperNode.
    """
    parser = Parser(
        "python -m fedhet deploy node",
        description="Run a SuperNode with short rounds; all other options are flower-supernode's.",
        allow_abbrev=False,
    )
    parser.add_argument("--code", required=True, help=f"executed: {code.ALLOWED}")
    parser.add_argument("--isolation", choices=[ISOLATION_MODE_SUBPROCESS], help="of Flower")
    args, others = parser.parse_known_args(options)
    code.checked("--code", args.code)
    loop = flower_module(
        "flwr.supernode.start_client_internal",
        _pull_and_store_message="state object_store node_config receive get_run get_fab pull_object"
        " confirm_message_received trusted_entities",
        _insert_message="msg state store",
        _push_messages="state object_store send push_object",
    )
    command = flower_module("flwr.supernode.cli.flower_supernode", flower_supernode="")
    flower_module(  # what client.py changes
        "flwr.supernode.runtime.run_clientapp",
        flwr_exit="code message event_type event_details emit_telemetry",
        install_from_fab="fab_file install_dir skip_prompt",
    )
    without_docs("flwr.supernode.main")
    vars(command)["start_client_internal"] = ServingNode(loop, args.code).start_client_internal
    sys.argv = [parser.prog, *others]
    command.flower_supernode()
