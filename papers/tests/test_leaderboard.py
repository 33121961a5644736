"""The leaderboards: runs are taken over once, and the tables agree with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from report.made_runs import make_experiment
from scipy import stats

import fedhet
from fedhet import __main__ as main
from fedhet.core.errors import ConfigError
from fedhet.study.report.results import Results, results
from papers import leaderboard
from papers.__main__ import take_over
from papers.tables import RESULTS

CELLS = RESULTS / "leaderboard.csv"


def test_what_the_page_says_is_in_the_cells() -> None:
    """One mean and its spread, recomputed."""
    cells = pd.read_csv(CELLS)
    setting = "digits, Dirichlet 0.1"
    own = cells[(cells["kind"] == "run") & (cells["setting"] == setting)]
    fedavg = own[own["method"] == "FedAvg"]["accuracy"]
    assert len(fedavg) == 12
    digits = cells[(cells["kind"] == "run") & cells["setting"].str.startswith("digits,")]
    table, *_ = leaderboard.ranked(digits, [setting], "accuracy")
    row = next(line for line in table.splitlines() if line.startswith("| FedAvg |"))
    assert f"{fedavg.mean():.3f} ± {fedavg.std():.3f}" in row


def test_tables_tell_of_personal_models_and_of_differences() -> None:
    """The personal models' mean is a column; scores that are surely worse have a mark."""
    cells = pd.read_csv(CELLS)
    cells = cells[cells["setting"].str.startswith("mnist,")]
    settings = list(dict.fromkeys(cells["setting"]))
    setting = "mnist, Dirichlet 0.1"
    runs = (cells["kind"] == "run") & (cells["setting"] == setting)
    for method, shift in (("FedAvg", 0.9), ("FedSGD", 0.2)):
        noise = cells["seed"] * (0.001 if method == "FedAvg" else 0.00101)
        own = runs & (cells["method"] == method)
        cells.loc[own, "accuracy"] = shift + 0.09 + noise
    own, tried = (cells[cells["kind"] == kind] for kind in ("run", "trial"))
    lines = "\n".join(
        [
            *leaderboard.ranked(own, settings, "accuracy"),
            leaderboard.costs(own, tried, leaderboard.BOARDS["leaderboard"]),
        ]
    ).splitlines()
    ditto = own[own["method"] == "Ditto"]["personal"].mean()
    rows = [[entry.strip() for entry in line.split("|")[1:-1]] for line in lines if "|" in line]
    first, second = ({row[0]: row for row in rows if len(row) == n} for n in (5, 11))
    place = 2 + settings.index(setting)
    assert first["FedAvg"][place].startswith("**0.991") and "▼" not in first["FedSGD"][place]
    assert second["Ditto"][2] == f"{ditto:.3f}" and second["FedAvg"][2] == "–"
    assert any(
        "is tested: 69 comparisons need 12 seeds, and these have 3" in line for line in lines
    )


def test_the_cells_of_a_board_are_those_of_the_last_runs(tmp_path: Path) -> None:
    """The runs are made up; those with another rate are replaced."""
    axes = {"method": ["FedAvg", "Ditto"], "setting": ["digits, IID"], "seed": [0, 1]}
    scores = {"FedAvg": 0.5, "Ditto": 0.7}
    made = make_experiment(
        tmp_path / "runs",
        axes,
        lambda axes: scores[axes["method"]] + 0.1 * axes["seed"],
        name="leaderboard",
    )
    path = tmp_path / "leaderboard.csv"
    leaderboard.take_over(results(made), path)
    cells = pd.read_csv(path)
    found = cells.set_index(["method", "seed"])
    assert found["accuracy"].to_dict() == pytest.approx(
        {("Ditto", 0): 0.7, ("Ditto", 1): 0.8, ("FedAvg", 0): 0.5, ("FedAvg", 1): 0.6}
    )
    assert found["worst_decile"].to_list() == pytest.approx([0.35, 0.4, 0.25, 0.3])
    assert not found["diverged"].any() and set(found["megabytes"]) == {0.001}
    cells.assign(tuned='{"client.lr": 77}').to_csv(path, index=False)
    leaderboard.take_over(results(made), path)
    pd.testing.assert_frame_equal(pd.read_csv(path), cells)


