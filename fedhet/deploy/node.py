"""`deploy node`: Flower's SuperNode with short rounds. It executes the app that `--code` names.

It has the options, checks and messages of flower-supernode, and differs from it in three ways:

- Flower's loop looks for a message every 3 s and for a reply every 0.5 s. Here the pauses are .1
  and .02 of the time waited so far, and never longer than Flower's.
- Flower's SuperExec starts a process for each message. Here one process (app_process.py) serves all
  messages of a run, and loads code and data once. Only if Flower installs an app's dependencies
  (--allow-runtime-dependency-installation), each message gets a new process.
- This process unpacks only the app that the site executes. With --code any, it unpacks every app.
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
# Flower's pause -> this module's pause, as a fraction of the time waited (counted as at least 1 s).
PAUSES = {3.0: 0.1, 0.5: 0.02}
MOST_RUNS = 2  # the largest number of runs that have a process at the same time
IDLE_SECONDS = 900.0  # processes end after this time without a message, and so free their memory


class ServingNode:
    """Flower's loop with short pauses. One process for each run serves the run's messages.

    Args:
        start: Flower's function that runs the SuperNode's loop. The constructor replaces two names
            in the module of this function.
        app: the digest of the app that the site executes, or "any".
    """

    def __init__(self, start: Callable[..., None], app: str) -> None:
        self._start = start
        self._app = app
        self._config: Callable[..., Any] = start.__globals__["get_fused_config_from_fab"]
        self._command: list[str] = []
        self._one_message = False
        self._state: Any = None
        self._own_runs: set[int] = set()  # runs of the app that the site executes
        self._pause = 0.0  # the last pause that Flower asked for
        self._pause_began = time.monotonic()  # when Flower first asked for this pause
        # run -> its process; the process that was used last comes last
        self._clients: dict[int, subprocess.Popen[bytes]] = {}
        start.__globals__.update(
            time=SimpleNamespace(**vars(time) | {"sleep": self._sleep}),
            get_fused_config_from_fab=self._config_of,
        )

    # ---- replacements of Flower's functions
    def start_client_internal(self, **settings: Any) -> None:
        """Run Flower's loop without a SuperExec."""
        host, _, port = settings["runtime_api_address"].rpartition(":")
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        root = ["--root-certificates", str(settings["runtime_root_certificates_path"])]
        tls = root if settings["runtime_certificates"] else ["--insecure"]
        self._command = [
            *(sys.executable, "-P", str(CLIENT), self._app, *tls),
            *("--runtime-api-address", f"{host}:{port}"),
        ]
        if settings["runtime_dependency_install"]:
            # Flower removes the dependencies after each message, so each message gets a process.
            self._one_message = True
            self._command.append("--allow-runtime-dependency-installation")
        self._state = settings["state_factory"].state()
        self._start(**settings | {"isolation": "process"})

    def _config_of(self, fab_file: bytes, run: Any) -> Any:
        """Return Flower's config of the app; {} if the site does not execute this app.

        The process refuses such an app later.
        """
        if self._app not in (hashlib.sha256(fab_file).hexdigest(), ANY):
            return {}
        self._own_runs.add(run.run_id)
        return self._config(fab_file, run)

    def _sleep(self, seconds: float) -> None:
        """Serve the messages that have arrived, then pause. Flower calls this whenever it waits."""
        arrived = self._state.get_tasks(statuses=["pending"])
        for task in arrived:
            if token := self._state.claim_task(task.task_id):
                self._serve(task.run_id, token)
        now = time.monotonic()
        if arrived or seconds != self._pause:
            self._pause, self._pause_began = seconds, now
        elif now > self._pause_began + IDLE_SECONDS and seconds > 1:
            self._end(*self._clients)
        time.sleep(
            min(seconds, PAUSES.get(float(seconds), 1.0) * max(1.0, now - self._pause_began))
        )

    # ---- the processes
    def _serve(self, run: int, token: str) -> None:
        """Pass a message to the process of its run, or to a new process."""
        client = self._clients.pop(run, None)
        try:
            if client is None or client.poll() is not None:
                # Without a home folder, the process cannot use an app that was unpacked earlier.
                home = {} if run in self._own_runs else {"FLWR_HOME": os.devnull}
                client = subprocess.Popen(
                    self._command,
                    env={**os.environ, **home},
                    stdin=subprocess.PIPE,
                    bufsize=0,
                    preexec_fn=partial(end_with_parent, os.getpid()),
                )
            client.stdin.write(f"{token}\n".encode())  # type: ignore[union-attr]
        except OSError as error:  # Flower gives the message up, as if its process had ended
            log.error("[RUN %s] no process can serve the message: %s", run, error)
            return
        self._clients[run] = client
        self._end(*([run] if self._one_message else list(self._clients)[:-MOST_RUNS]))

    def _end(self, *runs: int) -> None:
        """Make the processes of these runs end after the messages that they serve now."""
        for run in runs:
            self._clients.pop(run).stdin.close()  # type: ignore[union-attr]


def node(options: Sequence[str]) -> None:
    """`deploy node`: run a SuperNode.

    Args:
        options: the options of flower-supernode, and `--code`.

    Raises:
        ConfigError: `--code` is wrong.
        RunFailed: `--code` names one app, but this version of Flower lacks a private name that
            fedhet needs to execute only that app.
    """
    parser = Parser(
        "python -m fedhet deploy node",
        description="Run a SuperNode with short rounds; all other options are flower-supernode's.",
        allow_abbrev=False,
    )
    parser.add_argument("--code", required=True, help=f"the only code to execute: {ALLOWED}")
    parser.add_argument("--isolation", choices=["subprocess"], help="Flower's option")
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
            raise RunFailed(f'{error}; this site can run without it if code = "any"') from error
        log.warning("Flower's own SuperNode starts; its rounds take longer: %s", error)
    else:
        own = ServingNode(private.private(private.START), args.code)
        supernode.__globals__["start_client_internal"] = own.start_client_internal
    supernode()


def link(options: Sequence[str]) -> None:
    """`deploy link`: run Flower's SuperLink, without the documentation pages of its API.

    If the SuperLink ends, its child processes end, too.

    Args:
        options: first the folder for a relative hydra.run.dir, then flower-superlink's options.

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
        os.chdir(folder)  # not earlier: fedhet is perhaps imported from the old working directory
    except OSError as error:
        raise unwritable(Path(folder), error) from error
    # As long as an ended SuperLink is a zombie, its children believe that it still runs.
    guard_children()
    sys.argv = ["flower-superlink", *options]
    superlink()
