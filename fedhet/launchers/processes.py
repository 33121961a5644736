"""`hydra/launcher=processes`: as many runs at once as this machine has cores."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn

import psutil
from hydra.core.utils import JobReturn

from fedhet.cli.errors import say
from fedhet.core import check
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.interruptions import raise_if_interrupted
from fedhet.data.findable import Search, Source
from fedhet.launchers import live
from fedhet.launchers.jobs import Jobs, why
from fedhet.process import signals_deferred

CGROUP = Path("/sys/fs/cgroup")
END_SECONDS = 20.0  # for runs to record that they were interrupted, before they are killed
LISTEN_SECONDS = 0.5  # at most, until a lost interrupt is noticed


def launch(jobs: Jobs, workers: int | None = None) -> list[JobReturn]:
    """Run the jobs.

    Args:
        jobs: what to run.
        workers: how many at once; None for the cores that this process may use.

    Returns:
        How each of them has ended, in their order, whatever the order in which they ended.

    Raises:
        ConfigError: `workers` is out of range, or this system cannot fork processes.
        RunFailed: the process that starts the jobs has ended; no more can be started.
    """
    count = _checked(workers)
    zygote = warm()
    zygote.send(jobs.batch(os.environ))
    waiting = deque(range(len(jobs)))
    running: set[int] = set()
    with live.watching(len(jobs)) as watch:
        try:
            while waiting or running:
                while waiting and len(running) < count:
                    position = waiting.popleft()
                    zygote.send((position, jobs.first + position, list(jobs.overrides[position])))
                    running.add(position)
                for position, message in zygote.hear():
                    if isinstance(message, Path):
                        jobs.folders[position] = message
                        watch.begins(message, jobs.label(position))
                    else:
                        running.discard(position)
                        problem = jobs.ended(position, *message)
                        if problem is None:
                            waiting.clear()
                        else:
                            watch.ends(jobs.folders.get(position), jobs.label(position), problem)
                raise_if_interrupted()
        except BaseException:
            zygote.interrupt(running)
            raise
    if not live.shown():
        say(f"run folder: {Path(jobs.config.hydra.sweep.dir).absolute()}")
    return jobs.results()


def find_data(sources: Sequence[Source], workers: int | None = None) -> None:
    """Look for the data of runs with what their processes begin with.

    Raises:
        ConfigError: as `launch` does, or a setting of a dataset is wrong.
        DataError: data are missing or damaged.
        RunFailed: they cannot be read for another reason.
    """
    _checked(workers)
    warm().find_data(sources)


def _checked(workers: Any) -> int:
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigError(
            "hydra/launcher=processes: this system cannot fork processes; use hydra/launcher=basic"
        )
    if workers is None:
        return usable_cores()
    return check.integer("hydra.launcher.workers", workers, low=1)


def usable_cores() -> int:
    """The cores that this process may use: by its affinity, and by the limit of its container."""
    cores = len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else os.cpu_count() or 1
    for quota, period in (("cpu.max", ""), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # there is no such limit, or it is "max"
            words = (CGROUP / quota).read_text().split()
            words += (CGROUP / period).read_text().split() if period else []
            if int(words[0]) > 0:
                cores = min(cores, math.ceil(int(words[0]) / int(words[1])))
    return max(1, cores)


@lru_cache(maxsize=1)
def warm() -> Handle:
    """The process that starts the jobs; the first call starts it, and it goes on to import."""
    return Handle()


class Handle:
    """The zygote, as the launching process sees it. It lives as long as this process."""

    def __init__(self) -> None:
        # Spawned, not forked: it must have one thread, and nothing of this process.
        spawn = multiprocessing.get_context("spawn")
        self.connection, there = spawn.Pipe()
        from fedhet.launchers import zygote

        self.process = spawn.Process(target=zygote.serve, args=(there,), name="fedhet-zygote")
        with signals_deferred():
            self.process.start()
        there.close()
        self.returns: dict[int, JobReturn] = {}
        # At the end of this process, which would otherwise wait for it.
        Finalize(self, self.process.kill, exitpriority=100)

    def send(self, order: Any) -> None:
        """Have it do something."""
        try:
            self.connection.send(order)
        except OSError:
            self._lost()

    def find_data(self, sources: Sequence[Source]) -> None:
        """Have a process look for data, and raise what it says."""
        self.send(Search(sources, str(Path.cwd()), dict(os.environ)))
        try:
            while not self.connection.poll(LISTEN_SECONDS):
                raise_if_interrupted()
            problem = self.connection.recv()
        except (EOFError, OSError):
            self._lost()
        except BaseException:
            self.process.kill()  # it waits for the one that looks
            self.close()
            raise
        if problem is not None:
            raise problem

    def hear(self, seconds: float = LISTEN_SECONDS) -> list[tuple[int, Any]]:
        """What jobs have said: (position, run folder), or (position, (JobReturn, problem))."""
        heard: list[tuple[int, Any]] = []
        try:
            while self.connection.poll(0 if heard else seconds):
                position, message = self.connection.recv()
                if isinstance(message, JobReturn):
                    self.returns[position] = message
                    continue
                if not isinstance(message, Path):
                    problem = message if isinstance(message, str) else why(message)
                    message = (self.returns.pop(position, None), problem)
                heard.append((position, message))
        except (EOFError, OSError):
            self._lost()
        return heard

    def interrupt(self, running: set[int]) -> None:
        """Let all jobs end as after Ctrl-C, and kill those that do not, or at a second Ctrl-C."""
        left = set(running)
        until = time.monotonic() + END_SECONDS
        try:
            self.send(int(signal.SIGTERM))
            while left and time.monotonic() < until:
                left -= {position for position, message in self.hear() if type(message) is tuple}
        except RunFailed:
            return
        finally:
            self.close()  # which kills those that are left

    def close(self) -> None:
        """Let it end, and with it the jobs that run."""
        warm.cache_clear()
        self.connection.close()
        self.process.join()

    def _lost(self) -> NoReturn:
        self.close()
        code = self.process.exitcode
        raise RunFailed(f"no more runs can be started: {why(code)}")
