"""A class without a yaml file: `_target_` names it, and its constructor's arguments are options."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import check_overrides
from config.fake_jobs import install_jobs
from own.conftest import Command

import fedhet
from fedhet import __main__ as main
from fedhet.runs.config import Config, compose
from fedhet.testing import sha256, toy_task

pytestmark = pytest.mark.usefixtures("installed")
ALONE = ["method=fedavg", "method._target_=dynreg_outside.dyn.DynReg"]
FAST = ["rounds=1", "eval.clients=false"]


@pytest.mark.usefixtures("read_once")
def test_its_options_are_those_of_the_constructor() -> None:
    expected = sha256("method=dynreg", "method.alpha=.7", *FAST, task=toy_task())
    assert sha256(*ALONE, "method.alpha=.7", *FAST, task=toy_task()) == expected
    assert sha256(*ALONE, *FAST, task=toy_task()) != expected
    settings = compose([*ALONE, "method.alpha=.7"])
    for line in ("+method.alpha=.7", "++method.alpha=.7"):
        assert compose([*ALONE, line]).cfg == settings.cfg
    assert settings.overrides == (*ALONE, "method.alpha=.7")  # as a node gets them
    assert compose(settings.overrides).cfg == settings.cfg


@pytest.mark.usefixtures("read_once")
def test_others_are_refused() -> None:
    """By the constructor, or where they are no option of the class."""
    for line, message in (
        ("method.alhpa=1", r"method .*dynreg_outside\.dyn\.DynReg: .*'alhpa'"),
        ("client.alpha=1", r"unknown setting 'client.alpha'"),
        ("method.alpha.x=1", r"alpha"),
        ("plugin.nope._target_=dynreg_outside.dyn.DynReg", "unknown plug-in"),
    ):
        with pytest.raises(fedhet.ConfigError, match=message):
            fedhet.run([*ALONE, line, *FAST], task=toy_task())


def test_without_the_class_there_is_no_such_option() -> None:
    with pytest.raises(fedhet.ConfigError, match=r"unknown setting 'method\.alpha'"):
        compose(["method=fedavg", "method.alpha=1"])


@pytest.mark.usefixtures("read_once")
def test_a_sweep_may_vary_option_and_class() -> None:
    lines = [*ALONE, "method.alpha=0.1,0.2"]
    runs = [(*ALONE, f"++method.alpha={alpha}") for alpha in (0.1, 0.2)]
    assert check_overrides(lines, sweep=True) == runs
    classes = ALONE[1] + ",fedhet.methods.fedavg.FedAvg"
    assert len(check_overrides([ALONE[0], classes], sweep=True)) == 2


def test_what_it_names_itself_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedhet.runs.record.figures.draw", lambda *args: [])
    run = fedhet.run([*ALONE, "method.alpha=.7", *FAST], task=toy_task())
    assert run.dir.name.endswith("-dynreg")
    assert run.summary["method"] == "dynreg"
    model = compose(["model=mlp", "model._target_=fedhet.models.Logistic"])
    assert model.choices["model"] == "Logistic"


@pytest.mark.slow
def test_hydra_names_the_folder_after_it(tmp_path: Path, console: Command) -> None:
    done = console(*ALONE, *FAST, cwd=tmp_path)
    assert done.stdout.splitlines()[-1].endswith("-dynreg"), done.stderr


def test_hydra_names_the_folder_of_a_job_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_process: None
) -> None:
    monkeypatch.chdir(tmp_path)
    configs: list[Config] = []
    install_jobs(monkeypatch, configs, lambda settings: None)
    assert main.main(ALONE) == 0
    assert configs[0].run_dir.endswith("-dynreg")


def test_a_class_without_a_name_of_its_own_is_not_fedavg(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "nameless.py").write_text(
        "from dataclasses import dataclass\nfrom fedhet.core.kernel import Method\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Nameless(Method): ...\n"
    )
    monkeypatch.setenv("FEDHET_TRUST", "nameless")
    settings = compose(["method=fedavg", "method._target_=nameless.Nameless"])
    assert settings.choices["method"] == "Nameless"


def test_a_class_that_is_no_method_is_refused(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (site / "of_02.py").write_text(
        "from fedhet.core.server.strategy import FedStrategy\nclass Old(FedStrategy): ...\n"
    )
    monkeypatch.setenv("FEDHET_TRUST", "of_02")
    with pytest.raises(fedhet.ConfigError, match=r"of_02\.Old is no .*Method"):
        fedhet.run(["method=fedavg", "method._target_=of_02.Old"], task=toy_task())
