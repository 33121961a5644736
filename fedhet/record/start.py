"""The start of a run's record: a new run folder, or that of a run that goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf

from fedhet.checkpoint import reopened
from fedhet.checkpoint.folder import CheckpointFolder
from fedhet.checkpoint.steps import Checkpoints
from fedhet.core.groups import Speed
from fedhet.core.workspace import Workspace
from fedhet.data.given import recorded_config
from fedhet.record.lock import Lock, claim
from fedhet.record.run_folder import Recorder
from fedhet.trackers.tracking import Tracking, tracker_of

if TYPE_CHECKING:
    from fedhet.job import Job

log = logging.getLogger("fedhet")


def start(job: Job) -> tuple[Recorder, Tracking, Checkpoints, Lock]:
    """Create the run folder, or go on in that of an earlier run (resume=...).

    Raises:
        ConfigError: the folder cannot be used, or its run cannot go on.
        RunFailed: a file cannot be written.
    """
    workspace = (
        job.strategy.workspace
    )  # before the folder: settings that do not fit leave none behind
    config = job.config
    tracker = tracker_of(config.cfg)
    cfg = recorded_config(config.cfg, workspace) if job.given else config.cfg
    folder = Path(config.run_dir)
    if not config.resumes:
        folder = claim(folder, explicit=config.run_dir_given)
    with _locked(folder) as lock:
        checkpoints = CheckpointFolder(folder, reopened.digest(cfg))
        found, past = None, None
        if config.resumes:
            reopened.check_run(folder, cfg, job.partition, job.given is not None)
            strategy = job.strategy
            at_sites = job.engine == "flwr"
            found, past = reopened.reopen(
                folder, checkpoints, strategy.timetable, list(strategy.weights), at_sites
            )
            if found:
                strategy.run_id = found.about["run_id"]
        log.info("run folder: %s", folder)
        recorder = Recorder(
            folder,
            _about(job, folder, workspace),
            config=OmegaConf.to_yaml(cfg),
            overrides=config.overrides,
            partition=job.partition,
            environment=_environment(job, workspace),
            past=past,
        )
        recorder.draws = config.run.figures
        tracking = Tracking(config.choices["tracker"], tracker, folder)
        settings: Any = OmegaConf.to_container(cfg)
        tracking.begin(settings, recorder.rows)
    kept = Checkpoints(recorder, checkpoints, config.run.checkpoint_every, found)
    return recorder, tracking, kept, lock


@contextmanager
def _locked(folder: Path) -> Iterator[Lock]:
    """The lock of the folder, which is released if the block fails."""
    lock = Lock(folder)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def _about(job: Job, folder: Path, workspace: Workspace) -> dict[str, Any]:
    """Return the entries of summary.json that are known before the run."""
    choices = job.config.choices
    given = job.given is not None
    return {
        "method": choices["method"],
        "plugins": list(job.config.plugins),
        "server_opt": choices["server_opt"],
        "merge": choices["merge"],
        "dataset": None if given else choices["dataset"],
        "model": type(workspace.model).__name__ if given else choices["model"],
        "partition": {key: job.partition[key] for key in ("name", "clients", "hash")},
        "seed": job.config.run.seed,
        "rounds": job.config.run.rounds,
        "run_dir": str(folder),
        "experiment": job.strategy.run_id,
    }


def _environment(job: Job, workspace: Workspace) -> dict[str, Any]:
    """Return the entries of environment.json that belong to this run."""
    threads = torch.get_num_threads()
    # Equal seeds give equal bytes in this mode only (docs/architecture.md).
    bit_exact = (
        workspace.device.type == "cpu"
        and threads == 1
        and workspace.speed == Speed()
        and not job.config.run.engine.vectorize
        and (
            workspace.simulated or not workspace.noise
        )  # real clients draw noise that no seed repeats
    )
    return {
        "engine": job.engine,
        "device": str(workspace.device),
        "threads": threads,
        "bit_exact": bit_exact,
    }
