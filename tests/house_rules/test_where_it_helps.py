"""docs/where_it_helps.md is what scripts/where_it_helps.py makes of the runs that are kept."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from house_rules.source import ROOT
from scipy import stats

from fedhet.config.composition import compose
from fedhet.experiment import cells, definition
from fedhet.experiment.definition import Experiment

SETTINGS = {"one": "partition.alpha=0.1", "two": ["partition=pathological", "fraction=0.5"]}
METHODS = {"FedAvg": "method=fedavg", "A": "method=fednorm", "B": "method=fedprox rounds=3"}


@pytest.fixture
def script() -> Mapping[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "where_it_helps.py"))


@pytest.fixture
def search() -> pd.DataFrame:
    """A gains most in the setting two, B in one (but worse than FedAvg in both)."""
    scores = {
        ("one", "FedAvg"): 0.5, ("one", "A"): 0.6, ("one", "B"): 0.4,
        ("two", "FedAvg"): 0.7, ("two", "A"): 0.9, ("two", "B"): 0.0,
    }  # fmt: skip
    rows = []
    for (setting, method), score in scores.items():
        tuned = json.dumps({"client.lr": 0.1 if method == "FedAvg" else 0.3})
        for seed in range(3):
            shared = 0.01 * seed  # what a seed adds to all
            rows.append(
                {"setting": setting, "method": method, "seed": seed, "tuned": tuned}
                | {"diverged": score == 0, "accuracy": score and score + shared, "code": "c"}
            )
    return pd.DataFrame(rows)


def confirmed(gains: Mapping[str, list[float]]) -> pd.DataFrame:
    rows = []
    for method, differences in gains.items():
        for seed, difference in enumerate(differences, 100):
            host = 0.5 + seed / 1000
            rows.append({"case": method, "seed": seed, "accuracy": host + difference, "code": "c"})
            label = f"FedAvg beside {method}"
            rows.append({"case": label, "seed": seed, "accuracy": host, "code": "c"})
            label = f"FedAvg at the rate of {method}"
            rows.append({"case": label, "seed": seed, "accuracy": host - 0.1, "code": "c"})
    return pd.DataFrame(rows)


@pytest.mark.slow
def test_the_page_shows_the_runs_that_are_kept(script: Mapping[str, Any]) -> None:
    assert script["main"](["--check"]) == 0


@pytest.mark.slow
def test_another_score_changes_the_page(
    script: Mapping[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "docs" / "where_it_helps", tmp_path / "docs" / "where_it_helps")
    shutil.copyfile(ROOT / "docs" / "where_it_helps.md", tmp_path / "docs" / "where_it_helps.md")
    path = tmp_path / "docs" / "where_it_helps" / "search.csv"
    runs = pd.read_csv(path)
    runs.loc[runs["method"] == "FedAvg", "accuracy"] += 0.01
    runs.to_csv(path, index=False)
    assert script["main"](["--check"], tmp_path) == 1
    assert "docs/where_it_helps.md is not up to date" in capsys.readouterr().out
    assert script["main"]([], tmp_path) == 0
    assert script["main"](["--check"], tmp_path) == 0


def test_the_setting_with_the_largest_gain_is_confirmed(
    script: Mapping[str, Any], search: pd.DataFrame
) -> None:
    assert script["chosen"](search) == {"A": "two", "B": "one"}


def test_the_confirmation_runs_what_the_trials_found(
    script: Mapping[str, Any], search: pd.DataFrame
) -> None:
    definition = yaml.safe_dump(
        {"rounds": 7, "axes": {"setting": SETTINGS, "method": METHODS}, "tune": {}, "report": {}}
    )
    text = yaml.safe_load(script["confirmation"](search, definition))
    assert text["rounds"] == 7 and "tune" not in text
    two, one = ["partition=pathological", "fraction=0.5"], ["partition.alpha=0.1"]
    assert text["axes"]["case"] == {
        "A": [*two, "method=fednorm", "client.lr=0.3"],
        "FedAvg beside A": [*two, "method=fedavg", "client.lr=0.1"],
        "FedAvg at the rate of A": [*two, "method=fedavg", "client.lr=0.3"],
        "B": [*one, "method=fedprox", "rounds=3", "client.lr=0.3"],
        "FedAvg beside B": [*one, "method=fedavg", "client.lr=0.1"],
        "FedAvg at the rate of B": [*one, "method=fedavg", "client.lr=0.3"],
    }


def test_confirm_yaml_is_written_from_the_search(script: Mapping[str, Any]) -> None:
    home = ROOT / "conf" / "experiment" / "helps"
    search = pd.read_csv(ROOT / "docs" / "where_it_helps" / "search.csv")
    text = script["confirmation"](search, (home / "search.yaml").read_text(encoding="utf-8"))
    assert (home / "confirm.yaml").read_text(encoding="utf-8") == text


@pytest.fixture(scope="module")
def confirm() -> Experiment:
    experiment = definition.read(["experiment=helps/confirm"])
    assert experiment is not None
    return experiment


def test_the_seeds_of_the_confirmation_are_none_of_the_searchs(confirm: Experiment) -> None:
    search = pd.read_csv(ROOT / "docs" / "where_it_helps" / "search.csv")
    seeds = {run.axes["seed"] for run in cells.runs(confirm)}
    assert len(seeds) == 10 and not seeds & {*search["seed"], 1000}


@pytest.mark.slow
def test_the_runs_of_the_confirmation_compose(confirm: Experiment) -> None:
    runs = cells.runs(confirm)
    for run in runs[:: len({run.axes["seed"] for run in runs})]:
        compose(list(run.overrides))


def test_runs_of_other_settings_are_not_shown(
    script: Mapping[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "docs" / "where_it_helps", tmp_path / "docs" / "where_it_helps")
    page = shutil.copyfile(
        ROOT / "docs" / "where_it_helps.md", tmp_path / "docs" / "where_it_helps.md"
    )
    path = tmp_path / "docs" / "where_it_helps" / "confirm.csv"
    runs = pd.read_csv(path)
    runs["overrides"] = runs["overrides"].str.replace("partition.noise=1", "partition.noise=2")
    runs.to_csv(path, index=False)
    assert script["main"]([], tmp_path) == 0
    assert "Not run yet." in page.read_text(encoding="utf-8")


def test_the_runs_of_confirm_yaml_are_told_by_their_overrides(
    script: Mapping[str, Any], confirm: Experiment
) -> None:
    home = ROOT / "docs" / "where_it_helps"
    rows = [
        {
            "case": run.axes["case"],
            "overrides": script["own_overrides"](run.overrides, confirm.fixed),
        }
        for run in cells.runs(confirm)
    ]
    assert script["are_of"](pd.read_csv(home / "search.csv"), pd.DataFrame(rows))


@pytest.mark.parametrize(
    "record, message",
    [
        ({"experiment": "leaderboard"}, "holds the experiment leaderboard, not helps/confirm"),
        ({"fixed": ["experiment=helps/confirm", "rounds=3"]}, "rounds=3"),
        ({"digest": "0123456789abcdef"}, "another digest"),
        ({"axes": {"case": ["FedNorm"], "seed": [100]}}, "another axes"),
    ],
)
def test_runs_of_another_experiment_are_refused(
    script: Mapping[str, Any],
    confirm: Experiment,
    tmp_path: Path,
    record: dict[str, Any],
    message: str,
) -> None:
    own = {
        "experiment": confirm.name,
        "fixed": list(confirm.fixed),
        "digest": confirm.digest,
        "axes": confirm.labels,
        "tune": None,
        "cells": [],
    }
    (tmp_path / "experiment.json").write_text(json.dumps({**own, **record}))
    with pytest.raises(SystemExit, match=message):
        script["main"](["confirm", str(tmp_path)], tmp_path)
    assert not (tmp_path / "docs").exists()


@pytest.mark.parametrize("words", [["confirmed", "."], ["confirm"], ["confirm", ".", "--chek"]])
def test_a_misspelt_command_is_refused(script: Mapping[str, Any], words: list[str]) -> None:
    with pytest.raises(SystemExit):
        script["main"](words)


def test_the_tests_are_paired_and_corrected_for_all_methods(script: Mapping[str, Any]) -> None:
    """Holm by hand: the smallest p times 2, the other as it is but never below the first."""
    steady = [0.01 + 0.001 * i for i in range(10)]
    mixed = [0.02, -0.01, 0.03, -0.02, 0.04, 0.01, 0.05, -0.03, 0.06, 0.07]
    table = script["results"](confirmed({"A": steady, "B": mixed}))
    p = [float(stats.wilcoxon(values).pvalue) for values in (steady, mixed)]
    assert table.loc["A", "p"] == pytest.approx(2 * p[0])
    assert table.loc["B", "p"] == pytest.approx(max(p[1], 2 * p[0]))
    assert table.loc["A", "gain"] == pytest.approx(sum(steady) / 10)
    assert table.loc["A", "low"] < table.loc["A", "gain"] < table.loc["A", "high"]
    assert (table.loc["B", "wins"], table.loc["B", "pairs"]) == (7, 10)


def test_the_verdict_asks_for_a_gain_at_the_same_rate_too(
    script: Mapping[str, Any], search: pd.DataFrame
) -> None:
    gains = {"A": [0.01 + 0.002 * i for i in range(10)], "B": [0.01, -0.01] * 5}

    def verdicts(runs: pd.DataFrame) -> dict[str, str]:
        lines = list(script["_confirmed"](search, runs))
        return {row.split(" | ")[0].strip("| "): row.split(" | ")[-1].strip("| ") for row in lines}

    runs = confirmed(gains)
    found = verdicts(runs)
    assert (found["A"], found["B"]) == ("**better**", "not shown")
    at_rate = runs["case"] == "FedAvg at the rate of A"
    runs.loc[at_rate, "accuracy"] += 0.2
    assert verdicts(runs)["A"] == "by its learning rate"
    runs.loc[runs["case"] == "FedAvg beside A", "accuracy"] += 0.2
    assert verdicts(runs)["A"] == "worse"
