"""Model selection and early stopping by the clients' validation data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
from contracts.runs import SHORT, rows, validated

from fedhet.core import trees
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.groups import Stopping
from fedhet.core.server.evaluation import Selection
from fedhet.data.toy import toy_task

Launch = Callable[..., Any]


class Judged:
    """What `Selection` reads from a loop, and what it tells it."""

    def __init__(self, patience: int | None, min_delta: float = 0.0) -> None:
        task = SimpleNamespace(task=toy_task())
        self.setup: Any = SimpleNamespace(
            early_stopping=Stopping(patience, min_delta), workspace=task
        )
        self.round = 0
        self.kept: list[int] = []  # the rounds whose model was the best so far

    @property
    def current(self) -> Any:
        return SimpleNamespace(step=self.round, entry=SimpleNamespace(rounds=10))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "best":
            self.kept.append(value)
        super().__setattr__(name, value)

    def after(self, rows: list[dict[str, float]]) -> bool:
        """Whether the training has stopped after one of these."""
        select = Selection(self.setup)
        for row in rows:
            self.round += 1
            if select.evaluated(self, row, []):  # type: ignore[arg-type]
                return True
        return False


@pytest.mark.parametrize(
    ("patience", "min_delta", "expected"), [(2, 0.0, 5), (3, 0.0, 6), (2, 0.1, 3), (None, 0.0, 7)]
)
def test_training_stops_where_validation_no_longer_improves(
    patience: int | None, min_delta: float, expected: int
) -> None:
    judged = Judged(patience, min_delta)
    scores = (0.5, 0.55, 0.58, 0.58, 0.4, 0.3, 0.6)
    judged.after([{"acc_val_weighted": score, "acc_global": 1 - score} for score in scores])
    assert judged.round == expected
    assert judged.kept == [step for step in (1, 2, 3, 7) if step <= expected]


def test_the_loss_decides_where_there_is_no_accuracy() -> None:
    judged = Judged(patience=1)
    assert judged.after([{"loss_val_weighted": loss} for loss in (2.0, 1.0, 1.5)])
    assert judged.kept == [1, 2]


def test_the_best_model_by_validation_is_kept(
    launch: Launch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The rate is far too large: validation gets worse, so the last model is not the best one."""
    lines = ["method=fedavg", "client.lr=3"]
    run = launch(*lines, "rounds=8", "early_stopping.patience=3", task=validated())
    recorded = rows(run)
    best = max(recorded, key=lambda row: row["acc_val_weighted"])
    assert len(recorded) == best["step"] + 3 < 8
    assert run.summary["phases"] == [{"name": "train", "rounds": len(recorded)}]
    stopped = run.summary["stopped_early"]
    assert (stopped["round"], stopped["planned"]) == (len(recorded), 8)
    assert "early_stopping.patience: 3 evaluations in a row" in stopped["reason"]
    (line,) = [r for r in caplog.records if r.levelno >= logging.WARNING]  # which Python prints
    assert (
        f"stops after round {len(recorded)} of its phase: 3 evaluations in a row"
        in line.getMessage()
    )
    assert f"after round {len(recorded)}: early_stopping" in capsys.readouterr().out
    kept = safetensors.torch.load_file(run.dir / "best_val.safetensors")
    shorter = launch(*lines, f"rounds={best['step']}", task=validated())
    assert shorter.summary["stopped_early"] is None
    assert trees.sha256({"model": kept}) == shorter.summary["weights_sha256"]
    assert run.summary["accuracy"] == {
        "last": recorded[-1]["acc_global"],
        "best_val": best["acc_global"],
        "best_test": max(row["acc_global"] for row in recorded),
    }


def test_stopping_needs_validation_data(launch: Launch) -> None:
    with pytest.raises(RunFailed, match=r"no client .*validation"):
        launch(*SHORT, "early_stopping.patience=1", task=validated(val=0))
    with pytest.raises(ConfigError, match=r"early_stopping\.patience=1 .*eval\.clients=true"):
        launch(*SHORT, "early_stopping.patience=1", "eval.clients=false", task=validated())


def test_stopping_in_the_middle_of_a_timetable(launch: Launch) -> None:
    """The training ends at an evaluation, once.

    There are steps before the training, evaluations in every second round, and personal models
    only.
    """
    lines = [
        "method=fedpcl",
        "rounds=9",
        "eval.every=2",
        "client.lr=1e-9",
        "early_stopping.patience=2",
    ]
    run = launch(*lines, task=validated())
    evaluated = [row["step"] for row in rows(run) if row["acc_clients_mean"] is not None]
    collect = {"name": "collect", "rounds": 1}
    assert run.summary["phases"] == [collect, {"name": "train", "rounds": 6}]
    assert evaluated == [2, 4, 6]  # such steps move no model: none is better than the first
    assert run.summary["models"] == ["personal"]
    assert run.summary["accuracy"]["best_val"] is None
    assert run.summary["validation"] == rows(run)[2]["acc_val_weighted"]
    shorter = launch(*lines, "rounds=3", task=validated())
    assert shorter.summary["phases"][-1] == {"name": "train", "rounds": 3}
