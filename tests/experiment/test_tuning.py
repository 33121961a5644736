"""Which trials there are, and which of them wins."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from experiment.mine import SMALL, run
from experiment.pretend import Pretend
from omegaconf import OmegaConf

from fedhet.core.errors import ConfigError
from fedhet.runs.config import compose
from fedhet.study import cells, definition, tuning
from fedhet.study.tuning import Interval

Write = Callable[..., None]


def test_the_grid_is_tried_whole_if_the_budget_allows() -> None:
    space: tuning.Space = {"a": (1, 2), "b": (3, 4, 5)}
    whole = [{"a": a, "b": b} for a in (1, 2) for b in (3, 4, 5)]
    assert tuning.points(space, None) == whole
    assert tuning.points(space, 6) == whole
    assert tuning.points({}, 3) == [{}]


def test_a_budget_draws_different_points_of_the_grid() -> None:
    space: tuning.Space = {"a": (1, 2, 3), "b": (4, 5, 6)}
    drawn = tuning.points(space, 5)
    assert len(drawn) == 5
    assert len({tuple(point.items()) for point in drawn}) == 5
    assert all(point["a"] in (1, 2, 3) and point["b"] in (4, 5, 6) for point in drawn)
    assert drawn == tuning.points(space, 5)


def test_draws_are_spread_over_the_interval() -> None:
    log = [p["a"] for p in tuning.points({"a": Interval(1e-4, 1.0, True)}, 200)]
    flat = [p["a"] for p in tuning.points({"a": Interval(2.0, 6.0, False)}, 200)]
    assert min(log) >= 1e-4 and max(log) <= 1
    assert min(flat) >= 2 and max(flat) <= 6
    # A log-uniform variable is below the geometric mean of its ends half of the time.
    assert 70 < sum(value < 1e-2 for value in log) < 130
    assert 70 < sum(value < 4 for value in flat) < 130
    with pytest.raises(ConfigError, match=r"tune\.budget=null: .*trials"):
        tuning.points({"a": Interval(0.0, 1.0, False)}, None)


@pytest.mark.parametrize(("low", "high"), [(0.99, 0.9999), (100001.0, 100400.0), (-1.0, 0.0)])
@pytest.mark.parametrize("log", [True, False])
def test_draws_of_a_narrow_interval_differ_and_stay_inside(
    low: float, high: float, log: bool
) -> None:
    drawn = [p["a"] for p in tuning.points({"a": Interval(low, high, log and low > 0)}, 20)]
    assert low <= min(drawn) and max(drawn) <= high
    assert len(set(drawn)) > 15


def test_the_best_mean_wins_and_a_run_that_is_missing_never_does() -> None:
    scores = {0: [0.5, 0.7], 1: [0.9, None], 2: [0.61, 0.61], 3: [math.nan, 1.0], 4: [0.61, 0.61]}
    assert tuning.best(scores) == (2, pytest.approx(0.61))
    assert tuning.best({0: [None], 1: []}) is None


def test_an_outermost_value_is_told() -> None:
    space: tuning.Space = {
        "lr": (0.3, 0.1, 1.0),
        "mu": (0.1, 0.2, 0.3),
        "optimizer": ("sgd", "adam"),
        "x": Interval(0, 1, False),
        "one": (1,),
        "two": (1, 2),
    }
    point = {"lr": 0.1, "mu": 0.2, "optimizer": "sgd", "x": 0.0, "one": 1, "two": 2}
    assert tuning.at_the_edge(point, space) == ["lr"]


def test_each_method_has_the_same_number_of_trials(write: Write) -> None:
    text = """
axes: {method: {A: method=fedavg, P: method=fedprox}, partition.alpha: [.1, 1], seed: [0, 1]}
tune:
  budget: 3
  seeds: [8, 9]
  space: {client.lr: [.01, .1, 1]}
  own: {P: {plugin.fedprox.mu: [.1, 1]}}
