"""`deploy node`: Flower's SuperNode, which looks for messages more often and starts clients faster.

All options, checks and messages are those of flower-supernode. Its loop looks for a message every
3 s and for a reply every .5 s; here the pauses are a tenth and a fiftieth of the time that it has
waited, and never longer than Flower's. Its SuperExec is that of superexec.py. And of a run whose
app is not the one that the site executes, nothing is unpacked.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from logging import ERROR
from types import ModuleType
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ISOLATION_MODE_PROCESS, ErrorCode
from flwr.supercore import log
from flwr.supercore.address import resolve_bind_address
from flwr.supercore.exit import ExitCode, flwr_exit
from flwr.supercore.tls import get_client_tls_args

from fedhet.core.errors import ConfigError
from fedhet.deploy.node.shape import flower_module, without_docs
from fedhet.flower import code

# Flower's pause -> (the shortest one here, its share of the time waited so far).
PAUSES = {3.0: (0.1, 0.1), 0.5: (0.02, 0.02)}


class PauseClock:
    """The module `time` for Flower's loop, with shorter pauses.

    Args:
        check: is called before each pause.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._kind = 0.0
        self._since = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep for a part of the time that this kind of waiting has lasted."""
        self._check()
        if seconds != self._kind:
            self._kind, self._since = seconds, time.monotonic()
        least, share = PAUSES.get(float(seconds), (seconds, 0.0))
        time.sleep(min(seconds, max(least, share * (time.monotonic() - self._since))))


class _OtherApp(Exception):
    """A run has another app than the site executes."""


class Launcher:
    """Starts the SuperExec, and wakes it for each message of an app that the site executes.

    Args:
        loop: Flower's module with the SuperNode's loop.
        app: the digest of the app that the site executes, or "any".
    """

    def __init__(self, loop: ModuleType, app: str) -> None:
        self._start = loop.start_client_internal
        self._pull = loop._pull_and_store_message
        self._insert = loop._insert_message
        self._push = loop._push_messages
        self._app = app
        self._superexec: subprocess.Popen[bytes]
        vars(loop).update(time=PauseClock(self._check), _push_messages=self._push_messages)
        if app != code.ANY:
            vars(loop).update(_pull_and_store_message=self._pull_and_store_message)

    def start_client_internal(self, **settings: Any) -> None:
        """Takes the place of Flower's function of this name."""
        command = [
            *(sys.executable, "-m", "fedhet.deploy.node.superexec"),
            *get_client_tls_args(
                insecure=settings["runtime_certificates"] is None,
                root_certificates_path=settings["runtime_root_certificates_path"],
            ),
            *("--runtime-api-address", resolve_bind_address(settings["runtime_api_address"])),
            *("--parent-pid", str(os.getpid())),
        ]
        if settings["runtime_dependency_install"]:
            command.append("--allow-runtime-dependency-installation")
        self._superexec = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        # Our SuperExec is a child with no secret, as Flower's own is, whatever the options say.
        isolation = {"isolation": ISOLATION_MODE_PROCESS, "superexec_auth_secret": None}
        self._start(**settings | isolation)

    def _pull_and_store_message(self, **given: Any) -> int | None:
        """Flower's, but a message of a run with another app is answered with an error."""
        received: list[Message] = []

        def receive() -> Any:
            found = given["receive"]()
            received.extend(found[:1] if found else ())
            return found

        def get_fab(fab_hash: str, run: int) -> Any:
            fab = given["get_fab"](fab_hash, run)
            if (found := hashlib.sha256(fab.content).hexdigest()) != self._app:
                raise _OtherApp(
                    f"this site executes the app with the SHA-256 {self._app}, and not {found}; if"
                    " the site agrees to that code, `deploy code` writes it into its site.toml"
                )
            return fab

        try:
            pulled: int | None = self._pull(**given | {"receive": receive, "get_fab": get_fab})
            return pulled
        except _OtherApp as error:
            log(ERROR, "[RUN %s] %s", received[0].metadata.run_id, error)
            reply = Message(Error(ErrorCode.INVALID_FAB, str(error)), reply_to=received[0])
            self._insert(reply, given["state"], given["object_store"])
            return received[0].metadata.run_id

    def _push_messages(self, **arguments: Any) -> None:
        """Wake the SuperExec: a message has arrived, whose reply Flower now waits for."""
        self._check()
        assert self._superexec.stdin
        try:
            self._superexec.stdin.write(b".")
        except BrokenPipeError:  # it has ended since, or is about to
            self._superexec.wait()
            self._check()
        self._push(**arguments)

    def _check(self) -> None:
        code = self._superexec.poll()
        if code is not None:
            flwr_exit(ExitCode.TASK_PROC_EXCEPTION, f"The SuperExec has ended with code {code}.")


def main(options: Sequence[str]) -> None:
    """Run a SuperNode.

    Args:
        options: those of flower-supernode, and `--code`.

    Raises:
        ConfigError: it is to use a SuperExec that somebody else starts.
        RunFailed: this version of Flower has another SuperNode.
    """
    loop = flower_module(
        "flwr.supernode.start_client_internal",
        start_client_internal=(
            *("time.sleep(3)", "_push_messages(", "ISOLATION_MODE_SUBPROCESS:"),
            *("superexec_auth_secret", "= _pull_and_store_message("),
        ),
        _pull_and_store_message=("(recv := receive())", "fab = get_fab("),
        _insert_message=("state.store_message(msg)",),
        _push_messages=("time.sleep(0.5)",),
    )
    command = flower_module(
        "flwr.supernode.cli.flower_supernode",
        flower_supernode=("start_client_internal(",),
        _parse_supernode_lifespan_config=("= _parse_args_run_supernode().parse_args()",),
        _parse_args_run_supernode=("--isolation",),
    )
    parser = command._parse_args_run_supernode()
    parser.prog = "python -m fedhet deploy node"
    parser.add_argument("--code", type=_code, required=True, help=f"executed: {code.ALLOWED}")
    args = parser.parse_args(list(options))
    if args.isolation == "process":
        raise ConfigError("--isolation process: `deploy node` starts the clients' processes itself")
    without_docs("flwr.supernode.main")
    sys.argv = ["flower-supernode", *options]
    vars(command).update(
        start_client_internal=Launcher(loop, args.code).start_client_internal,
        _parse_args_run_supernode=lambda: parser,
    )
    command.flower_supernode()


def _code(text: str) -> str:
    try:
        return code.checked("--code", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
