"""Run folders that earlier versions of fedhet have written stay readable; their runs do not go on.

format_1/ is of fedhet 0.1.0, of November 24, 2026: `experiment=smoke method=fedavg model=logistic
partition.clients=3 rounds=2 eval.targets=[.01]`. format_2/ is of 0.2.0, commit aaf0dd8f:
`method=scaffold model=logistic partition.clients=3 rounds=2 figures=false checkpoint.every=0
eval.thresholds=[.01]`, with its last checkpoint. Both are without their cards.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedhet
from fedhet.__main__ import main
from fedhet.data.images import digits
from fedhet.study import report


@pytest.fixture(params=["format_1", "format_2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(Path(__file__).parent / request.param, tmp_path / request.param))


@pytest.fixture
def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert folder.name == f"format_{content['format']}"
    return content


def test_the_frames_and_the_run_have_its_records(folder: Path, summary: dict[str, Any]) -> None:
    found, run = fedhet.results(folder), fedhet.load_run(folder)
    (row,) = found.runs.to_dict("records")
    assert row["status"] == "finished" and not found.problems
    for last in (row["acc_global.last"], run.rounds["acc_global"].iloc[-1]):
        assert last == summary["accuracy"]["last"]
    assert row["thresholds.accuracy.0.01.rounds"] == 1
    assert len(found.rounds) == 2 and len(found.clients) == len(run.clients) > 0


@pytest.mark.usefixtures("undrawn")
def test_it_has_a_report(folder: Path) -> None:
    assert report.write(folder).sentences[0].startswith("1 method in one setting with 1 seed")


def test_its_model_predicts_as_it_did(
    folder: Path, summary: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedhet.load(folder).training is False
    test = digits(name="digits", mean=[0.31], std=[0.38]).test
    np.savez(tmp_path / "digits.npz", x_test=test.x.numpy())
    assert main(["predict", str(folder), str(tmp_path / "digits.npz"), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    right = [int(row["prediction"]) == y for row, y in zip(rows, test.y.tolist(), strict=True)]
    assert np.mean(right) == pytest.approx(summary["accuracy"]["last"])


def test_it_does_not_go_on(folder: Path, summary: dict[str, Any]) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(fedhet.ConfigError, match=rf"\(format {summary['format']}\)") as refused:
        fedhet.run([f"resume={folder}", "rounds=3"])
    assert str(folder) in str(refused.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
