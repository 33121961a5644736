"""`python -m fedhet report`: what it prints, and one clear sentence for what it cannot read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import change, make_experiment, make_run

from fedhet.cli.main import main
from fedhet.record.run_folder import RUNNING


def two(folder: Path) -> Path:
    make_run(folder / "a", [0.5, 0.6])
    make_run(folder / "b", [0.5, 0.7], method="scaffold")
    return folder


@pytest.mark.usefixtures("undrawn")
def test_it_prints_its_summary_and_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(two(tmp_path)), "--out", str(tmp_path / "there")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 methods in one setting with 1 seed, by accuracy")
    wanted = "Not tested, because a table of 1 comparison needs 6 seeds (seed=range(0,6)): "
    assert lines[1] == wanted + "scaffold (+0.100)."
    assert lines[-1] == f"report: {tmp_path / 'there' / 'index.html'}"
    assert (tmp_path / "there" / "index.html").exists()


def older(folder: Path) -> Path:
    change(make_run(folder / "run", [0.5]) / "summary.json", format=0)
    return folder


def damaged(folder: Path) -> Path:
    (make_run(folder / "run", [0.5]) / "summary.json").write_text('{"format": 1')
    return folder


def incomplete(folder: Path) -> Path:
    (make_run(folder / "run", [0.5]) / "summary.json").write_text('{"format": 1}')
    return folder


def running(folder: Path) -> Path:
    make_run(folder / "run", [], status="interrupted", reason=RUNNING, loss=None)
    return folder


def experiment_of_the_future(folder: Path) -> Path:
    make_experiment(folder, {"method": ["A"]}, lambda axes: 0.5)
    change(folder / "experiment.json", format=3)
    return folder


def damaged_experiment(folder: Path) -> Path:
    (make_experiment(folder, {"method": ["A"]}, lambda _: 0.5) / "experiment.json").write_text("[")
    return folder


def nothing_run(folder: Path) -> Path:
    return make_experiment(folder, {"method": ["A", "B"]}, lambda axes: None)


def wrong_metric(folder: Path) -> Path:
    report = {"compare": "method", "metric": "lats", "reference": None}
    return make_experiment(folder, {"method": ["A"]}, lambda axes: 0.5, report=report)


def experiments(folder: Path) -> Path:
    for name in ("one", "other"):
        make_experiment(folder / name, {"method": ["A"]}, lambda axes: 0.5, name=name)
    return folder


def empty(folder: Path) -> Path:
    return folder


def no_folder(folder: Path) -> Path:
    return folder / "missing"


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (empty, "has no runs"),
        (no_folder, "is not a folder"),
        (older, "run: its format is 0"),
        (damaged, "run: summary.json is damaged"),
        (incomplete, "run: summary.json is damaged: status is missing"),
        (running, "still running, or it was killed"),
        (experiment_of_the_future, "has format 3"),
        (damaged_experiment, "experiment.json is damaged"),
        (nothing_run, "cells/cell-000: not run"),
        (experiments, "the experiments one, other"),
        (
            wrong_metric,
            "report.metric=lats is not allowed (did you mean last",
        ),
    ],
)
def test_one_sentence_for_what_cannot_be_reported(
    made: Callable[[Path], Path],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = made(tmp_path)
    assert main(["report", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1 and told in captured.err
    assert not (tmp_path / "report").exists()


def test_folders_of_two_experiments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "other"):
        make_experiment(tmp_path / name, {"method": ["A"]}, lambda axes: 0.5, name=name)
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "other")]) == 2
    assert "('one' and 'other')" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_run_beside_others_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged(two(tmp_path))
    assert main(["report", str(tmp_path)]) == 0
    assert "1 run without a result" in capsys.readouterr().out
    page = (tmp_path / "report" / "index.html").read_text()
    assert "summary.json is damaged" in page and "2 of 3 runs" in page
