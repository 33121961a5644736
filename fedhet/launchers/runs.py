"""A planned run of a sweep or an experiment: how it is made, and how it has ended."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet import process
from fedhet.cli.errors import drop_output, error_line, report_error, say
from fedhet.config import composition
from fedhet.config.resuming import CELL
from fedhet.config.targets import instantiate
from fedhet.core.errors import (
    ConfigError,
    DataError,
    OtherCode,
    RunFailed,
    WriteError,
    uncreatable,
)
from fedhet.experiment import folder as cells

if TYPE_CHECKING:
    from fedhet.config import Config
    from fedhet.config.bases import Bases
    from fedhet.record.results import Run

log = logging.getLogger("fedhet")
LOG = "log.txt"  # in a run folder: what its process has printed


@dataclass(frozen=True)
class PlannedRun:
    """A run of a sweep or an experiment.

    Attributes:
        number: its place in the sweep.
        label: what it is, for people.
        overrides: its overrides.
        folder: absolute path of its run folder.
        any_code: whether it may run with other code than the experiment has begun with; None if it
            belongs to none.
        trial: whether its validation score is shown in place of the one on test data, by which
            nobody may choose.
    """

    number: int
    label: str
    overrides: tuple[str, ...]
    folder: Path
    any_code: bool | None = None
    trial: bool = False

    @property
    def name(self) -> str:
        """What it is, and which."""
        return f"job {self.number}: {self.label}"

    def prepare(self) -> None:
        """Create the run folder, without what an earlier attempt has left there.

        Raises:
            ConfigError: it cannot be created.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise uncreatable("hydra.sweep.dir", self.folder, error) from error
        if self.any_code is None:
            (self.folder / CELL).unlink(missing_ok=True)

    def composed(self, bases: Bases) -> Config:
        """Return its settings, from what `bases` has composed for other runs of the sweep."""
        settings = composition.compose(self.overrides, bases=bases)
        return replace(settings, run_dir=str(self.folder))

    def make(self, settings: Config) -> Run:
        """Make the run, whose settings these are, in this process; raise what it fails with."""
        if self.any_code is None:
            return make(settings)
        with cells.recorded(self.folder, any_code=self.any_code):
            return make(cells.as_cell(settings, self.folder))

    def failure(self, problem: str) -> str | None:
        """Why the run has failed, as its folder says once its process has ended.

        "" if it has not; None if it has found other code and not begun, which the experiment tells
        for all.

        Args:
            problem: why its process has ended without a word, or "".
        """
        if problem:
            try:
                cells.record_failure(self.folder, problem)
            except (DataError, WriteError) as error:
                log.warning("%s", error)
            return problem
        state = cells.state_of(self.folder)
        return None if state.get("status") == cells.WAITING else state.get("reason") or ""


def make(settings: Config) -> Run:
    """Make a run in this process; raise what it fails with."""
    instantiate(settings.cfg.partition)  # refuses its settings before torch and data are loaded
    if "fedhet.job" in sys.modules:
        # Models and data of an earlier run are in circles, which Python may keep for a long time.
        gc.collect()
    else:
        with process.imports():
            import fedhet.job  # noqa: F401
    from fedhet.job import run_job
    from fedhet.record import terminal

    terminal.log_to_stderr("fedhet.data")  # which files were found or left out
    return run_job(settings)


def make_here(make_one: Callable[[Config], Run], settings: Config) -> Run | None:
    """Make a run for the user of this process, who is told its folder however it ends.

    Returns:
        The run; None if it is complete, and nobody reads what it prints.
    """
    folder: Path | None = Path(settings.run_dir)
    try:
        run = make_one(settings)
        folder = run.dir
        return run
    except BrokenPipeError:
        drop_output()
        return None
    except RunFailed as error:
        folder = Path(error.folder) if error.folder else None
        raise
    except Exception:
        folder = None
        raise
    finally:
        if folder is not None and folder.is_dir():
            say(f"run folder: {folder.resolve()}")


def carry_out(run: PlannedRun, settings: Config, home: str) -> None:
    """Make a run in a process of its own, on this machine or another; its folder has the result.

    Args:
        run: the run.
        settings: its settings.
        home: the working directory.

    Raises:
        ConfigError: this machine does not have the working directory.
    """
    try:
        os.chdir(home)
    except FileNotFoundError as error:
        raise ConfigError(
            f"the working directory {home} does not exist on a node: all nodes need it under the"
            " same path"
        ) from error
    with _logged(run.folder):
        try:
            run.make(settings)
        except OtherCode:
            pass  # the folder says so
        except Exception as error:  # noqa: BLE001 -- told by the command that has started it
            report_error(error)
            cells.record_failure(run.folder, error_line(error))


@contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Let what this process and its children print go to the log of a run folder."""
    before = os.dup(1), os.dup(2)
    target = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        _redirect(target, target)
        yield
    finally:
        _redirect(*before)
        for number in (*before, target):
            os.close(number)


def _redirect(out: int, err: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(err, 2)
