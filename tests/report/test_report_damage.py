"""What is wrong in a folder is one sentence, or one run without a result, and no other error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from made_runs import change, make_experiment

import fedhet
from fedhet import report
from fedhet.errors import DataError

DEEP = "[" * 100_000


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
        ({"axes": None}, "lists no axes"),
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
    assert list(fedhet.results(made).missing["reason"]) == ["summary.json is missing or damaged"]
    (made / "experiment.json").write_text(DEEP)
    with pytest.raises(DataError, match="nested too deeply"):
        fedhet.results(made)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (7, "it is 7, and no object"),
        ({"axes": None}, "it has no folder or no axes"),
        ({"axes": [1]}, "axes is [1]"),
        ({"folder": 1}, "folder is 1"),
        ({"overrides": "seed=1"}, "overrides is 'seed=1'"),
        ({"tuned": 5}, "tuned is 5"),
        ({"folder": "../../../etc"}, "its folder is not in that of the experiment"),
        ({"folder": "/etc"}, "its folder is not in that of the experiment"),
        ({"folder": "."}, "its folder is not in that of the experiment"),
        ({"folder": "a\0b"}, "its folder is not in that of the experiment"),
    ],
)
def test_a_damaged_cell_is_one_cell_without_a_result(made: Path, entry: Any, told: str) -> None:
    cells = json.loads((made / "experiment.json").read_text())["cells"]
    cells[1] = {**cells[1], **entry} if isinstance(entry, dict) else entry
    change(made / "experiment.json", cells=cells)
    written = report.write(made)
    (reason,) = fedhet.results(made).missing["reason"]
    assert told in reason and "1 run without a result" in " ".join(written.sentences)


def test_a_link_out_of_the_experiment_is_not_followed(made: Path, tmp_path: Path) -> None:
    inside = made / "cells" / "cell-000"
    inside.rename(tmp_path / "elsewhere")
    inside.symlink_to(tmp_path / "elsewhere")
    (reason,) = fedhet.results(made).missing["reason"]
    assert reason == "its folder is not in that of the experiment"


@pytest.mark.parametrize(
    "entries",
    [
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
    ],
)
def test_a_damaged_summary_is_one_cell_without_a_result(
    made: Path, entries: dict[str, Any]
) -> None:
    change(made / "cells" / "cell-000" / "summary.json", **entries)
    (reason,) = fedhet.results(made).missing["reason"]
    assert reason.startswith(f"summary.json is damaged: {next(iter(entries))} is ")
    report.write(made)


@pytest.mark.parametrize(
    "line", ["3", "[]", '{"acc_global": "high"}', '{"seconds": 3}', '{"bytes": {"up": 1}}', DEEP]
)
def test_a_line_of_another_form_ends_the_rounds(made: Path, line: str) -> None:
    path = made / "cells" / "cell-000" / "rounds.jsonl"
    path.write_text("\n".join([*path.read_text().splitlines()[:2], line, ""]))
    report.write(made)
    found = fedhet.results(made)
    assert (found.rounds["folder"] == "cells/cell-000").sum() == 2
    assert found.problems[0].startswith("cells/cell-000/rounds.jsonl is damaged after 2 lines")


@pytest.mark.parametrize("counts", [3, [[1], [1, 2]], [["a"]], [1, 2], [[math.inf, "b"]]])
def test_damaged_counts_of_a_partition_are_told(made: Path, counts: Any) -> None:
    change(made / "cells" / "cell-000" / "partition.json", counts=counts)
    assert "partition.json is damaged" in report.write(made).page.read_text()


@pytest.mark.parametrize("code", [3, {"commit": [1]}])
def test_a_damaged_state_of_a_cell_is_told(made: Path, code: Any) -> None:
    change(made / "cells" / "cell-000" / "cell.json", code=code)
    assert list(fedhet.results(made).missing["reason"]) == ["cell.json is damaged"]
    report.write(made)
