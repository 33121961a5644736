"""Parts of an experiment, and what of its runs is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from experiment.mine import SMALL, run
from experiment.pretend import Pretend

from fedhet.core.errors import ConfigError
from fedhet.study import cells, definition
from fedhet.study.code import Code
from fedhet.study.folder import ExperimentFolder

pytestmark = pytest.mark.usefixtures("own_process")
Write = Callable[..., None]
QUICK = f"rounds: 1{SMALL}"
TUNED = f"""{QUICK}
axes:
  method: {{A: method=fedavg, S: method=fedsgd}}
  partition.alpha: [0.3, 1]
  seed: [0]
tune: {{seeds: [8], per: [method], space: {{client.lr: [0.01, 0.1]}}}}
"""


def read(*lines: str) -> definition.Experiment:
    experiment = definition.read(["experiment=mine", *lines])
    assert experiment is not None
    return experiment


def test_a_part_has_all_trials_on_which_its_settings_depend(
    write: Write, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    write(TUNED)
    assert pretend.run("axes.partition.alpha=[0.3]", "axes.method=A") == 0
    out, err = capsys.readouterr()
    assert err.startswith("experiment mine: checking 1 run and 4 trials (80% of all)\n")
    # A is tried with two rates on both partitions, and run on one of them.
    assert "experiment mine: 5 of 5 runs are complete; 7 other runs were not requested" in out
    assert len(pretend.launched) == 5 and not any(" S " in label for label in pretend.launched)
    chosen = {entry["axes"]["method"]: entry["chosen"] for entry in pretend.record()["tuned"]}
    assert chosen["A"] is not None
    assert chosen["S"] is None


def test_a_label_with_brackets_is_found_by_its_name(write: Write) -> None:
    write("axes: {method: {'[x] mu=0.1': method=fedavg, 'x mu=0.1': method=fedprox}, seed: [0]}")
    assert read("axes.method='[x] mu=0.1'").part == {"method": ("[x] mu=0.1",)}
    assert read("axes.method='[x]*'").part == {"method": ("x mu=0.1",)}  # a pattern


def test_a_tracker_and_figures_leave_a_run_where_it_is(write: Write) -> None:
    text = f"{QUICK}\naxes: {{method: {{A: method=fedavg}}, seed: [0]}}"
    write(text)
    (before,) = cells.runs(read())
    for lines in (["tracker=tensorboard"], ["figures=true"]):
        (cell,) = cells.runs(read(*lines))
        assert lines[0] in cell.overrides
        assert cell.folder == before.folder
    write(f"{text}\nfigures: true\ndefaults: [{{override /tracker: tensorboard}}]")
    assert cells.runs(read())[0].folder == before.folder
    assert cells.runs(read("client.lr=0.5"))[0].folder != before.folder
    # As an axis they make two runs.
    write(text.replace("seed: [0]", "figures: [true, false]"))
    assert len({cell.folder for cell in cells.runs(read())}) == 2


@pytest.mark.slow
def test_seeds_alone_are_repetitions_of_one_method(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(f"{QUICK}\naxes: {{seed: [0, 1]}}")
    assert run() == 0
    out = capsys.readouterr().out
    assert "experiment mine: 2 of 2 runs are complete" in out
    assert "report: " in out


def test_without_a_report_the_exit_code_says_so(
    write: Write,
    pretend: Pretend,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(folder: Path) -> None:
        raise ConfigError(f"{folder} has no page")

    write(f"{QUICK}\naxes: {{seed: [0]}}")
    pretend.report = refused
    assert pretend.run() == 1
    printed = capsys.readouterr()
    assert f"no report: {pretend.folder} has no page" in printed.err
    assert printed.out.splitlines()[-1] == f"run folder: {pretend.folder}"


def test_a_checkpoint_outlives_a_commit_and_no_change_of_the_code(
    write: Write, tmp_path: Path
) -> None:
    write(f"{QUICK}\naxes: {{seed: [0]}}")
    experiment = read()
    (cell,) = cells.runs(experiment)
    folder = tmp_path / "mine"
    checkpoint = folder / cell.folder / "checkpoints" / "1" / "manifest.json"

    def kept(code: Code) -> bool:
        ExperimentFolder(folder, experiment, code).prepare([cell])
        return checkpoint.exists()

    folder.mkdir()
    assert not kept(Code("1", "aaa", "d"))
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    assert kept(Code("1", "bbb", "d"))
    assert not kept(Code("1", "bbb", "e"))
