"""Flower's SuperExec with an executor that forks, and that starts a task as soon as there is one.

    python -m fedhet.deploy.node.superexec <options of flower-superexec>

The SuperNode writes a byte to its stdin for each message; the end of stdin is the SuperNode's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import ExecutorType

from fedhet.deploy.node.executor import ForkExecutor, ForkPlugin
from fedhet.deploy.node.shape import flower_module

STDIN = 0


class WakeClock:
    """The module `time` for Flower's loop, whose sleep ends when a message arrives."""

    def __init__(self) -> None:
        self._message = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep for so many seconds, or until the SuperNode has a message."""
        self._message.wait(seconds)
        self._message.clear()

    def _listen(self) -> None:
        while os.read(STDIN, 4096):
            self._message.set()
        # The SuperNode has ended. The main thread may be waiting for its answer.
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)


def executor_for(executor_type: ExecutorType, *_: Any, **__: Any) -> ForkExecutor:
    """Takes the place of Flower's factory."""
    assert executor_type == ExecutorType.SUBPROCESS
    return ForkExecutor()


def main() -> None:
    """Run Flower's SuperExec."""
    module = flower_module(
        "flwr.supercore.superexec.run_superexec",
        run_superexec=("time.sleep(task_poll_interval)", "get_executor(", "AutoExecPlugin("),
    )
    flower_module(  # what forked_client.py changes in clients
        "flwr.supernode.runtime.run_clientapp",
        run_clientapp=("= pull_task_input(client)", "install_from_fab(fab.content,"),
        pull_task_input=("return message, context, run, fab",),
        install_from_fab=(") -> Path:",),
    )
    vars(module).update(time=WakeClock(), get_executor=executor_for, AutoExecPlugin=ForkPlugin)
    sys.argv[0] = "flower-superexec"
    flower_superexec()


if __name__ == "__main__":
    main()