"""
    write(text)
    experiment = definition.read(["experiment=mine"])
    assert experiment is not None and experiment.tuning is not None
    trials = cells.trials(experiment)
    counts = {}
    for trial in trials:
        place = trial.on(experiment.tuning.per)
        counts[place] = counts.get(place, 0) + 1
        assert trial.axes["seed"] in (8, 9)
        assert f"seed={trial.axes['seed']}" in trial.overrides
        lr = next(line for line in trial.overrides if line.startswith("client.lr="))
        assert float(lr.partition("=")[2]) == trial.tuned["client.lr"]
        assert ("plugin.fedprox.mu" in trial.tuned) == (trial.axes["method"] == "P")
    assert counts == dict.fromkeys(counts, 6)
    assert len(counts) == 4
    assert len({trial.folder for trial in trials}) == 24

    for budget, more in (("null", 6), ("5", 5)):  # A's grid has three points
        write(text.replace("budget: 3", f"budget: {budget}"))
        message = f"A, 0.1 .*3 .*trials, .*P, 0.1 .*{more}; tune.budget=3 "
        with pytest.raises(ConfigError, match=f"tune.budget={budget}: {message}"):
            check_budget("experiment=mine")
    check_budget("experiment=mine", "tune.budget=3")
    write(text.partition("  own:")[0])
    check_budget("experiment=mine", "tune.budget=9")  # both have three


KEPT = f"""rounds: 1{SMALL}
axes: {{method: {{A: method=fedavg, P: method=fedprox}}, partition.alpha: [0.3, 1], seed: [0]}}
tune:
  per: [partition.alpha, method]
  budget: 3
  seeds: [8]
  space: {{client.lr: [.01, .1, 1]}}
  own: {{P: {{plugin.fedprox.mu: [.1, 1]}}}}
  chosen:
    - {{method: A, partition.alpha: 0.3, client.lr: 0.1}}
    - {{method: A, partition.alpha: 1, client.lr: 1}}
    - {{method: P, partition.alpha: 0.3, client.lr: 0.1, plugin.fedprox.mu: 1}}
    - {{method: P, partition.alpha: 1, client.lr: 0.01, plugin.fedprox.mu: 0.1}}
