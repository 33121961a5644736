"""The sweepers: one for experiments with axes, and Hydra's own, made faster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from fedhet.data.findable import Source
    from fedhet.experiment.cells import Cell


class ProductSweeper(BasicSweeper):
    """Hydra's own sweeper, except that it checks many runs in a fraction of the time."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Compose the configuration of each run, so that a wrong one fails before the first."""
        from fedhet.config.bases import Bases

        assert (
            self.config is not None and self.hydra_context is not None
        )  # Hydra's setup was called
        loader = self.hydra_context.config_loader
        compose = Bases(lambda lines: loader.load_sweep_config(self.config, lines))
        for overrides in batch:
            compose(overrides)


class ExperimentSweeper(Sweeper):
    """Runs the cells of the experiment that the task function names, through Hydra's launcher.

    The axes are not overrides with several values, as they are for Hydra's own sweeper: a value may
    stand for several overrides, and the trials' results decide what the runs are.
    """

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take what Hydra gives each sweeper."""
        self.hydra_context = hydra_context
        self.config = config
        self._task: Any = task_function
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the experiment; `arguments`, its overrides, are those that it was read from."""
        from fedhet.config.interpolations import literal
        from fedhet.experiment import progress
        from fedhet.launchers import live

        count = 0
        folder = Path(self.config.hydra.sweep.dir).absolute()
        with ExitStack() as stack:
            watch: live.Watch

            def started(path: Path, total: int, done: int) -> None:
                nonlocal watch
                self._task.started = path
                watch = stack.enter_context(live.watching(total, {}, done))

            def launch(cells: Sequence[Cell]) -> None:
                nonlocal count
                batch = []
                for cell in cells:
                    watch.begins(folder / cell.folder, cell.label, trial=cell.kind == "trial")
                    batch.append([*cell.overrides, f"hydra.sweep.subdir={literal(cell.folder)}"])
                self._launcher.launch(batch, initial_job_idx=count)
                count += len(batch)

            self._task.outcome = progress.run(
                self._task.experiment,
                folder,
                self._task.made_by,
                launch,
                started,
                self._find_data,
            )
        return self._task.outcome

    def _find_data(self, sources: Sequence[Source]) -> None:
        """Look for data where the runs will, if that is on this machine."""
        if isinstance(self._launcher, BasicLauncher):
            from fedhet.data.findable import find_data

            find_data(sources)
        elif find := getattr(self._launcher, "find_data", None):
            find(sources)
