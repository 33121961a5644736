"""Single runs and plain sweeps from the command line."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from omegaconf import OmegaConf

from fedhet.cli.errors import DEGRADED, FAILED, say
from fedhet.config import composition, overrides
from fedhet.config.lines import key_of
from fedhet.core.errors import uncreatable
from fedhet.launchers.executors import Here, PlannedRun, executor, make, make_here
from fedhet.launchers.live import Watch
from fedhet.record.schema import read_object


def run(lines: list[str]) -> int:
    """Make one run, or go on with one, and return the exit code."""
    settings = composition.compose(lines)
    if not settings.resumes:
        composition.refuse_own_plugin(lines)
    made = make_here(make, settings)
    name = f"resume={settings.run_dir}" if settings.resumes else composition.label(lines)
    return DEGRADED if made is not None and is_degraded(made.summary, name) else 0


def sweep(lines: list[str]) -> int:
    """Make all runs of a sweep, and return the exit code.

    Raises:
        ConfigError: an override is wrong; nothing was run.
    """
    composition.check_overrides(lines, sweep=True)
    parsed = overrides.parse(lines)
    fixed = {each.key_or_group for each in parsed if not each.is_sweep_override()}
    every = overrides.product(parsed)
    launching = composition.launching(every[0])
    makes = executor(launching)
    bases = composition.of_sweep()
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
    degraded = False
    for each in runs:
        if each not in failed:
            summary = read_object(each.folder / "summary.json")
            degraded |= is_degraded(summary, each.name)
    for each in failed:
        print(f"failed: {each.name}", file=sys.stderr)  # the reason was printed when it failed
    if not isinstance(makes, Here):  # which tells the folder of each run
        say(f"run folder: {launching.folder}")
    if len(failed) < len(runs):
        say(f"to compare the runs: python -m fedhet report {shlex.quote(str(launching.folder))}")
    return FAILED if failed else DEGRADED if degraded else 0


def is_degraded(summary: dict[str, Any], name: str) -> bool:
    """Whether a run has lost more replies than it was allowed, which is told if so."""
    degraded = bool(summary.get("degraded"))
    if degraded:
        print(
            f"degraded: {name}: it has lost a larger share of its replies than replies.max_lost"
            " allows",
            file=sys.stderr,
        )
    return degraded
