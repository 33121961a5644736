"""What a report says where there is little to say: missing seeds, few settings, no method."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_runs import make_experiment

import fedhet
from fedhet import report
from fedhet.report import statistics
from fedhet.report.comparisons import against_reference, sentences
from fedhet.report.study import Study
from fedhet.report.tables import command, deciding, tuning_table


def study_of(folder: Path, scores: dict[str, list[float | None]]) -> Study:
    """Runs of one setting: method -> the scores of its seeds."""
    axes = {"method": list(scores), "seed": list(range(len(next(iter(scores.values())))))}
    made = make_experiment(folder, axes, lambda axes: scores[axes["method"]][axes["seed"]])
    return Study(fedhet.results(made))


def test_a_method_does_not_win_by_a_seed_that_only_it_has(tmp_path: Path) -> None:
    """Few has only the better seed, in which Whole is better than it."""
    study = study_of(tmp_path / "a", {"Whole": [0.5, 0.9], "Few": [None, 0.8]})
    assert study.gains()["Few"].dropna().to_list() == [pytest.approx(-0.1)]
    whole, few = (row[1] for row in deciding(study).rows)
    assert whole.best and not few.best and few.text == "0.800 (n=1)"


def test_without_a_common_seed_nothing_is_compared(tmp_path: Path) -> None:
    study = study_of(tmp_path / "a", {"One": [0.5, None], "Other": [None, 0.8]})
    told = sentences(study, against_reference(study))[1]
    assert told == "No method has a seed in common with One: nothing is compared."
    assert not any(row[1].best for row in deciding(study).rows)


def test_one_test_decides_on_all_pairs_of_a_family() -> None:
    """The pair with the fewest seeds has too few for Wilcoxon's test, and no pair has it."""
    noise = np.random.default_rng(0).normal([0.9, 0.6, 0.3], 0.01, (12, 3))
    table = pd.DataFrame(noise, columns=list("abc"))
    assert statistics.compare(table)["wilcoxon"].notna().all()
    table.loc[4:, "c"] = math.nan
    pairs = statistics.compare(table)
    assert pairs["wilcoxon"].isna().all() and set(pairs["verdict"]) == {statistics.IF_NORMAL}


@pytest.mark.usefixtures("undrawn")
def test_an_experiment_of_seeds_alone_has_a_page(tmp_path: Path) -> None:
    made = make_experiment(tmp_path / "made", {"seed": [0, 1, 2]}, lambda axes: 0.5, report={})
    written = report.write(made)
    assert written.sentences[1].startswith("fedavg has 0.500 ± 0.000")
    assert "there is nothing to compare it with" in written.page.read_text()


def test_the_command_is_printed_with_its_flags_and_without_the_part() -> None:
    lines = ["--config-dir", "my conf", "experiment=mine", "axes.setting=[digits*]", "rounds=3"]
    wanted = "python -m fedhet --config-dir 'my conf' experiment=mine rounds=3"
    assert command(lines) == wanted


def test_the_edge_is_known_of_grids_only(tmp_path: Path) -> None:
    space = {"grid": [1, 2, 3], "end": [0, 1, 2], "range": {"low": 0.1, "high": 1, "log": True}}
    space |= {"single": [1], "two": [1, 2], "name": ["a", "b", "c"]}
    tune: dict[str, Any] = {"space": space, "own": {"A": {"mine": [1, 2, 3]}}}
    chosen = dict.fromkeys([*space, "mine", "other"], 2)
    entry = {"axes": {"method": "A"}, "chosen": chosen, "at_the_edge": ["end"], "validation": 0.5}
    made = make_experiment(
        tmp_path / "made", {"method": ["A"]}, lambda _: 0.5, tune=tune, tuned=[entry]
    )
    table = tuning_table(Study(fedhet.results(made)))
    assert table is not None
    assert {row[2].text: row[4].text for row in table.rows} == {
        **{"grid": "no", "end": "yes", "range": "not known", "single": "not known"},
        **{"two": "not known"},
        **{"name": "–", "mine": "no", "other": "not known"},
    }


def test_the_frames_have_their_columns_before_there_is_a_result(tmp_path: Path) -> None:
    made = make_experiment(tmp_path / "made", {"method": ["A"], "seed": [0]}, lambda _: None)
    found = fedhet.results(made)
    documented = ["status", "acc_global.last", "bytes.up.model", "seconds.train"]
    for frame in (found.runs, found.trials):
        assert {"folder", "method", "seed", *documented} <= set(frame)
    assert {"folder", "method", "seed", "round", "acc_global", "loss_global"} <= set(found.rounds)
    assert found.runs.pivot_table("acc_global.last", "method").empty
