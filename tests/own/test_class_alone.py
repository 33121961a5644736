"""A class without a yaml file: `_target_` names it, and its constructor's arguments are options."""

from __future__ import annotations

from pathlib import Path

import pytest
from own.conftest import Command

import fedhet
from fedhet.config import check_overrides, compose
from fedhet.testing import sha256, toy_task

pytestmark = pytest.mark.usefixtures("installed")
ALONE = ["method=fedavg", "method._target_=feddyn_outside.dyn.FedDyn"]
FAST = ["rounds=2", "eval.clients=false"]


def test_its_options_are_those_of_the_constructor() -> None:
    expected = sha256("method=feddyn", "method.alpha=.7", *FAST, task=toy_task())
    for line in ("method.alpha=.7", "+method.alpha=.7", "++method.alpha=.7"):
        assert sha256(*ALONE, line, *FAST, task=toy_task()) == expected
    assert sha256(*ALONE, *FAST, task=toy_task()) != expected
    settings = compose([*ALONE, "method.alpha=.7"])
    assert settings.overrides == (*ALONE, "method.alpha=.7")  # as a node gets them
    assert compose(settings.overrides).cfg == settings.cfg


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("method.alhpa=1", r"'method.alhpa' \(did you mean method.alpha\?\); method has alpha$"),
        ("method.setting=1", r"unknown setting 'method.setting'.*; method has alpha$"),
        ("client.alpha=1", r"unknown setting 'client.alpha'.* or method.alpha or"),
        ("method.alpha.x=1", r"unknown setting 'method.alpha.x'.*nothing below it"),
        ("plugin.nope._target_=feddyn_outside.dyn.FedDyn", "unknown plug-in"),
    ],
)
def test_others_are_refused_with_the_closest_one(line: str, message: str) -> None:
    with pytest.raises(fedhet.ConfigError, match=message):
        compose([*ALONE, line])


def test_without_the_class_there_is_no_such_option() -> None:
    with pytest.raises(fedhet.ConfigError, match=r"unknown setting 'method\.alpha'"):
        compose(["method=fedavg", "method.alpha=1"])


def test_a_sweep_may_vary_option_and_class() -> None:
    lines = [*ALONE, "method.alpha=.1,.2"]
    assert check_overrides(lines, sweep=True) == [*ALONE, "++method.alpha=.1,.2"]
    classes = ALONE[1] + ",fedhet.methods.fedavg.FedAvg"
    assert check_overrides([ALONE[0], classes], sweep=True) == [ALONE[0], classes]


def test_what_it_names_itself_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    run = fedhet.run([*ALONE, "method.alpha=.7", *FAST], task=toy_task())
    assert run.dir.name.endswith("-feddyn")
    assert run.summary["method"] == "feddyn"
    done = console(*ALONE, *FAST, "rounds=1", cwd=tmp_path)  # Hydra makes this folder itself
    assert done.stdout.splitlines()[-1].endswith("-feddyn"), done.stderr
    model = compose(["model=mlp", "model._target_=fedhet.models.Logistic"])
    assert model.choices["model"] == "Logistic"


def test_a_class_without_a_name_of_its_own_is_not_fedavg(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "nameless.py").write_text(
        "from fedhet.strategy import FedStrategy\nclass Nameless(FedStrategy): ...\n"
    )
    monkeypatch.setenv("FEDHET_TRUST", "nameless")
    settings = compose(["method=fedavg", "method._target_=nameless.Nameless"])
    assert settings.choices["method"] == "Nameless"
