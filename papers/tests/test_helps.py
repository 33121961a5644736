"""Where each method helps: the confirmation of the search, with paired and corrected tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from report.made_runs import change, make_experiment
from scipy import stats

from fedhet.core.errors import ConfigError
from fedhet.runs.config.composition import compose
from fedhet.study import cells, definition
from fedhet.study.definition import Experiment
from papers import helps
from papers.__main__ import take_over
from papers.tables import RESULTS

SEARCH = RESULTS / "helps-search.csv"
SETTINGS = {"one": "partition.alpha=0.1", "two": ["partition=pathological", "fraction=0.5"]}
METHODS = {"FedAvg": "method=fedavg", "A": "method=fednorm", "B": "method=fedprox rounds=3"}


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


def test_the_setting_with_the_largest_gain_is_confirmed(search: pd.DataFrame) -> None:
    assert helps.chosen(search) == {"A": "two", "B": "one"}


def test_the_confirmation_runs_what_the_trials_found(search: pd.DataFrame) -> None:
    definition = yaml.safe_dump(
        {"rounds": 7, "axes": {"setting": SETTINGS, "method": METHODS}, "tune": {}, "report": {}}
    )
    text = yaml.safe_load(helps.confirmation(search, definition))
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


def test_confirm_yaml_is_written_from_the_search() -> None:
    search = pd.read_csv(SEARCH)
    text = helps.confirmation(search, (helps.CONF / "search.yaml").read_text(encoding="utf-8"))
    assert (helps.CONF / "confirm.yaml").read_text(encoding="utf-8") == text


@pytest.fixture(scope="module")
def confirm() -> Experiment:
    experiment = definition.read(["experiment=helps/confirm"])
    assert experiment is not None
    return experiment


def test_the_seeds_of_the_confirmation_are_none_of_the_searchs(confirm: Experiment) -> None:
    search = pd.read_csv(SEARCH)
    seeds = {run.axes["seed"] for run in cells.runs(confirm)}
    assert len(seeds) == 10 and not seeds & {*search["seed"], 1000}


@pytest.mark.slow
def test_the_runs_of_the_confirmation_compose(confirm: Experiment) -> None:
    runs = cells.runs(confirm)
    for run in runs[:: len({run.axes["seed"] for run in runs})]:
        compose(list(run.overrides))


def test_the_kept_runs_of_the_confirmation_have_the_settings_of_its_file(
    confirm: Experiment,
) -> None:
    expected = {
        run.axes["case"]: helps.own_overrides(run.overrides, confirm.fixed)
        for run in cells.runs(confirm)
    }
    runs = pd.read_csv(RESULTS / "helps-confirm.csv")
    assert (runs["overrides"] == runs["case"].map(expected)).all()


@pytest.mark.parametrize(
    "record, message",
    [
        ({"experiment": "leaderboard"}, "runs .*experiment=leaderboard"),
        ({"fixed": ["experiment=helps/confirm", "rounds=3"]}, "rounds=3"),
        ({"digest": "0123456789abcdef"}, "another digest"),
        ({"axes": {"case": ["FedNorm"], "seed": [100]}}, "another axes"),
    ],
)
def test_runs_of_another_experiment_are_refused(
    confirm: Experiment, tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    made = make_experiment(
        tmp_path / "made", {"case": ["FedNorm"], "seed": [100]}, lambda axes: 0.5, name=confirm.name
    )
    own = {
        "fixed": list(confirm.fixed),
        "digest": confirm.digest,
        "axes": confirm.labels,
        "tune": None,
    }
    change(made / "experiment.json", **{**own, **record})
    with pytest.raises(ConfigError, match=message):
        take_over(made, tmp_path)
    assert not list(tmp_path.glob("*.csv"))


@pytest.fixture
def tuned_on_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helps, "TUNING_SEEDS", 5)


def test_the_search_tunes_on_so_many_seeds() -> None:
    search = yaml.safe_load((helps.CONF / "search.yaml").read_text(encoding="utf-8"))
    assert len(search["tune"]["seeds"]) == helps.TUNING_SEEDS


@pytest.mark.usefixtures("tuned_on_five")
def test_the_tests_are_paired_and_corrected_for_the_whole_table() -> None:
    """Holm by hand: the three smallest p are equal, and times 4; the last p is not below them."""
    steady = [0.01 + 0.001 * i for i in range(10)]
    mixed = [0.02, -0.01, 0.03, -0.02, 0.04, 0.01, 0.05, -0.03, 0.06, 0.07]
    table = helps.compared(confirmed({"A": steady, "B": mixed}))
    p = [float(stats.wilcoxon(values).pvalue) for values in (steady, mixed)]
    assert table.loc["A", ["p", "p_at_rate"]].to_list() == pytest.approx([4 * p[0]] * 2)
    assert table.loc["B", ["p", "p_at_rate"]].to_list() == pytest.approx([p[1], 4 * p[0]])
    assert table.loc["A", "gain"] == pytest.approx(sum(steady) / 10)
    assert table.loc["A", "low"] < table.loc["A", "gain"] < table.loc["A", "high"]
    assert (table.loc["B", "wins"], table.loc["B", "pairs"]) == (7, 10)


def test_what_was_tuned_on_few_seeds_is_not_tested() -> None:
    table = helps.compared(confirmed(dict.fromkeys("AB", [0.01] * 10)))
    assert helps.verdict(table.loc["A"]) == "not tested" and table["p_at_rate"].max() < 0.05


@pytest.mark.usefixtures("tuned_on_five")
def test_too_few_seeds_test_nothing() -> None:
    """The four comparisons of two methods need eight seeds: 4 * 2 / 2^7 is above .05."""
    for seeds, expected in ((7, "not tested"), (8, "**better**")):
        table = helps.compared(confirmed(dict.fromkeys("AB", [0.01] * seeds)))
        assert helps.verdict(table.loc["A"]) == expected
        assert table["p"].isna().all() == (seeds == 7)


@pytest.mark.usefixtures("tuned_on_five")
def test_the_verdict_asks_for_a_gain_at_the_same_rate_too() -> None:
    gains = {"A": [0.01 + 0.002 * i for i in range(10)], "B": [0.01, -0.01] * 5}

    def verdicts(runs: pd.DataFrame) -> dict[str, str]:
        table = helps.compared(runs)
        return {method: helps.verdict(table.loc[method]) for method in gains}

    runs = confirmed(gains)
    found = verdicts(runs)
    assert (found["A"], found["B"]) == ("**better**", "not shown")
    at_rate = runs["case"] == "FedAvg at the rate of A"
    runs.loc[at_rate, "accuracy"] += 0.2
    assert verdicts(runs)["A"] == "by its learning rate"
    runs.loc[runs["case"] == "FedAvg beside A", "accuracy"] += 0.2
    assert verdicts(runs)["A"] == "worse"


def test_methods_are_compared_with_equal_steps() -> None:
    """FedGMM gains .1 + .001 i as published, and half of it over FedAvg with equal steps."""
    gains = {
        "FedAvg": 0.0,
        "FedGMM": 0.1,
        "FedAvg, FedGMM's steps": 0.05,
        "FedAvg, its steps": 0.0,
        "FedGMM, FedAvg's steps": 0.0,
        "FedAvg, more rounds": 0.2,
    }
    runs = pd.DataFrame(
        {
            "case": f"{setting}: {case}",
            "seed": seed,
            "accuracy": 0.5 + seed / 1000 + gain + 0.001 * seed * (case == "FedGMM"),
            "steps": 500 if case == "FedGMM" else 100,
            "code": "c",
        }
        for setting in ("a", "b")
        for case, gain in gains.items()
        for seed in range(10)
    )
    told = helps.computed(runs)
    p = 8 * 2 / 2**10  # all ten pairs agree, and Holm's correction counts eight tests
    row = "| a | as published | 5.0 | 0.504 ± 0.003 | 0.609 ± 0.006 | +10.5 | +10.3 to +10.6 |"
    assert row in told and f" | 10 of 10 | {p:.3f} |" in told
    assert "| b | FedAvg with FedGMM's steps in each round | 5.0 |" in told
    assert "| b | both with FedAvg's steps in each round | 1.0 | 0.504" in told
    assert (
        "as published, in 2 of 2 settings; FedAvg with FedGMM's steps in each round, in 2 of 2"
        " settings; both with FedAvg's steps in each round, in 0 of 2 settings; FedAvg with as many"
        " steps, in more rounds, in 0 of 2 settings. 120 runs"
    ) in told


@pytest.mark.slow
def test_the_runs_with_equal_steps_compose_and_have_a_place_in_the_table() -> None:
    experiment = definition.read(["experiment=helps/compute"])
    assert experiment is not None and experiment.tuning is not None
    assert not {*experiment.labels["seed"]} & {*experiment.tuning.seeds}
    names = {name for pair in helps.COMPUTE.values() for name in pair}
    for setting, name in (str(case).split(": ") for case in experiment.labels["case"]):
        assert name in names and setting
    for run in cells.runs(experiment)[::10]:
        compose(list(run.overrides))
