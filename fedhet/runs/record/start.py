"""Starts the record of a run, in a new run folder or in the folder of a resumed run.

For a resumed run, it decides whether the run can continue and from which checkpoint, and removes
what the run wrote after it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf

from fedhet.core.errors import ConfigError, log
from fedhet.core.groups import Speed
from fedhet.core.server.phases import TimetableEntry
from fedhet.core.workspace import Workspace
from fedhet.data.storage import as_json, write_text
from fedhet.runs.checkpoint import (
    BEST,
    ROUNDS,
    Checkpoint,
    CheckpointFolder,
    Checkpoints,
    continued,
)
from fedhet.runs.object_task import recorded_config
from fedhet.runs.record.lock import Lock, claim
from fedhet.runs.record.run_folder import Recorder
from fedhet.runs.record.schema import leaves, read_config, read_or_empty, resumable
from fedhet.runs.trackers.tracker import Tracking, tracker_of

if TYPE_CHECKING:
    from fedhet.runs.job import Job

# Settings that may change when a run is resumed.
GIVEN_ANEW = ("rounds", "figures", "engine", "checkpoint", "deliver", "tracker")


def start(job: Job) -> tuple[Recorder, Tracking, Checkpoints, Lock]:
    """Create the run folder, or reopen the folder of an earlier run (resume=...).

    Raises:
        ConfigError: the folder cannot be used, or its run cannot continue.
        RunFailed: a file cannot be written.
    """
    strategy, workspace = job.strategy, job.workspace
    # No folder exists yet, so settings that do not fit together leave none behind.
    config = job.config
    tracker = tracker_of(config.cfg)
    cfg = recorded_config(config.cfg, workspace) if job.object_task else config.cfg
    folder = Path(config.run_dir)
    if not config.resumes:
        folder = claim(folder, explicit=config.run_dir_given)
    with ExitStack() as on_error:
        lock = Lock(folder)
        on_error.callback(lock.release)
        checkpoints = CheckpointFolder(folder, digest(cfg))
        found = None
        if config.resumes:
            check_run(folder, cfg, job.partition, job.object_task is not None)
            at_sites = job.engine == "flwr"
            found = reopen(
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
            resumes=config.resumes,
            past=found.about if found else None,
        )
        recorder.draws = config.run.figures
        tracking = Tracking(config.choices["tracker"], tracker, folder)
        settings: Any = OmegaConf.to_container(cfg)
        tracking.begin(settings, recorder.rows)
        on_error.pop_all()
    kept = Checkpoints(recorder, checkpoints, config.run.checkpoint_every, found)
    return recorder, tracking, kept, lock


def _about(job: Job, folder: Path, workspace: Workspace) -> dict[str, Any]:
    """Return the entries of summary.json that are known before the run."""
    choices = job.config.choices
    given = job.object_task is not None
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
    # Equal seeds give equal bytes only if none of these holds (docs/architecture.md).
    reasons = {
        f"device={workspace.device.type}": workspace.device.type != "cpu",
        f"{threads} threads": threads != 1,
        "engine.compile, amp or channels_last": workspace.speed != Speed(),
        f"engine.fused: {job.together} clients in one batch": job.together > 0,
        "clients train by a loop of the app's owner": job.own_loop,
        "real clients draw noise without a seed": workspace.noise and not workspace.simulated,
    }
    why_not = [reason for reason, holds in reasons.items() if holds]
    return {
        "engine": job.engine,
        "device": str(workspace.device),
        "threads": threads,
        "own_loop": job.own_loop,
        "bit_exact": not why_not,
        "why_not_exact": why_not,
    }


# ---- a resumed run
def digest(cfg: DictConfig) -> str:
    """Return the hash of the settings that cannot change when a run is resumed."""
    text = json.dumps(_fixed(OmegaConf.to_container(cfg)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _fixed(settings: Any) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in GIVEN_ANEW}


def check_run(folder: Path, cfg: DictConfig, partition: Mapping[str, Any], given: bool) -> None:
    """Refuse to resume a run that has ended, or that would not be the same run.

    Args:
        folder: the run folder.
        cfg: the settings with which it would continue.
        partition: the content of partition.json with which it would continue.
        given: whether the task is given as objects.

    Raises:
        ConfigError: the run cannot continue; the message says why.
        DataError: its config.yaml is damaged.
    """
    summary = resumable(folder)
    if summary and given != (summary["dataset"] is None):
        raise ConfigError(
            f"resume={folder}: the task of this run was "
            + ("not given as objects" if given else "given as objects; give it again, as task=...")
        )
    before = OmegaConf.to_container(read_config(folder))
    was, now = (dict(leaves(_fixed(each))) for each in (before, OmegaConf.to_container(cfg)))
    for key in {**was, **now}:
        if was.get(key) != now.get(key):
            raise ConfigError(
                f"resume={folder}: {key} was {was.get(key)} in this run, and would now be"
                f" {now.get(key)}: the settings, conf/, the task or the version of fedhet have"
                " changed"
            )
    recorded = read_or_empty(folder / "partition.json")
    if recorded and recorded != json.loads(as_json(partition)):
        raise ConfigError(
            f"resume={folder}: the clients' data differ from the run's partition.json"
        )
    if summary.get("status") == "ok":
        executed = next(p["rounds"] for p in summary["phases"] if p["name"] == "train")
        if executed < summary["rounds"]:
            raise ConfigError(
                f"resume={folder}: the run has ended, because early stopping ended its training"
                f" after {executed} rounds"
            )
        if cfg.rounds <= executed:
            raise ConfigError(
                f"resume={folder}: the run has ended; rounds=<more than {executed}> continues it"
            )


def reopen(
    folder: Path,
    checkpoints: CheckpointFolder,
    timetable: Sequence[TimetableEntry],
    slots: Sequence[str],
    at_sites: bool,
) -> Checkpoint | None:
    """Reset the run folder to its last checkpoint, or to the beginning of the run.

    Args:
        folder: the run folder; `check_run` has accepted it.
        checkpoints: its checkpoints.
        timetable: the phases that are planned now.
        slots: the names of the run's weights.
        at_sites: whether the clients will store their states themselves.

    Raises:
        ConfigError: the run cannot continue with these settings; nothing was changed.
    """
    found = checkpoints.find()
    if found is not None:
        if found.states and found.about["at_sites"] != at_sites:
            where = "at its clients' sites" if found.about["at_sites"] else "in its checkpoints"
            raise ConfigError(
                f"resume={folder}: the states of this run's clients are {where}, and"
                f" engine={'flwr' if at_sites else 'local and engine=ray'} cannot read them there"
            )
        executed = found.round - sum(entry.rounds for entry in continued(timetable, found)[:-1])
        if executed > timetable[-1].rounds:
            raise ConfigError(
                f"resume={folder}: rounds={timetable[-1].rounds}, but the run has taken {executed}"
            )
        log.warning("the run continues after round %d", found.round)
    else:
        log.warning("the run has no checkpoint that can be used; it starts from its beginning")
    checkpoints.prune()
    _cut(folder, found, {entry.name for entry in timetable} - {"train"}, slots)
    return found


# ---- what came after the checkpoint
def _cut(
    folder: Path,
    found: Checkpoint | None,
    before: Collection[str],
    slots: Sequence[str],
) -> None:
    """Remove what the run wrote after the checkpoint, because the run will write it again.

    Args:
        folder: the run folder.
        found: the checkpoint; None for the beginning of the run.
        before: the names of the phases before the training.
        slots: the names of the run's weights.
    """
    rows = found.about["rows"] if found else []
    for place in (folder, folder / "clients", folder / "arrays"):
        # Partial files that a killed process was writing, by itself or by safetensors.
        for path in (*place.glob(".*.part"), *place.glob(".tmp??????")):
            path.unlink()
    for name in (*(f"{slot}.safetensors" for slot in slots), ".summary.json.spare", BEST):
        (folder / name).unlink(missing_ok=True)
    for name in ("personal", "figures"):
        shutil.rmtree(folder / name, ignore_errors=True)
    write_text(folder / ROUNDS, "".join(map(as_json, rows)))
    if found is not None and (found.folder / BEST).exists():
        shutil.copyfile(found.folder / BEST, folder / BEST)
    executed = Counter(row["phase"] if row["phase"] in before else "train" for row in rows)
    for path in (*folder.glob("clients/*-*.*"), *folder.glob("arrays/*-*.*")):
        name, _, step = path.stem.rpartition("-")
        last = executed[name if name in before else "train"]
        if path.parent.name == "clients":
            last = found.round if found else 0
        if int(step) > last:
            path.unlink()
