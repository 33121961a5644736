"""Checks that a killed run resumes and ends like an uninterrupted run."""

from __future__ import annotations

import filecmp
import json
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest import mock

from fedhet.core.errors import RunFailed
from fedhet.core.server.loop import Loop
from fedhet.core.task import Task
from fedhet.runs import config
from fedhet.runs.checkpoint import Checkpoints
from fedhet.runs.record.outcome import Run
from fedhet.testing.whole_runs import run_quietly

RECORD = ("seconds", "memory", "run_dir", "experiment")
ELSEWHERE = (
    *RECORD,
    "environment.json",
    "overrides.yaml",
    "checkpoints",
    "figures",
    "model_card.md",
)


def check_resume(*overrides: str, task: Task | None = None, again: tuple[str, ...] = ()) -> None:
    """Kill a run after each of its steps, resume it, and check that the results are the same.

    A checkpoint holds only the state that a method's or plug-in's functions return to the server.
    This state must consist of tensors, numbers, lists and dicts.

    Args:
        overrides: the settings, such as "method=fedmine" and "rounds=3".
        task: replaces the configured dataset, partition and model.
        again: settings to change when the run resumes, such as "engine.workers=2".

    Raises:
        AssertionError: a result differs; the message says which one, and after which step the run
            was killed.
    """
    with tempfile.TemporaryDirectory(prefix="fedhet-test-") as home:
        whole = Path(home, "whole")
        killed: list[Path] = []
        write, begin = Checkpoints._write, Checkpoints.begun

        def writing(checkpoints: Checkpoints, loop: Loop) -> None:
            write(checkpoints, loop)
            killed.append(Path(home, f"killed-{len(killed) + 1}"))
            shutil.copytree(whole, killed[-1])

        def beginning(checkpoints: Checkpoints, loop: Loop) -> None:
            begin(checkpoints, loop)
            assert loop.round, "the resumed run used no checkpoint"

        settings = config.compose([*overrides, "checkpoint.every=0"])
        with mock.patch.object(Checkpoints, "_write", writing):
            run = run_quietly(settings, whole, task)
        steps = (whole / "rounds.jsonl").read_text().count("\n")
        assert len(killed) == steps, f"{len(killed)} of {steps} steps wrote a checkpoint"
        again_settings = config.compose([f"resume={killed[0]}", *again])
        for step, folder in enumerate(killed, 1):
            what = f"killed after step {step}"
            written = sorted(path.name for path in (folder / "checkpoints").glob("0*"))
            assert written[-1:] == [f"{step:06d}"], (
                f"{what}: its checkpoints {written} lack the one of this step; the log says why"
            )
            with mock.patch.object(Checkpoints, "begun", beginning):
                try:
                    resumed = run_quietly(again_settings, folder, task)
                except RunFailed as error:
                    raise AssertionError(f"{what}: {error}") from error
            check_equal(run, resumed, what, ignored=["config.yaml"] if again else [])


def check_equal(one: Run, other: Run, what: str, ignored: Collection[str] = ()) -> None:
    """Check that the records of two runs are equal byte for byte.

    Seconds, memory and paths may differ, and the files in ELSEWHERE.

    Args:
        one: the first run.
        other: the second run.
        what: the beginning of an error's message.
        ignored: files that may differ.

    Raises:
        AssertionError: the runs differ; the message says where.
    """
    lines = [(run.dir / "rounds.jsonl").read_text().splitlines() for run in (one, other)]
    assert len(lines[0]) == len(lines[1]), f"{what}: {len(lines[1])} steps, not {len(lines[0])}"
    for before, after in zip(*lines, strict=True):
        _same(json.loads(before), json.loads(after), f"{what}: round {json.loads(before)['round']}")
    _same(one.summary, other.summary, f"{what}: summary")
    files = [_files(run.dir) for run in (one, other)]
    assert files[0] == files[1], f"{what}: the files {sorted(files[0] ^ files[1])} are in one only"
    for name in sorted(files[0] - set(ignored)):
        same = filecmp.cmp(one.dir / name, other.dir / name, shallow=False)
        assert same, f"{what}: {name} differs"


def _same(one: Any, other: Any, what: str) -> None:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            if key not in ELSEWHERE:
                _same(one.get(key), other.get(key), f"{what}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, pair in enumerate(zip(one, other, strict=True)):
            _same(*pair, f"{what}.{i}")
    else:
        assert one == other, f"{what}: {other}, not {one}"


def _files(folder: Path) -> set[str]:
    """Return the files that must be equal."""
    records = {"rounds.jsonl", "summary.json", *ELSEWHERE}
    names = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {str(name) for name in names if name.parts[0] not in records}
