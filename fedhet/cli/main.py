"""The command line: help, checks before torch is imported, one run or a sweep by Hydra, exit codes.

Exit codes: 0 ok, 1 a run failed, 2 a wrong setting or missing data, 130 interrupted by Ctrl-C or
SIGTERM."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fedhet import process
from fedhet.cli import help
from fedhet.errors import ConfigError, DataError, RunFailed

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say (those of the process if None) and return the exit code; an error
    is told in a line on stderr."""
    # as Ctrl-C: the run is recorded as interrupted
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 -- the last place that can tell it in one line
        return tell(error)


def _main(argv: Sequence[str]) -> int:
    args = _parser().parse_intermixed_args(argv)
    if args.help:
        print(help.help_text())
    elif args.version:
        print(_version())
    elif args.list:
        with process.imports():
            from fedhet.cli.compositions import compositions

        print(help.list_text(compositions()))
    else:
        return _launch(
            args.overrides, [arg for arg in argv if arg not in args.overrides], sweep=args.multirun
        )
    return 0


def _launch(lines: list[str], flags: list[str], *, sweep: bool) -> int:
    """Check every override, then let Hydra run the job or the sweep."""
    from fedhet import config

    lines = config.check(lines, sweep=sweep)
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    task = Task()
    sys.argv = ["fedhet", *flags, *lines]  # where Hydra looks for them
    os.environ["HYDRA_FULL_ERROR"] = (
        "1"  # raise errors; Hydra's other way is a traceback and sys.exit
    )
    try:
        hydra.main(
            version_base=config.HYDRA_VERSION, config_path=str(config.CONF), config_name="config"
        )(task)()
    finally:
        GlobalHydra.instance().clear()
    if not sweep:
        return task.code
    for job in task.failed:
        print(f"failed: {job}", file=sys.stderr)
    return 1 if task.failed else 0


class Task:
    """What Hydra calls for each job. A job that fails is told and noted, so that the others of a
    sweep still run.

    In another process, where a launcher may run it, its exception goes on instead: a note would be
    lost there."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.code = 0
        self.failed: list[str] = []

    def __call__(self, cfg: DictConfig) -> float:
        """Run the job; its best validation accuracy, for an optimiser, which must not see the
        tests, or NaN where there is none."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        hydra = HydraConfig.get()
        made = Path(hydra.runtime.output_dir)
        folder: Path | None = made
        name = " ".join(hydra.overrides.task) or "the defaults"
        if hydra.mode == RunMode.MULTIRUN:
            name = f"job {hydra.job.num}: {name}"
            print(name, flush=True)
        try:
            _prepare()
            from fedhet import config
            from fedhet.job import run_job
            from fedhet.record import terminal

            terminal.log_to_stderr("fedhet.data")  # which files were found, what was left out
            run = run_job(config.of_job(cfg))
            folder = run.dir
            best = run.summary["validation"]
            return float("nan") if best is None else float(best)
        except Exception as error:
            folder = Path(error.folder) if isinstance(error, RunFailed) and error.folder else None
            if os.getpid() != self.pid:
                raise
            self.code = tell(error)
            self.failed.append(f"{name}: {_line(error)}")
            return float("nan")
        finally:
            if not any(made.iterdir()):  # Hydra makes it, also for a job that never began
                made.rmdir()
            if folder is not None and folder.is_dir():
                print(f"run folder: {folder.resolve()}", flush=True)


def _prepare() -> None:
    """Import what a job needs; later in a sweep drop what the job before has left.

    Its models and data are in reference cycles, which Python is in no hurry to find.
    """
    if "fedhet.job" in sys.modules:
        gc.collect()
        return
    with process.imports():
        import fedhet.job  # noqa: F401


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m fedhet --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for ours in (("-h", "--help"), ("--version",), ("--list",), ("-m", "--multirun")):
        parser.add_argument(*ours, action="store_true")
    parser.add_argument(
        "-c", "--cfg", choices=("job", "hydra", "all")
    )  # this and the rest are Hydra's
    parser.add_argument("-p", "--package")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    return parser


def _version() -> str:
    try:
        return f"fedhet {version('fedhet')}"
    except PackageNotFoundError:
        return "fedhet, not installed"


def tell(error: Exception) -> int:
    """Print the error and return its exit code. FEDHET_TRACEBACK=1 shows where it came from."""
    if os.environ.get("FEDHET_TRACEBACK") == "1":
        traceback.print_exception(error)
    print(f"error: {_line(error)}", file=sys.stderr, flush=True)
    return 2 if isinstance(error, ConfigError | DataError) else 1


def _line(error: Exception) -> str:
    if isinstance(error, RunFailed):
        return error.reason
    known = isinstance(error, ConfigError | DataError)
    return (
        str(error) if known else f"{type(error).__name__}: {error} (FEDHET_TRACEBACK=1 shows where)"
    )
