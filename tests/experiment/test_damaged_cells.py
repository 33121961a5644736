"""Cells whose records are damaged run again, or are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from experiment.mine import SMALL, run, written

pytestmark = pytest.mark.usefixtures("own_process")
Write = Callable[..., None]
TWO = f"""
rounds: 2{SMALL}
axes:
  method: {{FedAvg: method=fedavg, FedSGD: method=fedsgd}}
  seed: [0, 1]
"""


def test_a_damaged_cell_is_run_again(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write(TWO)
    assert run() == 0
    before = written()
    gutted, damaged, without_code, without_rounds = [
        Path("experiments/mine/cells", name) for name in before
    ]
    (gutted / "summary.json").unlink()
    (damaged / "cell.json").write_text("{")
    known = json.loads((without_code / "cell.json").read_text())
    (without_code / "cell.json").write_text(json.dumps({**known, "code": None}))
    (without_rounds / "rounds.jsonl").unlink()
    capsys.readouterr()
    assert run() == 0
    assert "4 of 4 runs are there" in capsys.readouterr().out
    assert not [name for name in before if written()[name] == before[name]]


def test_damaged_rounds_of_a_trial_are_named(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(f"{TWO}\ntune: {{space: {{client.lr: [.1, .2]}}}}")
    assert run("seed=0", "method=fedavg") == 0
    rounds = next(Path("experiments/mine/cells").resolve().glob("trial-*")) / "rounds.jsonl"
    rounds.write_text(rounds.read_text()[:-9])
    capsys.readouterr()
    assert run("seed=0", "method=fedavg") == 2
    assert f"error: {rounds} is damaged" in capsys.readouterr().err
