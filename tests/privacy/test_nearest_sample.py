"""The attack that docs/privacy.md measures, on what is known, and on real messages."""

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


@pytest.mark.parametrize("method", ["fedgmm", "fedpcl"])
def test_the_default_sends_no_copy_of_a_sample(attack: ModuleType, method: str) -> None:
    run = [f"method={method}", "rounds=1", "client.epochs=1"]
    literal, default = attack.measure([*run, "privacy.min_count=0"]), attack.measure(run)
    assert literal["copies"] > 0.1
    assert default["copies"] == 0
    assert 0 < default["sent"] < literal["sent"]
    assert default["auc"] < literal["auc"]


def test_latents_are_read_too(attack: ModuleType) -> None:
    assert attack.measure(["method=fednorm", "rounds=1", "client.epochs=1"])["sent"] == 10
