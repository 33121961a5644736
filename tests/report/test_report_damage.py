"""What is wrong in a folder is one sentence, or one run without a result, and no other error."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_runs import change, make_experiment

import fedhet
from fedhet import report
from fedhet.core.errors import DataError

DEEP = "[" * 100_000
OUTSIDE = "its folder is not in"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_experiment(
        tmp_path / "made", {"method": ["A", "B"], "seed": [0, 1]}, lambda axes: 0.5
    )


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"tuned": 5}, "tuned is 5"),
        ({"tuned": [5]}, r"tuned is \[5\]"),
        ({"tuned": [{"axes": None, "chosen": 3}]}, "tuned is"),
        ({"report": []}, r"report is \[\]"),
        ({"report": {"metric": ["last"]}}, "report is"),
        ({"tune": {"space": 1}}, "tune is"),
        ({"axes": {"method": "A"}}, "axes is"),
        ({"axes": None}, "axes is missing"),
        ({"cells": {}}, "cells is {}"),
        ({"command": 3}, "command is 3"),
        ({"fixed": [1]}, "fixed is"),
        ({"experiment": ["made"]}, "experiment is"),
    ],
)
def test_a_damaged_experiment_is_one_error(made: Path, entries: dict[str, Any], told: str) -> None:
    change(made / "experiment.json", **entries)
    with pytest.raises(DataError, match=rf"experiment\.json is damaged: .*{told}"):
        report.write(made)


def test_a_file_that_is_nested_without_end_is_damaged(made: Path) -> None:
    (made / "cells" / "cell-000" / "summary.json").write_text(DEEP)
    (told,) = fedhet.results(made).missing["reason"]
    assert told == "summary.json is damaged: it is nested too deeply"
    (made / "experiment.json").write_text(DEEP)
    with pytest.raises(DataError, match="nested too deeply"):
        fedhet.results(made)


# What is wrong with a cell in experiment.json, and what is told of it.
CELLS: list[tuple[Any, str]] = [
    (7, "it is 7, and no object"),
    ({"axes": None}, "axes is missing"),
    ({"axes": [1]}, "axes is [1]"),
    ({"folder": 1}, "folder is 1"),
    ({"overrides": "seed=1"}, "overrides is 'seed=1'"),
    ({"tuned": 5}, "tuned is 5"),
    ({"folder": "../../../etc"}, OUTSIDE),
    ({"folder": "/etc"}, OUTSIDE),
    ({"folder": "."}, OUTSIDE),
    ({"folder": "a\0b"}, OUTSIDE),
]


def one_cell_for_each(folder: Path, damages: Sequence[Any]) -> Path:
    """Runs of one method, with a seed for each damage and one more."""
    axes = {"method": ["A"], "seed": list(range(len(damages) + 1))}
    return make_experiment(folder, axes, lambda axes: 0.5)


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_cell_is_one_cell_without_a_result(tmp_path: Path) -> None:
    made = one_cell_for_each(tmp_path / "made", CELLS)
    cells = json.loads((made / "experiment.json").read_text())["cells"]
    for place, (entry, _) in enumerate(CELLS):
        cells[place] = {**cells[place], **entry} if isinstance(entry, dict) else entry
    change(made / "experiment.json", cells=cells)
    reasons = fedhet.results(made).missing["reason"]
    pairs = zip(reasons, CELLS, strict=True)
    assert not [(reason, entry) for reason, (entry, told) in pairs if told not in reason]
    assert "10 runs without a result" in " ".join(report.write(made).sentences)


def test_a_link_out_of_the_experiment_is_not_followed(made: Path, tmp_path: Path) -> None:
    inside = made / "cells" / "cell-000"
    inside.rename(tmp_path / "elsewhere")
    inside.symlink_to(tmp_path / "elsewhere")
    (reason,) = fedhet.results(made).missing["reason"]
    assert reason.startswith(OUTSIDE)


SUMMARIES: list[dict[str, Any]] = [
    {"accuracy": "abc"},
    {"accuracy": {"last": "abc"}},
    {"accuracy": {"last": 10**400}},
    {"acc_last_k": 3},
    {"acc_clients_mean": "1"},
    {"targets": [{}]},
    {"targets": [{"accuracy": "high"}]},
    {"targets": 3},
    {"phases": [{}]},
    {"seconds": [1]},
    {"bytes": {"up": 3}},
    {"memory": {"peak": "much"}},
    {"personal": {"last": []}},
    {"plugins": "fednorm"},
    {"models": 3},
    {"seed": "one"},
    {"target": ["class"]},
    {"failures": 1},
    {"loss": {}},
    {"status": 1},
]


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_summary_is_one_cell_without_a_result(tmp_path: Path) -> None:
    made = one_cell_for_each(tmp_path / "made", SUMMARIES)
    for place, entries in enumerate(SUMMARIES):
        change(made / f"cells/cell-{place:03d}/summary.json", **entries)
    reasons = fedhet.results(made).missing["reason"]
    names = {"targets": "thresholds"}  # as format 1 calls them
    told = [
        f"summary.json is damaged: {names.get(name, name)} is " for name, *_ in map(list, SUMMARIES)
    ]
    pairs = zip(reasons, told, strict=True)
    assert not [(reason, begin) for reason, begin in pairs if not reason.startswith(begin)]
    report.write(made)


LINES = ["3", "[]", '{"acc_global": "high"}', '{"seconds": 3}', '{"bytes": {"up": 1}}', DEEP]


@pytest.mark.usefixtures("undrawn")
def test_a_line_of_another_form_ends_the_rounds(tmp_path: Path) -> None:
    made = one_cell_for_each(tmp_path / "made", LINES)
    for place, line in enumerate(LINES):
        path = made / f"cells/cell-{place:03d}/rounds.jsonl"
        path.write_text("\n".join([*path.read_text().splitlines()[:2], line, ""]))
    report.write(made)
    found = fedhet.results(made)
    assert found.rounds.groupby("seed").size().to_list() == [2] * len(LINES) + [4]
    told = [f"cells/cell-{n:03d}/rounds.jsonl is damaged after 2 lines" for n in range(len(LINES))]
    pairs = zip(found.problems, told, strict=True)
    assert not [(problem, begin) for problem, begin in pairs if not problem.startswith(begin)]


@pytest.mark.usefixtures("undrawn")
def test_damaged_counts_of_a_partition_are_told(tmp_path: Path) -> None:
    """Of each setting a partition is drawn."""
    damages: list[Any] = [3, [[1], [1, 2]], [["a"]], [1, 2], [[math.inf, "b"]]]
    axes = {"method": ["A"], "partition.alpha": list(range(len(damages))), "seed": [0]}
    made = make_experiment(tmp_path / "made", axes, lambda axes: 0.5)
    for place, counts in enumerate(damages):
        change(made / f"cells/cell-{place:03d}/partition.json", counts=counts)
    page = report.write(made).page.read_text()
    told = [f"cells/cell-{n:03d}/partition.json is damaged" for n in range(len(damages))]
    assert not [sentence for sentence in told if sentence not in page]


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_state_of_a_cell_is_told(made: Path) -> None:
    for place, code in enumerate([3, {"commit": [1]}]):
        change(made / f"cells/cell-{place:03d}/cell.json", code=code)
    assert list(fedhet.results(made).missing["reason"]) == ["cell.json is damaged"] * 2
    report.write(made)
