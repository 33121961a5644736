"""`python -m fedhet report`: what it prints, and one clear sentence for what it cannot read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import change, make_experiment, make_run, write

from fedhet.__main__ import main
from fedhet.runs.record.schema import RUNNING


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
    change(folder / "experiment.json", format=99)
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
        (experiment_of_the_future, "has format 99"),
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
    assert "experiment is one in the first and other in" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_what_does_nothing_is_said_of_the_whole_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not only in the log of a run; `idle` is what a piece records in such a round."""
    make_experiment(tmp_path, {"method": ["FedAvg", "FedNorm"], "seed": [0, 1]}, lambda axes: 0.5)
    for cell in ("cell-002", "cell-003"):
        path = tmp_path / "cells" / cell / "rounds.jsonl"
        first, *rest = map(json.loads, path.read_text().splitlines())
        lines = [{**first, "fednorm.idle": 1}, *rest]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(tmp_path)]) == 0
    told = "fednorm changed nothing in 2 of 8 rounds of FedNorm; the log of a run says why."
    assert told in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_the_summary_of_a_part_is_silent_about_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page lists them; one that has failed is in the summary."""
    make_experiment(tmp_path, {"method": ["A", "B"], "seed": [0, 1, 2]}, lambda axes: 0.5)
    for number in (3, 4, 5):
        shutil.rmtree(tmp_path / "cells" / f"cell-00{number}")
    assert main(["report", str(tmp_path)]) == 0
    assert "without a result" not in capsys.readouterr().out
    page = (tmp_path / "report" / "index.html").read_text()
    assert "3 of 6 runs" in page and "cells/cell-005" in page and "<td>not run" in page
    failed = tmp_path / "cells" / "cell-003"
    failed.mkdir()
    write(failed / "cell.json", {"status": "failed", "reason": "the disk is full"})
    assert main(["report", str(tmp_path)]) == 0
    assert "1 run without a result is listed below" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_run_beside_others_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged(two(tmp_path))
    assert main(["report", str(tmp_path)]) == 0
    assert "1 run without a result" in capsys.readouterr().out
    page = (tmp_path / "report" / "index.html").read_text()
    assert "summary.json is damaged" in page and "2 of 3 runs" in page
