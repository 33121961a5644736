"""The folder of a run of the first format, as fedhet of November 24, 2026 wrote it, stays readable.

format_1/ is `experiment=smoke method=fedavg model=logistic partition.clients=3 rounds=2
eval.targets=[.01]`, without its card and its best model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import fedhet
from fedhet.study import report

STORED = Path(__file__).parent / "format_1"
SUMMARY = json.loads((STORED / "summary.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "run"))


def test_the_frames_and_the_run_have_its_records(folder: Path) -> None:
    assert SUMMARY["format"] == 1
    found, run = fedhet.results(folder), fedhet.load_run(folder)
    (row,) = found.runs.to_dict("records")
    assert row["status"] == "finished" and not found.problems
    for last in (row["acc_global.last"], run.rounds["acc_global"].iloc[-1]):
        assert last == SUMMARY["accuracy"]["last"]
    assert row["thresholds.accuracy.0.01.rounds"] == 1
    assert len(found.rounds) == 2 and len(found.clients) == len(run.clients) > 0


@pytest.mark.usefixtures("undrawn")
def test_it_has_a_report_and_a_model(folder: Path) -> None:
    assert report.write(folder).sentences[0].startswith("1 method in one setting with 1 seed")
    assert fedhet.load(folder)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_it_does_not_go_on(folder: Path) -> None:
    with pytest.raises(fedhet.ConfigError, match=r"run \(format 1\)"):
        fedhet.run([f"resume={folder}", "rounds=3"])