def test_a_method_is_scored_when_it_has_taken_the_hosts_steps(tmp_path: Path) -> None:
    """FedAvg's five clients take 10 steps in each of 4 rounds, the others twice or half as many.

    The runs are made up: one that ends at s has s/2, 3s/4 and 7s/8 before.
    """
    steps = {"FedAvg": 10.0, "twice": 20.0, "half": 5.0}
    scores = {"FedAvg": 0.4, "twice": 0.8, "half": 0.9}

    def made(*methods: str) -> Results:
        axes = {"method": methods, "setting": ["digits, a", "digits, b"], "seed": [0, 1]}
        folder = make_experiment(
            tmp_path / methods[-1],
            axes,
            lambda axes: scores[axes["method"]],
            steps=lambda axes: steps[axes["method"]],
            name="leaderboard",
        )
        return results(folder)

    path = tmp_path / "leaderboard.csv"
    for methods in (["FedAvg", "half"], ["twice"]):  # without the host, the kept one counts
        leaderboard.take_over(made(*methods), path)
    cells = pd.read_csv(path)
    found = cells.groupby("method")[["steps", "equal_steps"]].agg(["min", "max"])
    assert found.loc["FedAvg"].to_list() == [200, 200, 0.4, 0.4]
    assert found.loc["twice"].to_list() == [400, 400, 0.6, 0.6]
    assert found.loc["half"].dropna().to_list() == [100, 100]
    page = "\n".join(leaderboard.at_equal_steps(cells))
    assert "| twice | 1.0 | +20.0 | 2 of 2 |" in page
    assert "as multiples of FedAvg's: twice 2.0." in page
    assert "Left out, because some runs never take as many steps: half." in page
    cells = pd.read_csv(CELLS).query("kind == 'run'")  # of version 0.1 outside of the digits
    assert not [*leaderboard.at_equal_steps(cells[~cells["setting"].str.startswith("digits")])]


@pytest.mark.slow
@pytest.mark.usefixtures("own_process")
def test_cells_of_personal_models_are_taken_over(tmp_path: Path) -> None:
    """Each method has the score of the models that its clients would use, and their worst."""
    small = ["rounds=1", "client.epochs=1", "seed=0,1", "tune.budget=1", "partition.clients=4"]
    small += ["tune.seeds=[1000]", "hydra/launcher=basic"]
    part = ["axes.setting=digits*0.1", "axes.method=[FedAvg*,Ditto]"]
    folder = tmp_path / "runs"
    home = f"hydra.sweep.dir={folder}"
    assert main.main(["experiment=leaderboard_personal", *part, *small, home]) == 0
    with pytest.raises(ConfigError, match=r"runs .*experiment=leaderboard_per"):
        take_over(folder, tmp_path)
    path = tmp_path / "leaderboard_personal.csv"
    leaderboard.take_over(results(folder), path)
    cells = pd.read_csv(path)
    # Runs and trials with another rate are replaced.
    cells.assign(tuned='{"client.lr": 77}').to_csv(path, index=False)
    leaderboard.take_over(results(folder), path)
    pd.testing.assert_frame_equal(pd.read_csv(path), cells)
    assert sorted(cells["kind"]) == ["run"] * 6 + ["trial"] * 3
    last = fedhet.results(folder).last_clients
    last = last[(last["split"] == "test") & (last["metric"] == "accuracy")]
    own_part = "\n".join(leaderboard.tables("leaderboard_personal", cells))
    rows = [line for line in own_part.splitlines() if "±" in line]
    for method, models in {
        "FedAvg": "global",
        "FedAvg, fine-tuned": "finetuned",
        "Ditto": "personal",
    }.items():
        runs = cells[(cells["kind"] == "run") & (cells["method"] == method)].set_index("seed")
        assert set(runs["models"]) == {models}
        of_clients = last[(last["method"] == method) & (last["model"] == models)].groupby("seed")
        for seed, scores in of_clients["value"]:
            assert runs.loc[seed, "score"] == pytest.approx(scores.mean(), abs=1e-5)
            assert runs.loc[seed, "worst_decile"] == pytest.approx(scores.min(), abs=1e-5)
        mean = f"{runs['score'].mean():.3f} ± {runs['score'].std():.3f}"
        row = next(line for line in rows if line.startswith(f"| {method} |"))
        assert mean in row


