"""An executor of Flower's SuperExec that forks clients from a process with all imports."""

from __future__ import annotations

import os
import subprocess
import sys
from logging import WARN
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from flwr.proto.task_pb2 import Task
from flwr.supercore import log
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supercore.superexec.plugin import AutoExecPlugin
from flwr.supercore.tls import get_client_tls_args

ZYGOTE = Path(__file__).with_name("zygote.py")
SECONDS = 120.0  # for the zygote to fork a client; on a busy machine its imports take a while


class ForkExecutor(SubprocessExecutor):
    """Forks a process for each message, in which torch, Flower and the site's data are loaded.

    Other tasks than client apps, and apps that bring their own dependencies, start as ever.

    Attributes:
        run_id: the run of the next launch, which Flower's ExecutionSpec does not have.
    """

    def __init__(self) -> None:
        self.run_id = 0
        self._process: subprocess.Popen[bytes]
        self._orders: Connection
        self._start()

    def _start(self) -> None:
        self._orders, there = Pipe()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(ZYGOTE), str(there.fileno()), str(os.getpid())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process that the specification describes."""
        if spec.task_type != TaskType.CLIENT_APP or spec.runtime_dependency_install:
            return super().launch(spec)
        order = (self.run_id, _command(spec), spec.suppress_output)
        try:
            self._send(order)
            if not self._orders.poll(SECONDS):
                self._restart(f"it did not answer within {SECONDS:g} s")
                return LaunchResult.unknown("the process that forks clients did not answer")
            problem = self._orders.recv()
        except (EOFError, OSError) as error:
            self._restart("it has ended")
            return LaunchResult.unknown(f"the process that forks clients has ended: {error}")
        return LaunchResult.failed(problem) if problem else LaunchResult.accepted()

    def _send(self, order: tuple[int, list[str], bool]) -> None:
        if self._process.poll() is None:
            try:
                self._orders.send(order)
                return
            except OSError:
                pass  # it has ended since
        self._restart("it has ended")
        self._orders.send(order)

    def _restart(self, problem: str) -> None:
        log(WARN, "The process that forks clients is started again: %s", problem)
        self._orders.close()
        self._process.kill()
        self._process.wait()
        self._start()

    def close(self) -> None:
        """Let the process that forks clients end, once they have."""
        self._orders.close()


class ForkPlugin(AutoExecPlugin):
    """Flower's plugin, which also tells a ForkExecutor the run of a task."""

    def launch_task(self, token: str, task: Task) -> LaunchResult:
        """Launch the process of a task."""
        if isinstance(self.executor, ForkExecutor):
            self.executor.run_id = task.run_id
        return super().launch_task(token, task)


def _command(spec: ExecutionSpec) -> list[str]:
    """The command line of the `flwr-clientapp` that Flower would start."""
    tls = get_client_tls_args(
        insecure=spec.insecure, root_certificates_path=spec.root_certificates_path
    )
    parent = [] if spec.parent_pid is None else ["--parent-pid", str(spec.parent_pid)]
    address = ["--runtime-api-address", spec.runtime_api_address]
    return ["flwr-clientapp", *address, "--token", spec.token, *tls, *parent]
