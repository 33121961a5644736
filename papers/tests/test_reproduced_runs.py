"""Reproductions as a user runs them, at scale smoke, which needs no downloaded data."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.made_runs import make_experiment

from fedhet.core.errors import ConfigError, DataError
from fedhet.study import definition, launch
from fedhet.study import estimate as estimation
from fedhet.study.cells import Cell
from fedhet.study.definition import Experiment
from fedhet.study.estimate import Cost
from papers import table
from papers.command import main
from papers.paper import find
from papers.verdict import NOT_COMPARABLE

pytestmark = pytest.mark.usefixtures("own_process")
HERE = "hydra/launcher=basic"  # in this process


def test_the_comparison_follows_the_runs_and_can_be_made_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs are made up; their exit code is returned."""

    def run(experiment: Experiment) -> tuple[int, Path]:
        assert "hydra.sweep.dir=reproductions/fedgmm/figure6/smoke" in experiment.command
        made = make_experiment(
            Path("made"),
            {axis: list(labels) for axis, labels in experiment.labels.items()},
            lambda axes: 0.5 if axes["method"] == "FedAvg" else 0.6,
            name=experiment.name,
            command=list(experiment.command),
            report={"compare": "method", "metric": "last", "reference": None},
        )
        return 3, made

    monkeypatch.setattr(launch, "run_experiment", run)
    assert main(["fedgmm/figure6", "scale=smoke", "client.lr=0.05"]) == 3
    lines = table.read_csv(Path("made/report/reproduction.csv"), find("fedgmm/figure6"))
    rounds = {line["method"]: line for line in lines if line["measure"] == "rounds@.75"}
    assert {name: line["mean"] for name, line in rounds.items()} == {"FedAvg": "5", "FedGMM": "5"}
    assert rounds["FedGMM"]["verdict"] == NOT_COMPARABLE  # two rounds on digits say nothing
    page = Path("made/report/reproduction.md").read_text()
    assert "Changed for these runs: `client.lr=0.05`." in page
    assert page in capsys.readouterr().out

    assert main(["--verdicts", "made"]) == 0
    assert page in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r" experiment; .*experiment=smoke"):
        main(["fedgmm/figure6", "experiment=smoke"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedgmm/figure6", "fedlex/figure5", "fedsa/figure7"])
def test_a_reproduction_runs_and_ends_with_its_comparison(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "scale=smoke", HERE]) == 0
    folder = Path("reproductions") / name / "smoke"
    lines = table.read_csv(folder / "report" / "reproduction.csv", find(name))
    assert lines
    for line in lines:
        assert int(line["seeds"]) == 1
        assert line["mean"]
        assert line["verdict"] == NOT_COMPARABLE  # two rounds on digits say nothing
        assert line["changed"] == ""
    page = (folder / "report" / "reproduction.md").read_text()
    assert page in capsys.readouterr().out
    assert (folder / "report" / "index.html").exists()

    assert main(["--verdicts", str(folder)]) == 0
    assert page in capsys.readouterr().out


@pytest.mark.slow
def test_a_reproduction_without_its_data_ends_before_its_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FEDHET_DATA_DIR", raising=False)
    with pytest.raises(DataError, match=r"data .*download cifar10"):
        main(["fedsa/table4", "scale=cpu", HERE])
    assert capsys.readouterr().out == ""  # no comparison
    assert not any(Path("reproductions/fedsa/table4/cpu").iterdir())


@pytest.mark.slow
def test_overrides_change_the_runs_and_the_page_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["fedgmm/figure6", "scale=smoke", "method=FedAvg", "client.lr=0.05", "seed=0,1", HERE]
    assert main([*given, "hydra.sweep.dir='my runs'"]) == 0
    lines = table.read_csv(Path("my runs/report/reproduction.csv"), find("fedgmm/figure6"))
    assert {(line["method"], line["seeds"]) for line in lines} == {("FedAvg", "2")}
    assert "Changed for these runs: `method=FedAvg client.lr=0.05`." in capsys.readouterr().out


def test_a_run_that_is_not_measured_is_estimated_from_its_method_and_its_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three methods in two settings with two seeds: four runs are measured, and two estimated."""
    lines = ["data=smoke", "method=FedAvg,FedProx,SCAFFOLD", "seed=0,1"]
    experiment = definition.read(["experiment=peers/fedbench", "scale=paper", *lines])
    assert experiment is not None
    steps = {"FedAvg": 1.0, "FedProx": 2.0, "SCAFFOLD": 5.0}
    settings = {"Dirichlet 0.5": 10.0, "1 class": 30.0}
    measured = []

    def cost(cell: Cell) -> Cost:
        method, setting = str(cell.axes["method"]), str(cell.axes["setting"])
        measured.append((method, setting))
        return Cost(0.0, steps[method] * settings[setting], 0.0, rounds=1, evaluations=0)

    monkeypatch.setattr(estimation, "measure", cost)
    found = estimation.estimate(experiment)
    assert len(measured) == 4
    assert (found.runs, found.trials) == (12, 0)
    assert found.seconds == pytest.approx(2 * sum(steps.values()) * sum(settings.values()))

    part = definition.read(
        ["experiment=peers/fedbench", "scale=paper", *lines, "axes.method=[SCAFFOLD]"]
    )
    assert part is not None
    found = estimation.estimate(part)
    assert (found.runs, found.seconds) == (4, pytest.approx(2 * 5 * sum(settings.values())))


def test_an_estimate_measures_and_leaves_no_runs(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["fedgmm/figure6", "scale=smoke", "method=FedAvg", "seed=range(0,4)"]
    assert main([*given, "--estimate"]) == 0
    out = capsys.readouterr().out
    assert "FedAvg, data=smoke" in out
    assert "2 rounds of " in out
    assert "4 runs, one after another: " in out
    assert not Path("reproductions").exists()
