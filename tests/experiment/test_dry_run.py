"""`--dry-run` says how many runs an experiment has and how long they take, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedhet.__main__ import main
from fedhet.study.estimate import Cost, Estimate

COST = Cost(before=3.0, step=0.5, evaluation=0.25, rounds=10, evaluations=4)


def test_a_run_costs_its_parts() -> None:
    assert COST.total == 3 + 10 * 0.5 + 4 * 0.25


def test_processes_share_the_runs_but_not_the_longest_one() -> None:
    found = Estimate({}, runs=4, trials=2, seconds=100.0, longest=40.0, tuning=25.0)
    said = "4 runs and 2 trials, one after another: 100 seconds; the trials take 25%"
    assert str(found) == said
    assert str(found._replace(trials=0)) == "4 runs, one after another: 100 seconds"
    assert found.side_by_side(2).startswith("2 processes at once: about 50 seconds; ")
    assert found.side_by_side(5).startswith("5 processes at once: about 40 seconds; ")


@pytest.mark.slow
def test_it_measures_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["experiment=first_look", "method=FedAvg,SCAFFOLD", "rounds=2", "seed=0,1"]
    assert main([*given, "tune.chosen=null", "hydra/launcher=basic", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "FedAvg, partition.alpha=0.05" in out and "2 rounds of " in out
    # 2 methods, 2 partitions and 2 seeds; 7 rates with 5 seeds of their own.
    assert "8 runs and 140 trials, one after another: " in out
    assert "1 process at once: " in out
    assert list(tmp_path.iterdir()) == []


def test_a_single_run_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rounds=1", "--dry-run"]) == 2
    assert "--dry-run needs an experiment" in capsys.readouterr().err
