"""What a process does that was forked for a message, and the template of such processes.

Like zygote.py, it imports nothing of fedhet.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

END_SECONDS = 15.0  # for clients to end once the SuperExec is gone; Flower tells them, then we do


def serve(order: tuple[int, list[str], bool], report: Connection | None, superexec: int) -> None:
    """What `flwr-clientapp` does, in a process of its own."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    end_after(superexec, END_SECONDS)
    _, sys.argv, silent = order
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if silent:
        with Path(os.devnull).open("wb") as nothing:
            for number in (1, 2):
                os.dup2(nothing.fileno(), number)
    if report:
        _report_input(report)
    flwr_clientapp()


def end_after(process: int, seconds: float) -> None:
    """Kill this process so many seconds after another one is gone.

    Whoever has forked this process does so, too, but may have been killed before.
    """

    def watch() -> None:
        while psutil.pid_exists(process):
            time.sleep(1)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _report_input(report: Connection) -> None:
    """Let this client report its context, where it has installed the app, and the app's digest."""
    from flwr.app import Context, RecordDict

    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    pull, install = module.pull_task_input, module.install_from_fab
    contexts: list[Context] = []

    def pull_task_input(client: Any) -> Any:
        found = pull(client)
        contexts.append(found[1])
        return found

    def install_from_fab(content: bytes, **options: Any) -> Path:
        folder: Path = install(content, **options)
        full = contexts.pop()
        context = Context(
            full.run_id,
            full.node_id,
            full.node_config,
            RecordDict(),
            full.run_config,
            full.series_id,
        )
        with suppress(OSError):  # there is no zygote any more
            report.send((context, folder, hashlib.sha256(content).hexdigest()))
        report.close()
        return folder

    vars(module).update(pull_task_input=pull_task_input, install_from_fab=install_from_fab)


def prepare(context: Any, folder: Path) -> None:
    """Load the app in the folder, and let it prepare itself for a run.

    Raises:
        Exception: whatever the app raises.
        RuntimeError: it has initialised CUDA, or has started threads.
    """
    import torch
    from flwr.common.config import get_project_config
    from flwr.supercore.object_ref import load_app

    name = get_project_config(folder)["tool"]["flwr"]["app"]["components"]["clientapp"]
    load_app(name, RuntimeError, folder)
    prepare = getattr(sys.modules[name.partition(":")[0]], "prepare", None)
    if prepare is not None:
        # Decoding may start threads (Arrow's for tables, those of tokenizers). A child does that
        # first and leaves decoded arrays on disk, so that this process needs only to map them.
        child = multiprocessing.get_context("fork").Process(target=_decode, args=(prepare, context))
        child.start()
        child.join()
        prepare(context)
    torch.set_num_threads(1)
    if torch.cuda.is_initialized():
        raise RuntimeError("the app has initialised CUDA, which a forked process cannot use")
    if threads := _further_threads():
        raise RuntimeError(f"the app has started threads ({threads}), which a forked process lacks")


def keep_installed(folder: Path, digest: str) -> None:
    """Let clients that are forked from here not unpack and check the same app again.

    Args:
        folder: where Flower has installed it.
        digest: SHA-256 of the FAB, Flower's archive of the app.
    """
    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    install = module.install_from_fab

    def install_from_fab(content: bytes, **options: Any) -> Path:
        same = hashlib.sha256(content).hexdigest() == digest and folder.is_dir()
        return folder if same else install(content, **options)

    vars(module).update(install_from_fab=install_from_fab)


def _decode(prepare: Callable[[Any], None], context: Any) -> None:
    end_after(os.getppid(), 0)
    logging.disable()  # what it would say and raise, the parent will
    with suppress(Exception):
        prepare(context)


def _further_threads() -> int:
    """The number of threads of this process, without its own and those that end before a fork."""
    if pid := os.fork():  # OpenBLAS ends its threads here, and starts them again when it needs them
        os.waitpid(pid, 0)
        return psutil.Process().num_threads() - 1
    os._exit(0)
