"""What a report says of its tests agrees in all places, with a reference and with missing seeds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_runs import Axes, make_experiment

import fedhet
from fedhet import report
from fedhet.report.comparisons import few_pairs, pairs_table, sentences
from fedhet.report.document import WORSE_IF_NORMAL
from fedhet.report.study import Study
from fedhet.report.tables import deciding


def study_of(
    folder: Path, seeds: dict[float, dict[str, int]], reference: str | None = None
) -> Study:
    """Runs of well separated methods: setting -> method -> its number of seeds."""
    methods = list(next(iter(seeds.values())))
    most = max(n for counts in seeds.values() for n in counts.values())
    noise = np.random.default_rng(0).normal(0, 0.01, (len(methods), most))

    def score(axes: Axes) -> float | None:
        place, seed = methods.index(axes["method"]), axes["seed"]
        if seed >= seeds[axes["partition.alpha"]][axes["method"]]:
            return None
        return 0.8 - 0.1 * place + float(noise[place, seed])

    axes: dict[str, list[Any]] = {"method": methods, "partition.alpha": list(seeds)}
    axes["seed"] = list(range(most))
    chosen = {"compare": "method", "metric": "last", "reference": reference}
    return Study(fedhet.results(make_experiment(folder, axes, score, report=chosen)))


def test_a_reference_chooses_rows_and_changes_no_test(tmp_path: Path) -> None:
    """7 seeds are enough for 3 comparisons with a reference, and too few for all 6."""
    counts = {0.1: dict.fromkeys(["C", "FedAvg", "A", "B"], 7)}
    every = pairs_table(study_of(tmp_path / "all", counts)).data
    study = study_of(tmp_path / "reference", counts, "FedAvg")
    table = pairs_table(study)
    with_it = every[(every[["a", "b"]] == "FedAvg").any(axis=1)].reset_index(drop=True)
    pd.testing.assert_frame_equal(table.data, with_it)
    assert len(table.data) == 3 and len(every) == 6
    # The test, the text, the summary and the marks say the same.
    assert table.data["wilcoxon"].isna().all() and set(table.data["verdict"]) == {"if normal"}
    assert "with 6 comparisons it takes 8 seeds" in few_pairs(study)
    assert "from all others is real if differences are normal" in sentences(study, None)[1]
    assert [row[1].mark for row in deciding(study).rows] == ["", *[WORSE_IF_NORMAL] * 3]


def test_a_reference_without_a_result_leaves_no_rows(tmp_path: Path) -> None:
    counts = {0.1: {"A": 3, "B": 3, "Gone": 0}}
    assert not pairs_table(study_of(tmp_path / "made", counts, "Gone")).rows


def test_settings_that_lack_seeds_are_named(tmp_path: Path) -> None:
    counts = {0.1: {"A": 3, "B": 3}, 0.5: {"A": 10, "B": 10}}
    text = few_pairs(study_of(tmp_path / "made", counts))
    told = r"3 to 10 seeds.*alpha = 0\.1: with 3 .* 0\.25, .* 1 comparison .* 6 seeds "
    assert re.search(told, text) and "alpha = 0.5" not in text


def test_a_setting_with_fewer_methods_has_fewer_comparisons(tmp_path: Path) -> None:
    """6 seeds are enough for the one comparison of the first setting."""
    counts = {0.1: {"A": 6, "B": 6, "C": 0}, 0.5: {"A": 6, "B": 6, "C": 6}}
    text = few_pairs(study_of(tmp_path / "made", counts))
    assert text.startswith("Each setting has 6 seeds. That is too few")
    assert "in alpha = 0.5: with 6 " in text and "with 3 comparisons it takes 7" in text


def test_the_pair_with_the_fewest_seeds_is_what_is_told(tmp_path: Path) -> None:
    """Three methods have 10 seeds; the 5 of the last one force the t-test."""
    study = study_of(tmp_path / "made", {0.1: {"A": 10, "B": 10, "C": 10, "D": 5}})
    assert "the fewest common seeds has 5 seeds. That is" in few_pairs(study)
    assert "the 5 seeds of the pair" in sentences(study, None)[1]


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ({"A": 0, "B": 3}, "No two methods"),
        ({"A": 6, "B": 6}, "Each setting in which two methods share a seed has 6 seeds"),
    ],
)
def test_a_setting_without_pairs_is_no_comparison(
    counts: dict[str, int], told: str, tmp_path: Path
) -> None:
    study = study_of(tmp_path / "made", {0.1: counts, 0.5: {"A": 3, "B": 0}})
    assert few_pairs(study).startswith(told)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("axes", [{"seed": [0, 1]}, {"seed": [0, 1], "method": ["fedavg"]}])
def test_seeds_are_not_compared_with_each_other(axes: dict[str, list[Any]], tmp_path: Path) -> None:
    """Folders of earlier versions have the seed as the axis that is compared."""
    recorded = {"compare": "seed", "metric": "last", "reference": "0"}
    made = make_experiment(tmp_path / "made", axes, lambda axes: 0.5, report=recorded)
    told = report.write(made).sentences
    assert told[0].startswith("1 method in one setting with 2 seeds")
    assert told[1].startswith("fedavg has 0.500 ± 0.000; there is nothing to compare")
