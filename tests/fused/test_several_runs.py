"""Several runs in one process share their steps, and nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedhet.core.interruptions import signals_noted
from fedhet.runs.config import composition
from fedhet.study import executors
from fedhet.study.executors import PlannedRun, Processes, carry_out
from fedhet.study.live import Watch

LINES = [
    "method=fednorm",
    "model.hidden=[8]",
    "partition.clients=4",
    "client.epochs=1",
    "figures=false",
    "engine.fused=3",
    "rounds=3",
]
ROOT = Path(__file__).parents[2]


def planned(folder: Path, every: Sequence[Sequence[str]]) -> list[PlannedRun]:
    return [
        PlannedRun(i, f"run {i}", (*LINES, *own), folder / str(i)) for i, own in enumerate(every)
    ]


def steps(folder: Path) -> list[str]:
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line)["weights_sha256"] for line in lines]


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_each_run_is_what_it_is_alone(
    tmp_path: Path, launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is shorter, one diverges, one cannot begin, one calls sys.exit in the middle."""
    monkeypatch.setenv("FEDHET_TRUST", "faulty")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "engines"))
    every = [
        ["seed=1"],
        ["seed=2", "client.lr=0.05", "partition.alpha=5"],
        ["rounds=1", "client.momentum=0.5"],
        ["client.lr=1e30"],
        ["dataset=mnist", "data_dir=/nowhere"],
        ["plugin.fednorm._target_=faulty.Faulty", "plugin.fednorm.z_when=leaves"],
    ]
    runs = planned(tmp_path, every)
    for run in runs:
        run.prepare()
    bases = composition.of_sweep()
    printed = sys.stdout
    with signals_noted():
        carry_out([(run, run.composed(bases)) for run in runs], str(ROOT))
    assert sys.stdout is printed
    for run, own in zip(runs[:3], every, strict=False):
        alone = launch(*LINES, *own)
        assert steps(run.folder) == steps(alone.dir)
        assert summary(run.folder)["seconds_shared"] and not alone.summary["seconds_shared"]
        log = (run.folder / "log.txt").read_text()
        assert log.count("train ") == 1 + len(steps(run.folder))  # and the table has one
    assert summary(runs[5].folder)["status"] == "failed"
    reasons = ("holds NaN", "data not found", "SystemExit(0): code of the run")
    for run, reason in zip(runs[3:], reasons, strict=True):
        state = json.loads((run.folder / "cell.json").read_text())
        assert state["status"] == "failed" and reason in state["reason"], state
        assert reason in (run.folder / "log.txt").read_text()


def test_which_runs_share_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "MOST_RUNS", 2)
    off = ["engine.fused=off"]
    every = [["seed=1"], off, ["seed=2", "partition=iid"], ["client.lr=1"], ["method=fedavg"], off]
    runs = planned(tmp_path, every)
    bases = composition.of_sweep()
    groups = Processes(2).together(runs, bases)
    assert [[run.number for run in group] for group in groups] == [[0, 2], [3], [1], [5], [4]]
    groups = Processes(1).together(runs, bases)
    assert [[run.number for run in group] for group in groups] == [[0, 2], [3], [1], [5], [4]]


@pytest.mark.slow
def test_a_process_that_is_killed_costs_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: Callable[..., Any]
) -> None:
    monkeypatch.setenv("FEDHET_TRUST", "faulty")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "engines"))
    monkeypatch.chdir(ROOT / "tests" / "engines")
    faulty = "plugin.fednorm._target_=faulty.Faulty"
    every = [[faulty, f"plugin.fednorm.z_when={when}"] for when in ("killed", "never")]
    every += [["method=fedavg"]]
    runs = planned(tmp_path, every)
    failed = Processes(1).launch(runs, Watch(3))
    assert [*failed] == runs[:1]
    assert failed[runs[0]].startswith(f"its process was ended by {signal.SIGKILL.name}")
    assert steps(runs[1].folder) == steps(launch(*LINES, *every[1]).dir)


@pytest.mark.slow
@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_group_goes_on(tmp_path: Path, signal_: signal.Signals) -> None:
    """All of its runs go on from their checkpoints, and end with the bytes of others."""
    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "# @package _global_\nmodel: {hidden: [8]}\nclient: {epochs: 1}\nrounds: 40\n"
        "partition: {clients: 3}\ncheckpoint: {every: 0}\naxes: {method: [fedavg], seed: [0, 1, 2]}"
    )
    command = [sys.executable, "-m", "fedhet", f"--config-dir={folder.parent}", "experiment=mine"]
    command += ["hydra/launcher=processes", "hydra.launcher.workers=1"]

    def started(name: str) -> subprocess.Popen[str]:
        lines = [*command, f"hydra.sweep.dir={tmp_path / name}"]
        return subprocess.Popen(lines, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    whole, stopped = started("whole"), started("stopped")
    cells = tmp_path / "stopped" / "cells"
    deadline = time.monotonic() + 300
    while not any(f.read_bytes().count(b"\n") >= 5 for f in cells.glob("*/rounds.jsonl")):
        assert stopped.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    begun = [*cells.iterdir()]
    assert len(begun) == 3
    stopped.send_signal(signal_)
    stopped.communicate(timeout=60)
    assert stopped.returncode == (130 if signal_ == signal.SIGINT else -signal.SIGKILL)
    if signal_ == signal.SIGINT:
        assert {summary(cell)["status"] for cell in begun} == {"interrupted"}
    again = started("stopped")
    assert again.communicate(timeout=300) and again.returncode == 0
    assert whole.communicate(timeout=300) and whole.returncode == 0
    for cell in begun:
        assert steps(cell) == steps(tmp_path / "whole" / "cells" / cell.name)
        assert "the run continues after round" in (cell / "log.txt").read_text()
