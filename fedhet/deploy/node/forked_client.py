"""What a process does that was forked for a message, and the template of such processes.

Like zygote.py, it imports nothing of fedhet.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def serve(order: tuple[int, list[str], bool], report: Connection | None) -> None:
    """What `flwr-clientapp` does, in a process of its own."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    _, sys.argv, silent = order
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if silent:
        with Path(os.devnull).open("wb") as nothing:
            for number in (1, 2):
                os.dup2(nothing.fileno(), number)
    if report:
        _report_input(report)
    flwr_clientapp()


def _report_input(report: Connection) -> None:
    """Let this client report which context it receives, and where it has installed the app."""
    from flwr.app import Context, RecordDict

    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    pull, install = module.pull_task_input, module.install_from_fab
    contexts: list[Context] = []

    def pull_task_input(client: Any) -> Any:
        found = pull(client)
        contexts.append(found[1])
        return found

    def install_from_fab(*arguments: Any, **options: Any) -> Any:
        folder = install(*arguments, **options)
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
            report.send((context, folder))
        report.close()
        return folder

    vars(module).update(pull_task_input=pull_task_input, install_from_fab=install_from_fab)


def prepare(context: Any, folder: Path) -> None:
    """Load the app in the folder, and let it prepare itself for a run.

    Raises:
        Exception: whatever the app raises.
        RuntimeError: it has initialised CUDA.
    """
    import torch
    from flwr.common.config import get_project_config
    from flwr.supercore.object_ref import load_app

    name = get_project_config(folder)["tool"]["flwr"]["app"]["components"]["clientapp"]
    load_app(name, RuntimeError, folder)
    prepare = getattr(sys.modules[name.partition(":")[0]], "prepare", None)
    if prepare is not None:
        prepare(context)
    torch.set_num_threads(1)
    if torch.cuda.is_initialized():
        raise RuntimeError("the app has initialised CUDA, which a forked process cannot use")
