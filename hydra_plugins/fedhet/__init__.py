"""Launchers for Hydra: `hydra/launcher=processes` and `hydra/launcher=ray`.

Hydra accepts plug-ins from this namespace alone, and imports it whenever it starts: the work is in
fedhet.launchers, which is imported when a launcher is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.plugins.launcher import Launcher

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from fedhet.data.findable import Source


class _Ours:
    """Keeps what Hydra hands over, and the settings of the launcher."""

    module: str

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what the jobs need."""
        self.context = hydra_context
        self.task = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run one job per list of overrides; return how each of them has ended, in their order."""
        from importlib import import_module

        from fedhet.launchers.jobs import Jobs

        jobs = Jobs(self.context, self.task, self.config, job_overrides, initial_job_idx)
        returns: Sequence[JobReturn] = import_module(self.module).launch(jobs, **self.settings)
        return returns


class ProcessesLauncher(_Ours, Launcher):
    """Each run in a process of its own on this machine (conf/hydra/launcher/processes.yaml)."""

    module = "fedhet.launchers.processes"

    def find_data(self, sources: Sequence[Source]) -> None:
        """Look for the data of runs in the process that will start them."""
        from fedhet.launchers import processes

        processes.find_data(sources, **self.settings)


class RayLauncher(_Ours, Launcher):
    """Each run as a task of an existing Ray cluster (conf/hydra/launcher/ray.yaml)."""

    module = "fedhet.launchers.ray"
