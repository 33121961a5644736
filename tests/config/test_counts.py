"""Messages say "1 client", not "1 clients"."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import fedhet
from fedhet import __main__ as main
from fedhet.core.check import counted
from fedhet.data.toy import toy_task
from fedhet.runs.record.terminal import log_step, step_line

WRONG = re.compile(r"\b1 (clients|samples|evaluations|classes|components|entries|times)\b")
pytestmark = pytest.mark.usefixtures("own_process")


def test_counted() -> None:
    assert [counted(n, "client") for n in range(3)] == ["0 clients", "1 client", "2 clients"]
    assert [counted(n, "class", "classes") for n in (1, 2)] == ["1 class", "2 classes"]


def test_a_federation_of_one_client(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("fedhet.runs.record.figures.draw", lambda *args: [])
    assert main.main(["data", "describe", "partition.clients=1", "--out", str(tmp_path)]) == 0
    with caplog.at_level(logging.INFO, "fedhet"):
        run = fedhet.run(
            ["early_stopping.patience=1", "client.lr=1e-9", f"hydra.run.dir={tmp_path / 'run'}"],
            task=toy_task(1),
        )
        row = {
            "phase": "train",
            "step": 1,
            "acc_global": None,
            "acc_clients_mean": None,
            "loss_global": None,
            "failures": [{"pid": 0, "phase": phase} for phase in ("train", "evaluate")],
            "cohort": [0],
            "seconds": {},
        }
        log_step(row)
    assert run.summary["partition"]["clients"] == 1
    assert step_line(row) == "train 1, 1 client failed"
    printed = capsys.readouterr().out
    assert "1 client, 1437 of 1437 samples" in printed
    assert "given as a Task, 1 client; model" in printed
    assert not WRONG.search(printed)
    assert "1 client, 0.00 s" in caplog.text
    assert not WRONG.search(caplog.text), caplog.text
