"""What an experiment's file and the command line make of its axes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

import fedhet
from fedhet.core.errors import ConfigError
from fedhet.runs.config import components, compose, experiment_file
from fedhet.study import cells, definition
from fedhet.study.definition import Experiment
from fedhet.study.report.compared import SCORES

Write = Callable[..., None]
AXES = """
# Two methods on two partitions
rounds: 3
axes:
  method:
    FedAvg: method=fedavg
    SCAFFOLD with FedNorm: method=scaffold plugin=[fednorm] client.weight_decay=.05
  partition.alpha: [0.05, 0.3]
  seed: range(0,3)
scales:
  small: [rounds=2, "seed=0,1"]
"""
TUNED = f"""{AXES}
tune:
  budget: 2
  space:
    client.momentum: [0, 0.5]
    client.lr: tag(log,interval(0.01,1))
  own:
    FedAvg: {{client.clip: [null, 1.0]}}
"""


def read(*lines: str) -> Experiment:
    experiment = definition.read(["experiment=mine", *lines])
    assert experiment is not None
    return experiment


def test_the_runs_are_all_combinations_of_the_values(write: Write) -> None:
    write(AXES)
    runs = cells.runs(read())
    labels = [tuple(run.axes.values()) for run in runs]
    methods = ["FedAvg", "SCAFFOLD with FedNorm"]
    assert labels == list(product(methods, [0.05, 0.3], [0, 1, 2]))
    assert runs[-1].overrides == (
        "experiment=mine",
        "figures=false",
        "engine.fused=auto",
        "method=scaffold",
        "plugin=[fednorm]",
        "client.weight_decay=.05",
        "partition.alpha=0.3",
        "seed=2",
    )
    config = compose(runs[-1].overrides)
    assert config.choices["method"] == "scaffold"
    assert config.plugins == ("fednorm",)
    assert (config.cfg.rounds, config.cfg.partition.alpha, config.cfg.seed) == (3, 0.3, 2)
    assert "axes" not in config.cfg


def test_the_command_line_gives_axes_other_values(write: Write) -> None:
    write(AXES)
    experiment = read("seed=7", "method=fedavg,fedprox", "client.epochs=1,2", "rounds=1")
    assert experiment.labels == {
        "method": ["FedAvg", "fedprox"],  # the file's label of the same override
        "partition.alpha": [0.05, 0.3],
        "seed": [7],
        "client.epochs": [1, 2],
    }
    assert experiment.fixed == ("experiment=mine", "rounds=1", "figures=false", "engine.fused=auto")


def test_a_scale_comes_before_the_command_line(write: Write) -> None:
    write(AXES)
    small = read("scale=small")
    assert [value.label for value in small.axes["seed"]] == [0, 1]
    assert small.fixed == ("experiment=mine", "rounds=2", "figures=false", "engine.fused=auto")
    given = read("scale=small", "rounds=9", "figures=true").fixed
    assert given == ("experiment=mine", "rounds=9", "figures=true", "engine.fused=auto")


def test_a_folder_belongs_to_the_settings_of_its_run(write: Write) -> None:
    """Further values leave the runs where they are, and another setting moves them."""
    write(AXES)
    before = {run.folder: run.overrides for run in cells.runs(read())}
    assert len(before) == 12
    more = {run.folder for run in cells.runs(read("seed=0,1,2,3", "partition.alpha=.3,.05"))}
    assert set(before) < more
    assert not set(before) & {run.folder for run in cells.runs(read("rounds=4"))}
    write(AXES.replace("rounds: 3", "rounds: 4"))
    assert not set(before) & {run.folder for run in cells.runs(read())}
    write(AXES.replace("# Two methods", "# Both methods"))  # a comment changes nothing
    assert set(before) == {run.folder for run in cells.runs(read())}


def test_an_experiment_without_axes_is_a_single_run(write: Write) -> None:
    write("rounds: 2")
    assert definition.read(["experiment=mine"]) is None
    assert definition.read(["method=fedavg", "seed=1"]) is None
    experiment_file.refuse(["experiment=mine"])


def test_several_experiments_at_once_are_single_runs(write: Write) -> None:
    write("rounds: 2")
    write("rounds: 3", name="yours")
    assert definition.read(["experiment=mine,yours"]) is None
    write(AXES, name="yours")
    with pytest.raises(ConfigError, match=r"experiment=yours .*axes"):
        definition.read(["experiment=mine,yours"])


@pytest.mark.parametrize(
    "axes, compare",
    [
        ("{seed: [0], rounds: [1, 2]}", "rounds"),
        ("{seed: [0], rounds: [1], method: [fedavg]}", "method"),
        ("{seed: [0, 1]}", "method"),
    ],
)
def test_seeds_are_not_compared(write: Write, axes: str, compare: str) -> None:
    write(f"axes: {axes}")
    assert read().report["compare"] == compare


def test_an_experiment_knows_the_scores_of_its_report() -> None:
    assert tuple(SCORES) == definition.METRICS


def test_where_one_run_is_possible_axes_are_refused(write: Write) -> None:
    write(AXES)
    with pytest.raises(ConfigError, match=r"experiment=mine .*axes"):
        fedhet.run(["experiment=mine"])


@pytest.mark.parametrize(
    "text, lines, message",
    [
        (AXES, ["scale=large"], "scale=large is not allowed; choose from: small"),
        (
            AXES,
            ["axes.partition.beta=1"],
            "axes=partition.beta is not allowed (did you mean partition.alp",
        ),
        ("rounds: 2", ["scale=small"], "'scale=small' needs an experiment that has axes;"),
        ("axes: {seed: [0]}", ["scale=small"], "scale=small: this experiment has no scales"),
        ("axes: {seed: []}", [], "axes.seed has no value"),
        ("axes: {seed: [0, 1, 0]}", [], "axes.seed has 0 twice"),
        ("axes: [seed]", [], "axes=['seed']: names with values are expected"),
        ("client: [a]\naxes: {seed: [0]}", [], "composing config: Cannot merge DictConfig with"),
        ("axes: {rounds: [1]}\ntune: {seeds: [0], space: {client.lr: [1]}}", [], "seed 0 is also"),
        ("seed: 3\naxes: {rounds: [1]}\ntune: {seeds: [3], space: {client.lr: [1]}}", [], "seed 3"),
        (
            "axes: {method: {A: seed=4}}\ntune: {seeds: [4], space: {client.lr: [1]}}",
            [],
            "seed 4 is also",
        ),
        ("axes: {rounds: [1], seed: [0]}", ["report.compare=seed"], "choose from: rounds"),
        ("axes: {method: {A: {b: 1}}}", [], "axes.method.A={'b': 1}: must be overrides"),
        ("axes: {client.lr: 'interval(0,1)'}", [], "an axis cannot be an interval"),
        (AXES, ["report.compare=model"], "report.compare=model is not allowed; choose from: meth"),
        (AXES, ["report.reference=FedProx"], "report.reference=FedProx is not allowed"),
        (AXES, ["report.metric=best"], "choose from: last, best_val, last_k, clients"),
        (AXES, ["on_other_code=maybe"], "choose from: stop, keep, rerun"),
        (TUNED, ["tune.budget=0"], "tune.budget=0 is not allowed"),
        (TUNED, ["tune.seeds=[1]"], "seed 1 is also a seed of the runs"),
        (TUNED, ["tune.seeds=[]"], "the trials need a seed"),
        (TUNED.replace("FedAvg: {", "FedAvgg: {"), [], "(did you mean FedAvg?)"),
        (TUNED.replace("0.01,1)", "0,1)"), [], "the ends of this interval are not allowed"),
        (TUNED.replace("[0, 0.5]", "{a: 1}"), [], "a list of values, or interval(a,b), is"),
        (TUNED.replace("[0, 0.5]", "[]"), [], "there is no value to try"),
        (TUNED, ["tune.per=[partition.alpha]"], "tune.own.FedAvg: settings are chosen for each"),
        (TUNED.replace("client.momentum", "seed"), [], "tune.space.seed: an axis has this name"),
        ("axes: {seed: [0]}\ntune: {budget: null, space: 3}", [], "tune.space=3: names with"),
    ],
)
def test_what_is_wrong_is_named(write: Write, text: str, lines: list[str], message: str) -> None:
    write(text)
    with pytest.raises(ConfigError) as error:
        definition.read(["experiment=mine", *lines])
    assert message in str(error.value)


@pytest.mark.parametrize(
    "lines, message",
    [
        (["method=fedavgg"], "unknown method 'fedavgg'"),
        (["client.lr=0"], "client.lr=0 is not allowed"),
        (["partition.alpha=.1,-1"], "partition.alpha=-1"),
        (["client.foo=1"], "unknown setting 'client.foo'"),
        # Only the strategy refuses it: FedGen's server step needs the mean of the classifiers.
        (["method=fedavg,fednova", "plugin=[fedlex]", "merge=median"], "merge=median"),
    ],
)
def test_every_cell_is_checked(write: Write, lines: list[str], message: str) -> None:
    write(AXES)
    with pytest.raises(ConfigError) as error:
        cells.check(cells.covering(read(*lines)))
    assert message in str(error.value)


def test_a_setting_of_the_command_line_is_not_tuned(write: Write) -> None:
    write(TUNED)
    tuning = read().tuning
    assert tuning is not None
    assert list(tuning.space) == ["client.momentum", "client.lr"]
    assert list(tuning.own["FedAvg"]) == ["client.clip"]
    fixed = read("client.lr=.1", "client.clip=1").tuning
    assert fixed is not None
    assert list(fixed.space) == ["client.momentum"]
    assert not fixed.own["FedAvg"]
    write(TUNED.partition("  own:")[0])
    assert read("client.lr=.1", "client.momentum=0").tuning is None


def test_an_axis_takes_values_by_their_labels(write: Write) -> None:
    write(AXES)
    by_label = read("method='SCAFFOLD with FedNorm',FedAvg", "seed=0")
    assert by_label.axes["method"] == read().axes["method"][::-1]
    assert read("method=FedAvg").axes["method"] == read("method=fedavg").axes["method"]
    with pytest.raises(ConfigError, match="unknown method 'FedAvgg'"):
        read("method=FedAvgg")
    with pytest.raises(ConfigError, match="unknown method 'FedAvg'"):
        definition.read(["method=FedAvg"])  # no experiment has this label


def test_a_scale_chooses_by_label_and_what_it_leaves_out_is_not_tuned(write: Write) -> None:
    write(TUNED.replace("small: [", "small: [\"method='SCAFFOLD with FedNorm'\", "))
    small = read("scale=small")
    assert [value.label for value in small.axes["method"]] == ["SCAFFOLD with FedNorm"]
    assert small.tuning is not None
    assert small.tuning.own == {}


def test_the_command_names_the_folders_in_which_it_was_found(write: Write, tmp_path: Path) -> None:
    write(AXES)
    folder = tmp_path / "own"
    assert read("seed=7").command == (f"--config-dir={folder}", "experiment=mine", "seed=7")


def test_a_misspelled_setting_is_not_taken_for_an_axis(write: Write) -> None:
    write(AXES)
    with pytest.raises(ConfigError, match=r"mean partition\.alpha") as error:
        cells.check(cells.runs(read("partition.alhpa=1,2")))
    assert "axes.partition" not in str(error.value)


def test_a_cell_goes_on_as_the_experiment_has_it(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("rounds: 2")
    run = tmp_path / "run"
    run.mkdir()
    (run / "overrides.yaml").write_text("[experiment=mine]\n")
    assert compose([f"resume={run}", "rounds=4"]).cfg.rounds == 4  # a run of its own
    (run / "cell.json").write_text('{"status": "failed"}')  # a run of a sweep
    assert compose([f"resume={run}", "rounds=4"]).cfg.rounds == 4
    (run / "cell.json").write_text('{"status": "failed", "code": {}}')
    assert compose([f"resume={run}"]).cfg.rounds == 2
    with pytest.raises(ConfigError, match=r"'rounds=4' .*resume="):
        compose([f"resume={run}", "rounds=4"])
    monkeypatch.delenv(components.SEARCH_PATH)
    with pytest.raises(ConfigError, match=r"unknown experiment 'mine'.*--config-dir"):
        compose([f"resume={run}"])
