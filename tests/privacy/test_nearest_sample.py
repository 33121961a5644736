"""The attack that docs/promises_measured.md measures, on what is known, and on real messages."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def attack(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("nearest_sample")


def test_copies_and_the_auc_of_known_statistics(
    attack: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    corners = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    targets = [
        attack.Target(corners[:1], corners, torch.tensor([[0.0, 2.0], [0.0, 0.5], [9.0, 9.0]])),
        attack.Target(corners[1:] * 1.0005, corners[1:], corners[:1]),
    ]
    monkeypatch.setattr(attack, "attacked", lambda overrides: targets)
    # (0, 1) is nearer than all three others, (1, 0), at a distance of 1.41, than one of the three.
    assert attack.measure([]) == {
        "sent": 2,
        "copies": 1,
        "auc": pytest.approx((1 + 1 / 3 + 1) / 3),
    }
    monkeypatch.setattr(attack, "attacked", lambda overrides: targets[1:])
    targets[1] = attack.Target(corners[1:] * 1.01, corners[1:], corners[1:])
    assert attack.measure([]) == {"sent": 1, "copies": 0, "auc": 0.5}
    monkeypatch.setattr(attack, "attacked", lambda overrides: [])
    assert attack.measure([]) == {"sent": 0, "copies": None, "auc": None}


def test_wrong_settings_are_one_line(
    attack: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in ("method=fedgm", "rounds=0", "data_dir", "dataset=npz"):
        assert attack.main([line]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1


def test_a_run_without_statistics_says_so(
    attack: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["rounds=1", "client.epochs=1", "partition.clients=3"]
    assert attack.main(["method=fedavg", *run]) == 0
    assert capsys.readouterr().out.startswith("no reply ")
    assert attack.main(["method=fednorm", *run]) == 0
    assert capsys.readouterr().out.startswith("sent 3.000\ncopies 0.000\nauc ")


@pytest.mark.parametrize("method", ["fedgmm", "fedpcl"])
def test_the_default_sends_no_copy_of_a_sample(attack: ModuleType, method: str) -> None:
    run = [f"method={method}", "rounds=1", "client.epochs=1", "partition.clients=4"]
    literal, default = attack.measure([*run, "privacy.min_count=0"]), attack.measure(run)
    assert literal["copies"] > 0.1
    assert default["copies"] == 0
    assert 0 < default["sent"] < literal["sent"]
    assert default["auc"] < literal["auc"]


def test_latents_are_read_too(attack: ModuleType) -> None:
    assert attack.measure(["method=fednorm", "rounds=1", "client.epochs=1"])["sent"] == 10


def test_label_counts(attack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two clients with the classes 0 and 1 of four; a count of one is a copy."""
    label = torch.tensor([0, 0, 0, 1])
    told = [torch.tensor([3, 1, 0, 0]), torch.tensor([3, 0, 0, 0])]
    targets = [target for counts in told for target in attack.of_counts(counts, label)]
    monkeypatch.setattr(attack, "attacked", lambda overrides: targets)
    # Every class is told from those that are absent, but for the one that looks like them.
    assert attack.measure([]) == {"sent": 3, "copies": 1 / 3, "auc": (1 + 1 + 1 + 0.5) / 4}


FEDDISK = ["method=feddisk", "rounds=1", "eval.every=9", "eval.clients=false"]
FEDDISK += [f"plugin.feddisk.{key}_max_epochs=1" for key in ("local", "clf")]


@pytest.mark.slow
def test_what_a_made_tells(attack: ModuleType) -> None:
    """Real messages: training raises the likelihood of the client's own samples by more."""
    lines = [*FEDDISK, "plugin.feddisk.made_lr=.01", "plugin.feddisk.made_max_rounds=15"]
    found = attack.measure([*lines, "partition.clients=20"])
    noised = attack.measure([*lines, "partition.clients=20", "privacy.noise=1"])
    assert found["sent"] == 15 * 20 and found["copies"] == 0
    assert found["auc"] > 0.52 and abs(noised["auc"] - 0.5) < 0.02


def test_a_made_is_read_in_every_reply(attack: ModuleType) -> None:
    lines = [*FEDDISK, "plugin.feddisk.made_lr=.01", "plugin.feddisk.made_max_rounds=2"]
    found = attack.measure([*lines, "partition.clients=4"])
    assert found["sent"] == 2 * 4 and found["copies"] == 0
    assert found["auc"] > 0.5
