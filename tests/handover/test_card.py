"""model_card.md says what the run's own files say."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pandas
import pytest

import fedhet
from fedhet.runs.record import card


def rows(run: fedhet.Run) -> list[list[str]]:
    text = (run.dir / "model_card.md").read_text()
    return [
        [cell.strip().replace("\\", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


def test_it_has_the_digest_and_the_data(of_a_table: fedhet.Run) -> None:
    found = {row[0]: row[1] for row in rows(of_a_table)}
    file = of_a_table.dir / "model.safetensors"
    assert found["SHA-256 of the file"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert found["digest of the weights (weights_sha256)"] == of_a_table.summary["weights_sha256"]
    assert found["2 classes"] == "benign, malignant"
    assert found["columns"] == "radius, texture, area"
    assert found["rounds"] == "2 of train"
    assert found["seed"] == "0"
    assert "torch " in found["versions"]


def test_its_scores_have_the_range_over_the_clients(of_a_table: fedhet.Run) -> None:
    scores = [row for row in rows(of_a_table) if row[0].startswith("accuracy of")]
    assert scores[0][3] == f"{of_a_table.summary['accuracy']['last']:.4f}"
    frame = of_a_table.clients
    last = frame[(frame["round"] == 2) & (frame.metric == "accuracy")]
    for view in ("global", "personal"):
        for split in ("test", "val"):
            values = last[(last.model == view) & (last["split"] == split)].value
            expected = [values.mean(), values.min(), values.max()]
            (row,) = [s for s in scores if view in s[0] and s[1] == f"clients, {split}"]
            assert row[2:] == ["2", *(f"{value:.4f}" for value in expected)]
            assert isinstance(values, pandas.Series)


def test_names_of_the_data_are_no_mark_up() -> None:
    assert card.escaped("a|b\n# <c> `d`") == "a\\|b\\n\\# \\<c\\> \\`d\\`".replace("\\n", "\\\\n")


def test_a_card_that_cannot_be_written_fails_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(card, "write_text", fail)
    lines = ["method=fedavg", "model=logistic", "rounds=1", "figures=false"]
    run = fedhet.run([*lines, f"hydra.run.dir={tmp_path}/run"])
    assert run.summary["status"] == "ok"
    assert "no model_card.md: the disk is full" in caplog.text


def test_a_run_that_failed_has_none(tmp_path: Path) -> None:
    with pytest.raises(fedhet.RunFailed):
        fedhet.run(
            [
                "method=fedavg",
                "client.lr=1e30",
                "model=logistic",
                "rounds=2",
                f"hydra.run.dir={tmp_path}/run",
            ]
        )
    assert (tmp_path / "run" / "summary.json").exists()
    assert not (tmp_path / "run" / "model_card.md").exists()