def test_over_all_settings_a_pair_is_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains, p-values and ranks by hand: B is better by more than the margin, C by less."""
    margin = 0.01
    monkeypatch.setattr(leaderboard.design, "margin_over", lambda settings: margin)
    gains = {"FedAvg": (0.0, 0.0), "B": (0.05, 0.03), "C": (0.02, -0.01)}  # in two settings
    rows = [
        {"method": method, "setting": f"s{i}", "seed": seed, "accuracy": 0.5 + seed / 100 + gain}
        for method, values in gains.items()
        for i, gain in enumerate(values)
        for seed in range(10)
    ]
    for row in rows:  # of B, the seeds differ
        row["accuracy"] += 0.001 * row["seed"] * (row["method"] == "B")
    few = [{**row, "setting": "s2"} for row in rows if row["seed"] < 3]  # too few to be tested
    table, told = leaderboard.overall(pd.DataFrame([*rows, *few]), "accuracy")
    of_b = 0.04 + 0.001 * np.arange(10)
    p = stats.wilcoxon(of_b - margin).pvalue
    (line,) = (line for line in table.splitlines() if line.startswith("| B |"))
    assert line.startswith(f"| B | 1.0 | +{100 * of_b.mean():.1f} | +4.")
    assert line.endswith(f"| 2 of 2 | {2 * p:.3f} |")
    assert "| C | 2.5 | +0.5 |" in table and table.splitlines()[-1].endswith("| – |")
    assert "Over these 2 settings, by more than the 1.0 points of tuning" in told
    assert "B is shown to be better than FedAvg, and none to be worse." in told

    table, told = leaderboard.overall(pd.DataFrame(few), "accuracy")
    assert "| B | 1.0 | +4.1 |\n" in table and "settings in" not in table and "| p |" not in table
    assert told.startswith("No setting has been run with 10 seeds")


def made(gains: dict[str, tuple[float, ...]], seeds: int = 12) -> pd.DataFrame:
    """Runs with these mean differences from FedAvg in the settings s0, s1..., by method."""
    return pd.DataFrame(
        {
            "kind": "run",
            "method": method,
            "setting": f"digits, s{i}",
            "seed": seed,
            "accuracy": 0.5 + seed / 100 + gain,
        }
        for method, values in ({"FedAvg": (0.0,) * 3} | gains).items()
        for i, gain in enumerate(values)
        for seed in range(seeds)
    )


def test_a_line_tells_which_settings_a_mean_hides() -> None:
    """One of these means has another sign in a setting; another comes from a single setting."""
    gains = {"even": (0.03, 0.02, 0.03), "turned": (0.07, 0.025, -0.05), "one": (-0.09, 0, -0.01)}
    told = [*leaderboard.overall(made(gains), "accuracy", pooled=False)][-1]
    assert told == (
        "What these means hide: turned (the other way around with digits, s2);"
        " one (without digits, s0 it is 0.5)."
    )


def test_a_mark_is_that_of_a_difference_beyond_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the grid makes a point in s0, and nothing in the other settings."""
    monkeypatch.setattr(
        leaderboard.design, "margin_over", lambda settings: 0.01 * (settings == ["digits, s0"])
    )
    runs = made({"more": (0.02, 0.01, -0.01), "less": (0.01, 0, 0)})
    table, told = leaderboard.ranked(runs, [f"digits, s{i}" for i in range(3)], "accuracy")
    marks = {
        row[0].strip(): [("▲" in cell) - ("▼" in cell) for cell in row[2:5]]
        for row in (line.split("|")[1:] for line in table.splitlines())
    }
    assert marks["more"] == [1, 1, -1] and marks["less"] == [0, 0, 0]
    assert "(by more than the 1.0, 0.0 and 0.0 points of tuning)" in told


def test_values_at_the_edge_of_what_was_tried_are_named() -> None:
    rates = [json.dumps({"client.lr": rate, "mu": 0.1}) for rate in (1, 0.3, 0.1)]
    runs, trials = (
        pd.DataFrame({"method": ["A", "B"] * n, "setting": "digits, s0", "tuned": tuned})
        for n, tuned in ((1, rates[:2]), (3, [rate for rate in rates for _ in range(2)]))
    )
    (told,) = leaderboard.edges(runs, trials)
    assert told.endswith("may lie beyond: A client.lr=1 (s0).")
    assert not [*leaderboard.edges(runs[1:], trials)]


def test_scores_that_are_printed_alike_share_a_rank() -> None:
    scores = pd.DataFrame({"A": [0.9004], "B": [0.9001], "C": [0.91]})
    assert leaderboard.mean_ranks(scores).to_dict() == {"C": 1.0, "A": 2.5, "B": 2.5}
