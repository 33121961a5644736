"""scripts/soak, shortened: all faults at once, and one client that attacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "scripts" / "soak"


@pytest.mark.matrix
def test_all_faults_at_once() -> None:
    command = [sys.executable, str(SOAK), "simulation", "--rounds", "8", "--clients", "60"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert (found["steps"], found["messages"]) == (8, 480)
    assert 0 < found["accepted"] < 480
    assert set(found["failures"]) >= {"failed", "late", "refused", "outlier"}
    assert set(found["failures"]) >= {"lost state", "corrupt", "too large", "replayed"}
    assert found["outliers that were accepted"] == 0
    assert found["the same weights"] is True, found["first difference"]
    faulty, clean = found["accuracy"]
    assert faulty == clean > 0.2  # of ten classes: something was learned
    assert all(mib > 0 for mib in found["MiB, means of the second and the last quarter"])
    assert found["processes left"] == 0
    assert found["files left"] == []


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["feddisk", "fedlex", "fedgmm"])
def test_an_attack_has_no_escape(method: str) -> None:
    command = [sys.executable, str(SOAK), "attack", "--replies", "100", "--only", method]
    process = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["replies"] >= 100
    assert found["escapes"] == []
    assert found["MiB beyond the honest runs, at most"] < 1024
