"""Measures of the records of plugin=[drift]."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from report.made_runs import make_experiment
from safetensors.torch import save_file

from fedhet.study.report.results import results
from papers.measures import value
from papers.runs import runs_of

# Nine clients agree on each of three parameters, and one is 10 away.
CLIENTS = torch.tensor([[0.0, 5.0, 1.0]] * 9 + [[10.0, -5.0, 1.0]])


def measure(folder: Path, name: str, merged: list[float]) -> float:
    home = make_experiment(folder, {"method": ["one"], "seed": [0]}, lambda axes: 0.5)
    run = home / "cells" / "cell-000"
    rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for row in rows:
        row["drift.dispersion"] = float(row["step"])
    (run / "rounds.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arrays = {
        "pids": torch.tensor([4, 2]),
        "similarity": torch.tensor([0.9, 0.3], dtype=torch.float64),
        "clients": CLIENTS,
        "merged": torch.tensor(merged),
    }
    (run / "arrays").mkdir()
    save_file(arrays, run / "arrays" / "drift-4.safetensors")
    [read] = runs_of(results(home), "method")
    return value(name, read)


def test_the_similarity_is_that_of_the_client(tmp_path: Path) -> None:
    assert measure(tmp_path / "a", "similarity@2", [0.0] * 3) == pytest.approx(0.3)
    assert measure(tmp_path / "b", "similarity@4", [0.0] * 3) == pytest.approx(0.9)
    assert math.isnan(measure(tmp_path / "c", "similarity@3", [0.0] * 3))  # it did not take part


def test_the_dispersion_is_a_mean_over_the_rounds(tmp_path: Path) -> None:
    assert measure(tmp_path / "a", "dispersion", [0.0] * 3) == pytest.approx(2.5)
    assert math.isnan(measure(tmp_path / "b", "change_variance", [0.0] * 3))


def test_a_mean_lies_off_the_peak_of_a_skewed_distribution(tmp_path: Path) -> None:
    """Means 1 and 4, peaks 0 and 5, deviation 3; the third parameter is the same everywhere."""
    means = measure(tmp_path / "a", "peak_distance", [1.0, 4.0, 1.0])
    peaks = measure(tmp_path / "b", "peak_distance", [0.0, 5.0, 7.0])
    assert means == pytest.approx(1 / 3, abs=0.05)
    assert peaks == pytest.approx(0, abs=0.05)
