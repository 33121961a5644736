"""`deploy node`: Flower's SuperNode with short rounds, which executes one app only.

All options, checks and messages are those of flower-supernode. Flower's loop looks for a message
every 3 s and for a reply every .5 s; here the pauses are a tenth and a fiftieth of the time that it
has waited, and never longer than Flower's. Its SuperExec starts a process for each message; here
the messages of a run have one process (app_process.py), which loads code and data once, and unpacks
no app but the one that the site executes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedhet.core.errors import ConfigError, RunFailed
from fedhet.data.storage import unwritable
from fedhet.deploy.folders import ALLOWED, ANY, check_code
from fedhet.flower import private
from fedhet.runs.cli.exits import Parser
from fedhet.runs.guard import guard_children
from fedhet.runs.process import end_with_parent

log = logging.getLogger("flwr")
CLIENT = Path(__file__).with_name("app_process.py")
PAUSES = {3.0: 0.1, 0.5: 0.02}  # Flower's pause -> its share here of the time waited, 1 s at least
MOST_RUNS = 2  # that have a process
IDLE_SECONDS = 900.0  # without a message, after which processes end and give their memory back


class ServingNode:
    """Flower's loop with short pauses, in which a process for each run serves its messages.

    Args:
        start: Flower's function with the SuperNode's loop, of whose module two names are replaced.
        app: the digest of the app that the site executes, or "any".
    """

    def __init__(self, start: Callable[..., None], app: str) -> None:
        self._start = start
        self._app = app
        self._config: Callable[..., Any] = start.__globals__["get_fused_config_from_fab"]
        self._command: list[str] = []
        self._one_message = False
        self._state: Any = None
        self._known: set[int] = set()  # runs of the app that the site executes
        self._pause = 0.0  # the last one of Flower
        self._since = time.monotonic()  # when that began
        self._clients: dict[int, subprocess.Popen[bytes]] = {}  # run -> its process; last used last
        start.__globals__.update(
            time=SimpleNamespace(**vars(time) | {"sleep": self._sleep}),
            get_fused_config_from_fab=self._config_of,
        )

    # ---- in place of Flower's functions
    def start_client_internal(self, **settings: Any) -> None:
        """Run the loop, which starts no SuperExec."""
        host, _, port = settings["runtime_api_address"].rpartition(":")
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        root = ["--root-certificates", str(settings["runtime_root_certificates_path"])]
        tls = root if settings["runtime_certificates"] else ["--insecure"]
        self._command = [sys.executable, "-P", str(CLIENT), self._app, *tls]
        self._command += ["--runtime-api-address", f"{host}:{port}"]
        if settings["runtime_dependency_install"]:  # they are removed after a message
            self._one_message = True
            self._command.append("--allow-runtime-dependency-installation")
        self._state = settings["state_factory"].state()
        self._start(**settings | {"isolation": "process"})

    def _config_of(self, fab_file: bytes, run: Any) -> Any:
        """Flower's, but of another app, which its process will refuse, nothing is read."""
        if self._app not in (hashlib.sha256(fab_file).hexdigest(), ANY):
            return {}
        self._known.add(run.run_id)
        return self._config(fab_file, run)

    def _sleep(self, seconds: float) -> None:
        """Have the message served that has arrived, and pause; Flower does so whenever it waits."""
        arrived = self._state.get_tasks(statuses=["pending"])
        for task in arrived:
            if token := self._state.claim_task(task.task_id):
                self._serve(task.run_id, token)
        now = time.monotonic()
        if arrived or seconds != self._pause:
            self._pause, self._since = seconds, now
        elif now > self._since + IDLE_SECONDS and seconds > 1:
            self._end(*self._clients)
        time.sleep(min(seconds, PAUSES.get(float(seconds), 1.0) * max(1.0, now - self._since)))

    # ---- the processes
    def _serve(self, run: int, token: str) -> None:
        """Give a message to the process of its run, or to a new one."""
        client = self._clients.pop(run, None)
        try:
            if client is None or client.poll() is not None:
                # Without a home, a process has no app that was unpacked earlier.
                home = {} if run in self._known else {"FLWR_HOME": os.devnull}
                client = subprocess.Popen(
                    self._command,
                    env={**os.environ, **home},
                    stdin=subprocess.PIPE,
                    bufsize=0,
                    preexec_fn=partial(end_with_parent, os.getpid()),
                )
            client.stdin.write(f"{token}\n".encode())  # type: ignore[union-attr]
        except OSError as error:  # Flower gives the message up, as one whose process has ended
            log.error("[RUN %s] no process can serve the message: %s", run, error)
            return
        self._clients[run] = client
        self._end(*([run] if self._one_message else list(self._clients)[:-MOST_RUNS]))

    def _end(self, *runs: int) -> None:
        """Let the processes of runs end after their messages."""
        for run in runs:
            self._clients.pop(run).stdin.close()  # type: ignore[union-attr]


def node(options: Sequence[str]) -> None:
    """`deploy node`: run a SuperNode.

    Args:
        options: those of flower-supernode, and `--code`.

    Raises:
        ConfigError: it is not said which code is executed.
        RunFailed: this Flower gives no way to execute one app only, which `--code` demands.
    """
    parser = Parser(
        "python -m fedhet deploy node",
        description="Run a SuperNode with short rounds; all other options are flower-supernode's.",
        allow_abbrev=False,
    )
    parser.add_argument("--code", required=True, help=f"executed: {ALLOWED}")
    parser.add_argument("--isolation", choices=["subprocess"], help="of Flower")
    args, others = parser.parse_known_args(options)
    check_code("--code", args.code)
    private.without_docs()
    supernode = private.command(private.SUPERNODE)
    sys.argv = [parser.prog, *others]
    try:
        for name in private.OF_NODES:
            private.private(name)
    except RunFailed as error:
        if args.code != ANY:
            raise RunFailed(f'{error}; only with code = "any" can this site do without') from error
        log.warning("Flower's own SuperNode starts, whose rounds take longer: %s", error)
    else:
        own = ServingNode(private.private(private.START), args.code)
        supernode.__globals__["start_client_internal"] = own.start_client_internal
    supernode()


def link(options: Sequence[str]) -> None:
    """`deploy link`: run Flower's SuperLink, whose children end with it, without its API's pages.

    Args:
        options: the folder below which a relative hydra.run.dir is, and those of flower-superlink.

    Raises:
        ConfigError: the folder is missing.
        WriteError: the folder cannot be used.
    """
    if not options:
        raise ConfigError(
            "the folder is missing: deploy link FOLDER, then flower-superlink's options"
        )
    folder, *options = options
    private.without_docs()
    superlink = private.command("flower-superlink")
    try:
        os.chdir(folder)  # not before fedhet is imported, which may lie in the working directory
    except OSError as error:
        raise unwritable(Path(folder), error) from error
    guard_children()  # they do not notice the end of a SuperLink that nobody has waited for
    sys.argv = ["flower-superlink", *options]
    superlink()
