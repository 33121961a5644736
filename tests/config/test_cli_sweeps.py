"""Sweeps from the command line: what their jobs get, and what becomes of those that fail."""

from __future__ import annotations

import gc
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
from fake_jobs import failing, install_jobs
from omegaconf import OmegaConf

from fedhet import __main__ as main
from fedhet.core.errors import RunFailed
from fedhet.runs import config
from fedhet.runs.config import Config

pytestmark = pytest.mark.usefixtures("own_process")


def test_a_job_has_the_configuration_that_its_overrides_compose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Client processes rely on it. Composing also works inside Hydra's own run."""
    configs: list[Config] = []
    composed: list[Config] = []
    install_jobs(
        monkeypatch, configs, lambda settings: composed.append(config.compose(settings.overrides))
    )
    assert main.main(["-m", "method=fednorm,fedadam", "plugin=[fedprox]", "seed=3"]) == 0
    assert len(configs) == 2
    for job, again in zip(configs, composed, strict=True):
        assert job.cfg == again.cfg
        assert job.choices == again.choices
        assert job.plugins == again.plugins
        assert job.overrides == again.overrides
    assert {(job.choices["method"], job.cfg.seed, job.plugins) for job in configs} == {
        ("fednorm", 3, ("fednorm", "fedprox")),
        ("fedadam", 3, ("fedprox",)),
    }
    assert len({job.run_dir for job in configs}) == 2
    assert all(Path(job.run_dir).parents[2].name == "multirun" for job in configs)


@pytest.mark.usefixtures("read_once")
def test_a_job_of_a_sweep_begins_without_the_objects_of_the_previous_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models: list[weakref.ref[Any]] = []

    def job(settings: Config) -> None:
        assert all(ref() is None for ref in models)
        model = types.ModuleType("model")  # can be referenced weakly
        model.itself = model  # type: ignore[attr-defined]
        models.append(weakref.ref(model))

    install_jobs(monkeypatch, [], job)
    gc.disable()  # it must not depend on when Python collects
    try:
        assert main.main(["-m", "seed=1,2"]) == 0
    finally:
        gc.enable()
    assert len(models) == 2


@pytest.mark.usefixtures("read_once")
def test_job_folders_of_a_sweep_are_short_and_flat(jobs: list[Config]) -> None:
    keys = ("rounds", "fraction", "client.epochs", "client.batch_size")
    overrides = ["data_dir=/a/b/c", "seed=1", *(f"{key}=1" for key in keys)]
    assert main.main(["-m", *overrides]) == 0
    (job,) = jobs
    folder = Path(job.run_dir)
    assert folder.name[0] == "0" and len(folder.name) <= 80
    assert folder.parents[2].name == "multirun"


@pytest.mark.usefixtures("read_once")
def test_names_of_jobs_have_what_varies_alone(
    jobs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    """So that they differ where a name ends."""
    keys = ("rounds", "fraction", "client.epochs", "client.batch_size")
    same = ["method=fedavg", "data_dir=/a/b/c", *(f"{key}=1" for key in keys)]
    assert main.main(["-m", *same, "client.lr=.1,.2", "seed=0,1"]) == 0
    names = [Path(job.run_dir).name for job in jobs]
    assert names == [
        *("0-client.lr=0.1,seed=0", "1-client.lr=0.1,seed=1"),
        *("2-client.lr=0.2,seed=0", "3-client.lr=0.2,seed=1"),
    ]
    out = capsys.readouterr().out.splitlines()
    assert "job 3: client.lr=0.2 seed=1" in out
    home = Path(jobs[0].run_dir).parent
    assert out[-1] == f"to compare the runs: python -m fedhet report {home}"


@pytest.mark.usefixtures("read_once")
def test_a_failing_job_does_not_stop_a_sweep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs: list[Config] = []
    job = failing(RunFailed("diverged"), lambda settings: settings.cfg.seed == 1)
    install_jobs(monkeypatch, configs, job)
    assert main.main(["-m", "seed=1,2"]) == 1
    assert [settings.cfg.seed for settings in configs] == [1, 2]
    printed = capsys.readouterr()
    told = ["error: diverged", "[1/2] seed=1: failed: diverged", "[2/2] ok (0.0 s): seed=2"]
    assert printed.err.splitlines() == [*told, "failed: job 0: seed=1"]
    folders = [line for line in printed.out.splitlines() if line.startswith("run folder: ")]
    assert folders == [f"run folder: {configs[1].run_dir}"]
    assert "job 1: seed=2" in printed.out


@pytest.mark.usefixtures("read_once")
def test_a_wrong_sweep_runs_nothing(jobs: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["-m", "method=fedavg,fednormm"]) == 2
    assert main.main(["-m", "client.lr=.1,0"]) == 2
    assert main.main(["seed=0,1"]) == 2
    assert jobs == []
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("read_once")
def test_the_folder_of_a_sweep(jobs: list[Config], tmp_path: Path) -> None:
    """Its name may have settings, and its record says with what it was called."""
    lines = [
        "rounds=3",
        "seed=1,2",
        "hydra.sweep.dir=sweeps/${rounds}",
        "hydra.sweep.subdir=${seed}",
    ]
    assert main.main(["-m", *lines]) == 0
    home = tmp_path / "sweeps" / "3"
    assert [job.run_dir for job in jobs] == [str(home / "1"), str(home / "2")]
    assert OmegaConf.to_container(OmegaConf.load(home / "multirun.yaml")) == lines


@pytest.mark.usefixtures("read_once")
def test_a_run_of_a_sweep_that_has_lost_too_much(
    monkeypatch: pytest.MonkeyPatch, jobs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    def degraded(path: Path, text: str) -> int:
        return write(path, '{"degraded": true}' if path.parent.name == "1-seed=2" else text)

    write = Path.write_text
    monkeypatch.setattr(Path, "write_text", degraded)
    assert main.main(["-m", "seed=1,2"]) == 3
    assert "degraded: job 1: seed=2: the run has lost" in capsys.readouterr().err


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("client.lr=interval(0.1,1)", "'client.lr=interval(0.1,1)'"),
        ("+hydra.launcher.threads=2", "hydra/launcher=basic: "),
    ],
)
def test_what_a_sweep_cannot_have(
    line: str, reason: str, jobs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["-m", "seed=1,2", line]) == 2
    assert reason in capsys.readouterr().err
    assert jobs == []
