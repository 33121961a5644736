"""What a report says of its tests agrees in all places, with a reference and with missing seeds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import Axes, make_experiment

import fedhet
from fedhet.study import report
from fedhet.study.report.compared import Study
from fedhet.study.report.comparisons import (
    against_reference,
    comparison_table,
    pairs_table,
    sentences,
)


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


def summary(study: Study) -> list[str]:
    return sentences(study, against_reference(study))


def test_the_summary_the_table_and_the_family_say_the_same(tmp_path: Path) -> None:
    """7 seeds are enough for 3 comparisons, and all of them are shown, with their sizes."""
    counts = {0.1: dict.fromkeys(["C", "FedAvg", "A", "B"], 7)}
    study = study_of(tmp_path / "made", counts)
    assert study.reference == "FedAvg"  # by its name
    found = against_reference(study)
    assert list(found["a"]) == ["C", "A", "B"] and set(found["verdict"]) == {"shown"}
    assert found["p"].to_numpy() == pytest.approx([3 * 2 / 2**7] * 3)
    _, better, worse = summary(study)
    own = dict(zip(found["a"], found["difference"], strict=True))
    assert better.startswith(f"Shown to be better than FedAvg: C by {own['C']:.3f} (")
    assert (
        f"worse than FedAvg: B by {-own['B']:.3f} (" in worse and f"A by {-own['A']:.3f}" in worse
    )
    table = comparison_table(study, found)
    texts = {row[0].text: row[10].text for row in table.rows}
    assert texts == {"C": "better", "FedAvg": "reference", "A": "worse", "B": "worse"}


def test_another_reference_is_that_of_the_experiment(tmp_path: Path) -> None:
    counts = {0.1: dict.fromkeys(["C", "FedAvg", "A"], 7)}
    found = against_reference(study_of(tmp_path / "made", counts, "A"))
    assert set(found["b"]) == {"A"} and (found["difference"] > 0).all()


def test_a_reference_without_a_result_compares_nothing(tmp_path: Path) -> None:
    study = study_of(tmp_path / "made", {0.1: {"A": 3, "B": 3, "Gone": 0}}, "Gone")
    assert not pairs_table(study).rows
    assert "seed in common with Gone: nothing is compared" in summary(study)[1]
    assert len(comparison_table(study, against_reference(study)).rows) == 3


def test_a_method_with_too_few_seeds_is_not_tested(tmp_path: Path) -> None:
    study = study_of(tmp_path / "made", {0.1: {"A": 10, "B": 10, "C": 10, "D": 5}})
    found = against_reference(study)
    assert dict(zip(found["a"], found["verdict"], strict=True)) == {
        **dict.fromkeys("BC", "shown"),
        "D": "not tested",
    }
    told = "Not tested, because a table of 3 comparisons needs 7 seeds (seed=range(0,7)): D ("
    assert told in " ".join(summary(study))


def test_the_mean_over_settings_hides_no_change_of_sign(tmp_path: Path) -> None:
    """.2 better in one setting, .1 worse in the other: better on average, with both told."""
    noise = np.random.default_rng(1).normal(0, 0.01, 8)
    gain = {0.1: 0.2, 0.5: -0.1}

    def score(axes: Axes) -> float:
        own = gain[axes["partition.alpha"]] if axes["method"] == "B" else 0
        return 0.5 + own + float(noise[axes["seed"]]) * (axes["method"] == "B")

    axes: dict[str, list[Any]] = {"method": ["A", "B"], "partition.alpha": [0.1, 0.5]}
    axes["seed"] = list(range(8))
    told = summary(Study(fedhet.results(make_experiment(tmp_path / "made", axes, score))))
    assert told[1].startswith("Shown to be better than A: B by 0.0")
    least, most = re.findall("by setting (.+?) to (.+?);", told[1])[0]
    assert abs(float(least) + 0.1) < 0.02 and abs(float(most) - 0.2) < 0.02
    assert told[1].endswith("; the other way around with alpha = 0.5).")


def test_a_difference_from_one_setting_says_so(tmp_path: Path) -> None:
    """.2 better in one setting and .01 in the other; and steps that differ are told."""

    def score(axes: Axes) -> float:
        gain = {0.1: 0.2, 0.5: 0.01}[axes["partition.alpha"]]
        return 0.5 + (axes["method"] == "B") * gain * (1 + 0.01 * axes["seed"])

    axes: dict[str, list[Any]] = {"method": ["A", "B"], "partition.alpha": [0.1, 0.5]}
    axes["seed"] = list(range(8))
    made = make_experiment(
        tmp_path / "made", axes, score, steps=lambda a: 46.0 if a["method"] == "B" else 10.0
    )
    study = Study(fedhet.results(made))
    told = summary(study)
    assert told[1].endswith("by setting 0.010 to 0.207; without alpha = 0.1 it is 0.010).")
    assert told[2] == "Local steps differ: B takes 4.6 times as many as A."
    table = comparison_table(study, against_reference(study))
    place = table.columns.index("local steps")
    assert [row[place].text for row in table.rows] == ["4.60", "1.00"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("axes", [{"seed": [0, 1]}, {"seed": [0, 1], "method": ["fedavg"]}])
def test_seeds_are_not_compared_with_each_other(axes: dict[str, list[Any]], tmp_path: Path) -> None:
    """Folders of earlier versions have the seed as the axis that is compared."""
    recorded = {"compare": "seed", "metric": "last", "reference": "0"}
    made = make_experiment(tmp_path / "made", axes, lambda axes: 0.5, report=recorded)
    told = report.write(made).sentences
    assert told[0].startswith("1 method in one setting with 2 seeds")
    assert told[1].startswith("fedavg has 0.500 ± 0.000; there is nothing to compare")
