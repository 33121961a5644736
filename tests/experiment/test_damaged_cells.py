"""Cells whose records are damaged run again, or are named."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from experiment.pretend import Pretend

from fedhet.runs.record.schema import FORMAT

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
    assert "6 of 6 runs are complete" in capsys.readouterr().out
    assert len(pretend.launched) == 5
    after = pretend.written()
    assert [name for name in before if after[name] == before[name]] == [whole.name]
    assert json.loads((unknown / "summary.json").read_text())["format"] == FORMAT


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
