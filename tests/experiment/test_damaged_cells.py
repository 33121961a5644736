"""Cells whose records are damaged run again, or are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from experiment.pretend import Pretend

from fedhet.runs.record.schema import FORMAT
from fedhet.study.executors import PlannedRun
from fedhet.study.live import Watch

pytestmark = pytest.mark.usefixtures("own_process")
Write = Callable[..., None]
AXES = "axes: {method: [fedavg, fedsgd], seed: [0, 1, 2]}"


def test_a_damaged_cell_is_run_again(
    write: Write, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    write(AXES)
    assert pretend.run() == 0
    before = pretend.written()
    gutted, damaged, without_code, without_rounds, unknown, whole = [
        pretend.folder / "cells" / name for name in before
    ]
    (gutted / "summary.json").unlink()
    (damaged / "cell.json").write_text("{")
    known = json.loads((without_code / "cell.json").read_text())
    (without_code / "cell.json").write_text(json.dumps({**known, "code": None}))
    (without_rounds / "rounds.jsonl").unlink()
    summary = json.loads((unknown / "summary.json").read_text())
    (unknown / "summary.json").write_text(json.dumps({**summary, "format": 99}))
    capsys.readouterr()
    assert pretend.run() == 0
    assert "6 of 6 runs are there" in capsys.readouterr().out
    assert len(pretend.launched) == 5
    after = pretend.written()
    assert [name for name in before if after[name] == before[name]] == [whole.name]
    assert json.loads((unknown / "summary.json").read_text())["format"] == FORMAT


def test_cells_whose_process_has_died_are_made_alone(
    write: Write, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the others, also when the command ends before they have begun."""
    write(AXES)
    launched: list[PlannedRun] = []

    def interrupted(runs: Sequence[PlannedRun], watch: Watch) -> None:
        launched[:] = runs
        if runs:
            raise KeyboardInterrupt

    def record(folder: Path) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((folder / "cell.json").read_text())
        return content

    monkeypatch.setattr(pretend, "launch", interrupted)
    assert pretend.run() == 130
    assert not any(run.alone for run in launched)
    cells = [run.folder for run in launched]
    ends = [{"status": "running"}, {"status": "failed", "died": True}, {"status": "failed"}]
    for cell, end in zip(cells, ends, strict=False):
        (cell / "cell.json").write_text(json.dumps(record(cell) | end))
    assert pretend.run() == 130
    assert [run.folder for run in launched] == [*cells[2:], *cells[:2]]
    assert [run.alone for run in launched] == [False] * 4 + [True] * 2
    known = [record(run.folder) for run in launched]
    assert {each["status"] for each in known} == {"waiting"}
    assert [each["died"] for each in known] == [False] * 4 + [True] * 2


def test_a_record_that_is_no_object_is_named(
    write: Write, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    write(AXES)
    assert pretend.run() == 0
    (pretend.folder / "experiment.json").write_text("[]")
    capsys.readouterr()
    assert pretend.run() == 2
    assert "experiment.json " in capsys.readouterr().err


def test_damaged_rounds_of_a_trial_are_named(
    write: Write, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    write(f"{AXES}\ntune: {{seeds: [1000], space: {{client.lr: [.1, .2]}}}}")
    lines = ("axes.seed=0", "axes.method=fedavg")
    assert pretend.run(*lines) == 0
    rounds = next(pretend.folder.glob("cells/trial-*")).resolve() / "rounds.jsonl"
    rounds.write_text(rounds.read_text()[:-9])
    capsys.readouterr()
    assert pretend.run(*lines) == 2
    assert f"error: {rounds} " in capsys.readouterr().err
