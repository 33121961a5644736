"""Runs, sweeps and experiments from the command line."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedhet.core.errors import ConfigError, OtherCode, clean, uncreatable
from fedhet.data.forms import read_object
from fedhet.runs import process
from fedhet.runs.cli.exits import DEGRADED, FAILED, report_error, say
from fedhet.runs.cli.help import columns
from fedhet.runs.config import composition, overrides, resuming
from fedhet.runs.config.lines import key_of, refuse_repeated
from fedhet.study import by_hydra, definition
from fedhet.study.cells import check, covering
from fedhet.study.code import Code
from fedhet.study.definition import Experiment
from fedhet.study.executors import Here, PlannedRun, executor, make, make_here
from fedhet.study.folder import count
from fedhet.study.live import Watch
from fedhet.study.progress import Outcome, Progress


def start(lines: list[str], *, sweep: bool, dry: bool = False) -> int:
    """Run the experiment, sweep or run that the overrides describe; return the exit code.

    Args:
        lines: the overrides of the command line.
        sweep: whether the overrides may give several values.
        dry: whether to print only what an experiment would run and how long this takes.

    Raises:
        ConfigError: an override is wrong; nothing was run.
    """
    refuse_repeated(lines)
    hydras = by_hydra.is_asked(lines)
    if resuming.is_resumption(lines):
        if sweep:
            raise ConfigError("-m with resume=...: resume continues one run with its own settings")
    elif (experiment := definition.read(lines)) is not None:
        if hydras:
            raise ConfigError(
                f"experiment={experiment.name} makes its runs itself. Of Hydra's own settings, it"
                " accepts hydra/launcher=processes, basic, ray and submitit_slurm only"
            )
        return _foretell(experiment) if dry else run_experiment(experiment)[0]
    if dry:
        raise ConfigError("--dry-run needs an experiment, as in experiment=first_look --dry-run")
    if hydras:
        by_hydra.start(lines, sweep=sweep)
        return 0
    return _sweep(lines) if sweep else _run(lines)


def _run(lines: list[str]) -> int:
    """Make one run, or resume it, and return the exit code."""
    settings = composition.compose(lines)
    made = make_here(make, settings)
    name = f"resume={settings.run_dir}" if settings.resumes else composition.label(lines)
    return DEGRADED if made is not None and is_degraded(made.summary, name) else 0


def _sweep(lines: list[str]) -> int:
    """Make all runs of a sweep, and return the exit code.

    Raises:
        ConfigError: an override is wrong; nothing was run.
    """
    bases = composition.of_sweep()
    every = composition.sweep_runs(lines, bases)
    parsed = overrides.parse(lines)
    fixed = {each.key_or_group for each in parsed if not each.is_sweep_override()}
    launching = composition.launching(every[0])
    makes = executor(launching)
    runs = []
    for number, own in enumerate(every):
        varied = ",".join(sorted(line for line in own if key_of(line) not in fixed))
        subfolder = composition.subfolder(own, number, varied, bases)
        label = composition.label(own, fixed)
        runs.append(PlannedRun(number, label, own, launching.folder / subfolder))
    try:
        launching.folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(lines), launching.folder / "multirun.yaml")
    except OSError as error:
        raise uncreatable("hydra.sweep.dir", launching.folder, error) from error
    with Watch(len(runs)) as watch:
        failed = makes.launch(runs, watch)
    degraded = [
        is_degraded(read_object(each.folder / "summary.json"), each.name)
        for each in runs
        if each not in failed
    ]
    for each in failed:
        print(f"failed: {each.name}", file=sys.stderr)  # the reason was printed before
    if not isinstance(makes, Here):  # `Here` prints the folder of each run
        say(f"run folder: {launching.folder}")
    if len(failed) < len(runs):
        say(f"to compare the runs: python -m fedhet report {shlex.quote(str(launching.folder))}")
    return FAILED if failed else DEGRADED if any(degraded) else 0


def is_degraded(summary: dict[str, Any], name: str) -> bool:
    """Whether a run has lost more replies than `replies.max_lost` allows; print a line if so."""
    degraded = bool(summary.get("degraded"))
    if degraded:
        print(
            f"degraded: {name}: the run has lost a larger share of its replies than"
            " replies.max_lost allows",
            file=sys.stderr,
        )
    return degraded


def _foretell(experiment: Experiment) -> int:
    """Print what an experiment would run and how long this takes; return the exit code."""
    from fedhet.study.estimate import estimate

    check(covering(experiment))
    found = estimate(experiment)
    print(columns(found.rows()))
    print(found)
    places = executor(_launching(experiment)).places
    print(found.side_by_side(min(places, found.runs + found.trials)))
    return 0


def _launching(experiment: Experiment) -> composition.Launching:
    """Return the folder and the launcher of an experiment's runs."""
    given = [line for line in experiment.command if key_of(line).startswith("hydra")]
    presets = {
        "hydra/launcher": "processes",
        "hydra.sweep.dir": f"experiments/{experiment.name}",
    }
    own = [f"{key}={value}" for key, value in presets.items() if key not in map(key_of, given)]
    return composition.launching([f"experiment={experiment.name}", *own, *given])


def run_experiment(experiment: Experiment) -> tuple[int, Path]:
    """Run an experiment and write its report; return the exit code and the folder."""
    code = Code.current()
    launching = _launching(experiment)
    progress = Progress(experiment, launching.folder, code, executor(launching))
    path = progress.folder.path
    print(f"experiment {experiment.name}: checking {progress}", file=sys.stderr)
    try:
        outcome = progress.run()
    except KeyboardInterrupt:
        there, every = count(path)
        if every:
            say(f"experiment {experiment.name}: stopped; {there} of {every} runs are complete")
            say(f"run folder: {path}")
        raise
    except OtherCode:
        if experiment.on_other_code != "rerun":
            raise
        print("the code has changed: the command starts again with the new code", file=sys.stderr)
        sys.stdout.flush()
        os.execv(sys.executable, sys.orig_argv)
    reported = _report(experiment.name, path, outcome)
    failed = FAILED if outcome.missing or not reported else DEGRADED if outcome.degraded else 0
    return failed, path


def _report(name: str, folder: Path, outcome: Outcome) -> bool:
    """Print the missing runs of an experiment, and write its report.

    Returns:
        Whether the report was written.
    """
    for cell, reason in outcome.missing.items():
        print(f"missing: {cell.label}: {clean(reason)}", file=sys.stderr)
    there = outcome.cells - len(outcome.missing)
    more = f"; {outcome.others} other runs were not requested" if outcome.others else ""
    say(f"experiment {name}: {there} of {outcome.cells} runs are complete{more}")
    with process.imports():
        from fedhet.study import report
    try:
        written = report.write(folder)
        for sentence in written.sentences:
            say(clean(sentence))
        say(f"report: {written.page}")
        return True
    except ConfigError as error:
        print(f"no report: {error}", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 -- an error in the report must not lose the runs
        report_error(error)
    finally:
        say(f"run folder: {folder}")
    return False
