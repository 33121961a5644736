"""Experiments with axes from the command line; everything else is a run or a sweep of Hydra."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fedhet import process
from fedhet.cli.errors import DEGRADED, FAILED, report_error, say
from fedhet.cli.launch import HydraTask, apply_hydra, launch, warm
from fedhet.config import resuming
from fedhet.config.lines import key_of
from fedhet.core import interruptions
from fedhet.core.errors import ConfigError, OtherCode, clean
from fedhet.experiment import definition
from fedhet.experiment.code import Code
from fedhet.experiment.definition import Experiment
from fedhet.experiment.folder import count


def start(overrides: list[str], flags: list[str], *, sweep: bool) -> int:
    """Run what the overrides describe: an experiment, a sweep or a run; return the exit code.

    Args:
        overrides: the overrides of the command line.
        flags: its other arguments, which Hydra reads.
        sweep: whether the overrides may give several values.

    Raises:
        ConfigError: an override is wrong; nothing was run.
    """
    only_shown = {"-c", "--cfg"} & set(flags)
    if only_shown and {"-m", "--multirun"} & set(flags):
        raise ConfigError(f"{min(only_shown)} with -m: it shows one configuration; leave out -m")
    if only_shown or resuming.is_resumption(overrides):
        return launch(overrides, flags, sweep=sweep)
    experiment = definition.read(overrides)
    if experiment is None:
        return launch(overrides, flags, sweep=sweep)
    return run(experiment, flags)[0]


def run(experiment: Experiment, flags: list[str]) -> tuple[int, Path]:
    """Run an experiment and write its report; return the exit code and the folder."""
    given = [line for line in experiment.command if key_of(line).startswith("hydra")]
    keys = set(map(key_of, given))
    presets = {
        "hydra/sweeper": "experiment",
        "hydra/launcher": "processes",
        "hydra.sweep.dir": f"experiments/{experiment.name}",
    }
    own = [f"{key}={value}" for key, value in presets.items() if key not in keys]
    flags = [flag for flag in flags if flag not in ("-m", "--multirun")]
    print(f"experiment {experiment.name}: checking its runs", file=sys.stderr)
    task = HydraTask(experiment, Code.current())
    overrides = [f"experiment={experiment.name}", *own, *given]
    warm(overrides)
    try:
        apply_hydra(task, ["-m", *flags], overrides, setting="hydra.sweep.dir")
    except KeyboardInterrupt:
        if task.started is not None:
            interruptions.forget_interruptions()  # another one ends the report too
            some = count(task.started, kind="run")[0] > 0
            told = "interrupted" + ("; the report of what is there follows" if some else "")
            print(told, file=sys.stderr)
            _report(experiment, task, write=some)
            raise KeyboardInterrupt(told) from None
        raise
    except OtherCode:
        if experiment.on_other_code != "rerun":
            raise
        print("the code has changed: the command starts again, with the new one", file=sys.stderr)
        sys.stdout.flush()
        os.execv(sys.executable, sys.orig_argv)
    outcome, folder = task.outcome, task.started
    assert outcome is not None and folder is not None  # the sweeper has set them
    reported = _report(experiment, task)
    code = FAILED if outcome.missing or not reported else DEGRADED if outcome.degraded else 0
    return code, folder


def _report(experiment: Experiment, task: HydraTask, *, write: bool = True) -> bool:
    """Say which cells are missing, and `write` the report of those that are there, if it can be.

    Returns:
        Whether there is a report.
    """
    folder = task.started
    assert folder is not None
    if task.outcome is not None:
        for cell, reason in task.outcome.missing.items():
            print(f"missing: {cell.label}: {clean(reason)}", file=sys.stderr)
        there = task.outcome.cells - len(task.outcome.missing)
        more = f", {task.outcome.others} more were not asked for" if task.outcome.others else ""
        say(f"experiment {experiment.name}: {there} of {task.outcome.cells} runs are there{more}")
    else:
        there, every = count(folder)
        say(f"experiment {experiment.name}: stopped; {there} of {every} runs are there")
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
