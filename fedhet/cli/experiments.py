"""Experiments with axes from the command line; everything else is a run or a sweep."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fedhet import process
from fedhet.cli import launch
from fedhet.cli.errors import DEGRADED, FAILED, report_error, say
from fedhet.config import composition, resuming
from fedhet.config.lines import key_of
from fedhet.core import interruptions
from fedhet.core.errors import ConfigError, OtherCode, clean
from fedhet.experiment import definition
from fedhet.experiment.code import Code
from fedhet.experiment.definition import Experiment
from fedhet.experiment.folder import count
from fedhet.experiment.progress import Outcome, Progress
from fedhet.launchers.executors import executor


def start(lines: list[str], *, sweep: bool) -> int:
    """Run what the overrides describe: an experiment, a sweep or a run; return the exit code.

    Args:
        lines: the overrides of the command line.
        sweep: whether the overrides may give several values.

    Raises:
        ConfigError: an override is wrong; nothing was run.
    """
    if resuming.is_resumption(lines):
        if sweep:
            raise ConfigError("-m with resume=...: it continues a single run as it was set up")
    elif (experiment := definition.read(lines)) is not None:
        return run(experiment)[0]
    return launch.sweep(lines) if sweep else launch.run(lines)


def run(experiment: Experiment) -> tuple[int, Path]:
    """Run an experiment and write its report; return the exit code and the folder."""
    given = [line for line in experiment.command if key_of(line).startswith("hydra")]
    presets = {
        "hydra/launcher": "processes",
        "hydra.sweep.dir": f"experiments/{experiment.name}",
    }
    own = [f"{key}={value}" for key, value in presets.items() if key not in map(key_of, given)]
    print(f"experiment {experiment.name}: checking its runs", file=sys.stderr)
    code = Code.current()
    launching = composition.launching([f"experiment={experiment.name}", *own, *given])
    progress = Progress(experiment, launching.folder, code, executor(launching))
    try:
        outcome = progress.run()
    except KeyboardInterrupt:
        if progress.began:
            interruptions.forget_interruptions()  # another one ends the report too
            some = count(progress.folder.path, kind="run")[0] > 0
            told = "interrupted" + ("; the report of what is there follows" if some else "")
            print(told, file=sys.stderr)
            _report(progress, None, write=some)
            raise KeyboardInterrupt(told) from None
        raise
    except OtherCode:
        if experiment.on_other_code != "rerun":
            raise
        print("the code has changed: the command starts again, with the new one", file=sys.stderr)
        sys.stdout.flush()
        os.execv(sys.executable, sys.orig_argv)
    reported = _report(progress, outcome)
    failed = FAILED if outcome.missing or not reported else DEGRADED if outcome.degraded else 0
    return failed, progress.folder.path


def _report(progress: Progress, outcome: Outcome | None, *, write: bool = True) -> bool:
    """Say which cells are missing, and `write` the report of those that are there, if it can be.

    Args:
        progress: the experiment.
        outcome: what has become of it; None if it was stopped.
        write: whether there is anything to report.

    Returns:
        Whether there is a report.
    """
    folder, name = progress.folder.path, progress.experiment.name
    if outcome is not None:
        for cell, reason in outcome.missing.items():
            print(f"missing: {cell.label}: {clean(reason)}", file=sys.stderr)
        there = outcome.cells - len(outcome.missing)
        more = f", {outcome.others} more were not asked for" if outcome.others else ""
        say(f"experiment {name}: {there} of {outcome.cells} runs are there{more}")
    else:
        there, every = count(folder)
        say(f"experiment {name}: stopped; {there} of {every} runs are there")
    if not write:
        say(f"run folder: {folder}")
        return False
    with process.imports():
        from fedhet import report
    try:
        written = report.write(folder)
        for sentence in written.sentences:
            say(clean(sentence))
        say(f"report: {written.page}")
        return True
    except ConfigError as error:
        print(f"no report: {error}", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 -- the runs are there, whatever fails in a report
        report_error(error)
    finally:
        say(f"run folder: {folder}")
    return False
