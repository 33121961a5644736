"""What a report says where there is little to say: missing seeds, few settings, no method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_runs import make_experiment

import fedhet
from fedhet.study import report
from fedhet.study.report import statistics
from fedhet.study.report.compared import Study
from fedhet.study.report.comparisons import against_reference, sentences
from fedhet.study.report.overviews import command, deciding, tuning_table


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


@pytest.mark.parametrize("seeds", [4, 5])
def test_values_chosen_on_few_seeds_are_not_compared(tmp_path: Path, seeds: int) -> None:
    """Same and Other are far from FedAvg; the tuning gave Other another rate than FedAvg."""
    scores: dict[str, list[float | None]] = {
        name: [start + 0.01 * seed**2 for seed in range(7)]
        for name, start in {"FedAvg": 0.1, "Same": 0.3, "Other": 0.5}.items()
    }
    rates = {"FedAvg": 0.1, "Same": 0.1, "Other": 0.3}
    tuned = [
        {"axes": {"method": name}, "chosen": {"client.lr": rate}, "at_the_edge": []}
        for name, rate in rates.items()
    ]
    axes = {"method": list(scores), "seed": list(range(7))}
    tune = {"seeds": list(range(1000, 1000 + seeds))}
    made = make_experiment(
        tmp_path, axes, lambda a: scores[a["method"]][a["seed"]], tune=tune, tuned=tuned
    )
    study = Study(fedhet.results(made))
    found = against_reference(study).set_index("a")["verdict"]
    assert found["Same"] == statistics.SHOWN
    assert found["Other"] == (statistics.SHOWN if seeds == 5 else statistics.NOT_TESTED)
    told = " and were chosen on fewer than 5 seeds (tune.seeds): Other (+0.400)."
    assert any(told in line for line in sentences(study, against_reference(study))) == (seeds < 5)


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
