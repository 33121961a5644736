"""`fedhet.results`: the runs of a folder as tidy frames."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from made_runs import Axes, change, make_experiment, make_run, write

import fedhet
from fedhet.study.report.compared import Study

ALPHAS = [0.05, 0.3]


def score(axes: Axes) -> float | None:
    if axes == {"method": "B", "partition.alpha": 0.3, "seed": 1}:
        return None
    return 0.5 + 0.1 * (axes["method"] == "B") + axes["partition.alpha"] + 0.01 * axes["seed"]


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    axes = {"method": ["A", "B"], "partition.alpha": ALPHAS, "seed": [0, 1]}
    return make_experiment(tmp_path / "made", axes, score)


def test_a_real_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames hold what the runs' own records hold."""
    monkeypatch.setattr("fedhet.runs.record.figures.draw", lambda *args: [])
    for method in ("fedavg", "scaffold"):
        home = tmp_path / method
        lines = ["experiment=smoke", f"method={method}", "eval.thresholds=[.01,.999]"]
        fedhet.run([*lines, f"hydra.run.dir={home}"])
    found = fedhet.results(tmp_path)
    assert found.axes == {"method": ["fedavg", "scaffold"], "seed": [0]}
    assert list(found.runs["status"]) == ["finished"] * 2 and found.missing.empty
    for method, row in found.runs.set_index("method").iterrows():
        run = fedhet.load_run(tmp_path / str(method))
        assert row["acc_global.last"] == run.summary["accuracy"]["last"]
        assert row["bytes.up.model"] == run.summary["bytes"]["up"]["model"]
        assert row["thresholds.accuracy.0.01.rounds"] == run.summary["thresholds"][0]["rounds"]
        assert row["memory.peak"] == run.summary["memory"]["peak"] > 2**20
        assert row["experiment"] == "smoke"  # the override, not the run's id
        for frame, own in ((found.rounds, run.rounds), (found.clients, run.clients)):
            part = frame[frame["method"] == method].reset_index(drop=True)
            shared = [c for c in own if c != "failures" and not own[c].map(repr).eq("{}").all()]
            pd.testing.assert_frame_equal(part[shared], own[shared], check_dtype=False)


def test_the_axes_of_an_experiment_are_columns_of_every_frame(experiment: Path) -> None:
    found = fedhet.results(experiment)
    assert list(found.axes) == ["method", "partition.alpha", "seed"]
    for frame in (found.runs[found.runs["status"] == "finished"], found.rounds, found.clients):
        places = frame[["method", "partition.alpha", "seed"]].drop_duplicates()
        assert len(places) == 7
    last = found.rounds.groupby(["method", "partition.alpha", "seed"])["acc_global"].last()
    assert last["A", 0.05, 1] == pytest.approx(0.56)
    assert last["B", 0.3, 0] == pytest.approx(0.9)


def test_a_missing_cell_is_listed_with_its_reason(experiment: Path) -> None:
    content = json.loads((experiment / "experiment.json").read_text())
    cells = [experiment / cell["folder"] for cell in content["cells"]]
    change(cells[0] / "cell.json", status="running")
    change(cells[1] / "cell.json", status="failed", reason="the disk is full")
    change(cells[1] / "summary.json", status="failed", reason="no space")
    (cells[2] / "summary.json").write_text("{")
    change(cells[3] / "summary.json", format=0)
    change(cells[4] / "summary.json", status="interrupted", reason="stopped by the user")
    found = fedhet.results(experiment)
    missing = found.missing.set_index("folder")
    names = [cell["folder"] for cell in content["cells"]]
    assert "still running" in missing.loc[names[0], "reason"]
    assert missing.loc[names[1], "reason"] == "the disk is full"
    assert missing.loc[names[2], "reason"].startswith("summary.json is damaged: ")
    assert missing.loc[names[3], "reason"].startswith("its format is 0, ")
    assert missing.loc[names[4], "status"] == "interrupted"
    assert missing.loc[names[7], "reason"] == "not run"
    assert len(missing) == 6 and len(found.runs) == 8


def test_trials_are_a_frame_of_their_own(experiment: Path) -> None:
    content = json.loads((experiment / "experiment.json").read_text())
    make_run(experiment / "cells" / "trial", [0.4], seed=1000, validation=0.45)
    write(experiment / "cells" / "trial" / "cell.json", {"status": "finished"})
    place = {"method": "A", "partition.alpha": 0.05}
    trial = {"folder": "cells/trial", "kind": "trial", "axes": place, "tuned": {"client.lr": 0.3}}
    change(experiment / "experiment.json", cells=[*content["cells"], trial])
    found = fedhet.results(experiment)
    assert len(found.runs) == 8
    (row,) = found.trials.to_dict("records")
    assert (row["method"], row["tuned.client.lr"], row["acc_val_weighted.best"]) == ("A", 0.3, 0.45)


def test_the_axes_of_other_folders_are_the_overrides_that_differ(tmp_path: Path) -> None:
    """A run without an override has the value of its config.yaml; equal ones are no axis."""
    alpha = "partition.alpha=0.05"
    make_run(tmp_path / "a" / "0", [0.5], overrides=[alpha, "client.lr=0.1"])
    make_run(tmp_path / "a" / "1", [0.6], overrides=["client.lr=0.1"], seed=1)
    make_run(tmp_path / "b", [0.7], plugins=["fednorm"], overrides=[alpha, "client.lr=0.1"])
    found = fedhet.results(tmp_path)
    assert found.axes == {
        "method": ["fedavg", "fedavg + fednorm"],
        "partition.alpha": [0.05, 0.3],
        "seed": [0, 1],
    }
    assert list(found.runs["client.lr"]) == [0.1] * 3
    assert list(found.runs["folder"]) == ["a/0", "a/1", "b"]


def test_a_sweep_of_one_method_compares_what_differs(tmp_path: Path) -> None:
    for number, rate in enumerate((0.1, 0.3)):
        make_run(tmp_path / str(number), [rate], overrides=[f"client.lr={rate}"])
    study = Study(fedhet.results(tmp_path))
    assert study.compare == "client.lr" and study.methods == ["0.1", "0.3"]


def test_a_seed_counts_once_over_settings_and_only_where_it_is_whole(experiment: Path) -> None:
    """B is .1 better everywhere; its run of seed 1 is missing in one of two settings."""
    study = Study(fedhet.results(experiment))
    assert study.reference == "A"
    gains = study.gains()["B"].dropna()
    assert 1 not in gains.index and len(gains) == study.scores["seed"].nunique() - 1
    assert gains.to_numpy() == pytest.approx(0.1)


def test_a_damaged_line_ends_the_rounds_and_is_told(experiment: Path) -> None:
    path = experiment / "cells" / "cell-000" / "rounds.jsonl"
    path.write_text(path.read_text()[:-30])
    found = fedhet.results(experiment)
    assert (found.rounds["folder"] == "cells/cell-000").sum() == 3
    (problem,) = found.problems
    assert problem.startswith("cells/cell-000/rounds.jsonl is damaged after 3 lines")


def test_parts_of_one_experiment_are_joined(tmp_path: Path) -> None:
    for number, method in enumerate("AB"):
        axes = {"method": [method], "seed": [0, 1]}
        make_experiment(tmp_path / method, axes, lambda axes, n=number: 0.5 + 0.1 * n)
    found = fedhet.results([tmp_path / "A", tmp_path / "B"])
    assert found.axes == {"method": ["A", "B"], "seed": [0, 1]}
    assert sorted(found.runs["acc_global.last"]) == [0.5, 0.5, 0.6, 0.6]