"""


@pytest.mark.usefixtures("own_process")
def test_what_the_file_keeps_needs_no_trials(
    write: Write, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    write(KEPT)
    assert pretend.run() == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("experiment mine: checking 4 runs\n")
    record = pretend.record()
    assert len(pretend.launched) == len(record["cells"]) == 4
    lines = {"partition.alpha=1", "client.lr=0.01", "plugin.fedprox.mu=0.1"}
    assert lines < set(record["cells"][-1]["overrides"])
    kept = [(entry["trials"], entry["at_the_edge"]) for entry in record["tuned"]]
    assert kept == [(0, []), (0, ["client.lr"]), (0, []), (0, ["client.lr"])]


def test_the_command_line_leaves_choices_out_or_has_them_made_again(write: Write) -> None:
    write(KEPT)
    part = definition.read(["experiment=mine", "method=A", "partition.alpha=1"])
    assert part is not None and part.tuning is not None
    place = (("method", "A"), ("partition.alpha", 1))
    assert part.tuning.chosen == {place: {"client.lr": 1}}
    given = definition.read(["experiment=mine", "method=A", "partition.alpha=5", "client.lr=1"])
    assert given is not None and given.tuning is None
    again = definition.read(["experiment=mine", "tune.chosen=null"])
    assert again is not None and len(cells.trials(again)) == 12


@pytest.mark.parametrize(
    "old, new, lines, message",
    [
        ("method: A, partition.alpha: 1,", "method: A, partition.alpha: 2,", [],
         "tune.chosen[1].partition.alpha=2 is not allowed"),
        ("method: A, partition.alpha: 1,", "partition.alpha: 1,", [],
         "tune.chosen[1].method=None is not allowed"),
        ("alpha: 1, client.lr: 1}", "alpha: 1, client.lr: 0.3}", [],
         "tune.chosen[1]: client.lr=0.3 is not among the values to try"),
        ("client.lr: 0.01, plugin.fedprox.mu: 0.1}", "client.lr: 0.01}", [],
         "tune.chosen[3]: plugin.fedprox.mu=None is not among"),
        ("client.lr: 1}", "client.lr: 1, client.momentum: 0}", [],
         "tune.chosen[1]=client.momentum is not allowed"),
        ("method: A, partition.alpha: 1,", "method: A, partition.alpha: 0.3,", [],
         "tune.chosen[1]: this is the second choice for method=A, partition.alpha=0.3"),
        ("", "", ["partition.alpha=0.3,5"], "there is no choice for method=A, partition.alpha=5;"),
        ("", "", ["tune.chosen=3"], "tune.chosen=3: a list of choices, or null, is expected"),
    ],
)  # fmt: skip
def test_a_wrong_choice_is_named(
    write: Write, old: str, new: str, lines: list[str], message: str
) -> None:
    write(KEPT.replace(old, new))
    with pytest.raises(ConfigError) as error:
        definition.read(["experiment=mine", *lines])
    assert message in str(error.value)


def test_the_first_look_keeps_a_choice_for_each_method_and_setting() -> None:
    experiment = definition.read(["experiment=first_look"])
    assert experiment is not None and experiment.tuning is not None
    kept = experiment.tuning
    assert kept.chosen is not None and len(kept.seeds) == 5
    assert len(kept.chosen) == 16 and cells.trials(experiment) == []
    for place, point in kept.chosen.items():
        space = kept.space_of([label for _, label in place])
        assert len(tuning.points(space, None)) == 7 and not tuning.at_the_edge(point, space)


def check_budget(*lines: str) -> None:
    experiment = definition.read(lines)
    assert experiment is not None and experiment.tuning is not None
    combinations = [cells.labels(combination) for combination in cells.settings_of(experiment)]
    tuning.check_budget(experiment.tuning, combinations)


LISTS = ["[[8], [4, 4], [2]]", "'[8],[4,4],[2]'"]  # a list of lists, or a sweep
TUNED_LISTS = """rounds: 1
client: {{epochs: 1}}
partition: {{clients: 3}}
axes: {{method: [fedavg], seed: [0]}}
tune: {{seeds: [1000], space: {{model.hidden: {range}}}}}"""


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("range_", LISTS)
def test_lists_are_tuned(write: Write, pretend: Pretend, range_: str) -> None:
    write(TUNED_LISTS.format(range=range_))
    pretend.rows = lambda cell: [{"acc_val_weighted": len(cell.tuned["model.hidden"])}]
    assert pretend.run() == 0
    record = pretend.record()
    trials = [cell for cell in record["cells"] if cell["kind"] == "trial"]
    assert [cell["tuned"]["model.hidden"] for cell in trials] == [[8], [4, 4], [2]]
    assert record["tuned"][0]["chosen"] == {"model.hidden": [4, 4]}
    (cell,) = (cell for cell in record["cells"] if cell["kind"] == "run")
    assert compose(cell["overrides"]).cfg.model.hidden == [4, 4]


def test_mappings_are_not_tuned(write: Write) -> None:
    write("axes: {seed: [0]}\ntune: {space: {model: [{hidden: [8]}]}}")
    with pytest.raises(ConfigError, match=r"tune\.space\.model=.*list"):
        definition.read(["experiment=mine"])


@pytest.mark.slow
@pytest.mark.usefixtures("own_process")
def test_a_list_that_was_chosen_is_in_the_report(write: Write) -> None:
    write(TUNED_LISTS.format(range=LISTS[1]))
    assert run() == 0
    home = Path("experiments/mine")
    record = json.loads((home / "experiment.json").read_text())
    chosen = record["tuned"][0]["chosen"]["model.hidden"]
    (cell,) = (cell for cell in record["cells"] if cell["kind"] == "run")
    config = OmegaConf.load(home / cell["folder"] / "config.yaml")
    assert config.model.hidden == chosen
    shown = str(chosen).replace("[", "\\[").replace("]", "\\]")  # as Markdown writes them
    assert f"| model.hidden | {shown} |" in (home / "report" / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("own_process")
def test_values_that_the_file_keeps_are_in_the_report(write: Write) -> None:
    write(KEPT)
    assert run("partition.alpha=1") == 0
    page = Path("experiments/mine/report/report.md").read_text()
    assert re.search(r"\| P \| [^|]+ \| client.lr \| 0.01 \| yes \| – \| 0 \|", page)
