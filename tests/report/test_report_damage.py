"""What is wrong in a folder is one sentence, or one run without a result, and no other error."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_runs import change, make_experiment, make_run

import fedhet
from fedhet.core.errors import DataError
from fedhet.data import forms
from fedhet.study import report

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
        ({"tuned": 5}, "tuned .*5"),
        ({"tuned": [5]}, r"tuned .*\[5\]"),
        ({"tuned": [{"axes": None, "chosen": 3}]}, "tuned "),
        ({"report": []}, r"report .*\[\]"),
        ({"report": {"metric": ["last"]}}, "report "),
        ({"tune": {"space": 1}}, "tune "),
        ({"axes": {"method": "A"}}, "axes "),
        ({"axes": None}, "axes .*missing"),
        ({"cells": {}}, "cells .*{}"),
        ({"command": 3}, "command .*3"),
        ({"fixed": [1]}, "fixed "),
        ({"experiment": ["made"]}, "experiment "),
    ],
)
def test_a_damaged_experiment_is_one_error(made: Path, entries: dict[str, Any], told: str) -> None:
    change(made / "experiment.json", **entries)
    with pytest.raises(DataError, match=rf"experiment\.json .*damaged: .*{told}"):
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
    (7, "it is 7, and not an object"),
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


FILES = ["cell.json", "summary.json", "partition.json", "environment.json", "rounds.jsonl"]
FILES += ["config.yaml", "clients/round-000004.parquet"]


@pytest.mark.timeout(60)  # what reads from a pipe does not end
@pytest.mark.usefixtures("undrawn")
def test_no_pipe_no_link_and_no_huge_file_of_a_run_is_read(tmp_path: Path) -> None:
    """A link may lead to what the reader of the report should not see."""
    made = one_cell_for_each(tmp_path / "made", [*FILES, *FILES, *FILES])
    (tmp_path / "secret").write_text('{"name": "s3cret", "format": 1}\n')
    for number, name in enumerate([*FILES, *FILES, *FILES]):
        file = made / f"cells/cell-{number:03d}" / name
        if number < 2 * len(FILES):
            file.unlink()
            if number < len(FILES):
                os.mkfifo(file)
            else:
                file.symlink_to(tmp_path / "secret")
        elif name.endswith("parquet"):
            file.write_bytes(b"PAR1")
        else:
            os.truncate(file, forms.LARGEST_FILE + 1)
    found = fedhet.results(made)
    assert list(found.missing["seed"]) == [0, 1, 7, 8, 14, 15]
    assert len(found.clients) == 5 * (len(found.cells) - 6 - 3)
    assert [found.partition(found.cells[number]) for number in (2, 9, 16)] == [{}] * 3
    page = report.write(made).page.read_text()
    assert "s3cret" not in page
    for number in (3, 4, 10, 11, 17, 18):
        assert f"cells/cell-{number:03d}/{FILES[number % 7]} is damaged" in page


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["config.yaml", "overrides.yaml", "summary.json"])
@pytest.mark.parametrize("link", [False, True])
def test_a_run_without_an_experiment_is_read_from_plain_files(
    tmp_path: Path, name: str, link: bool
) -> None:
    for number in range(2):
        make_run(tmp_path / str(number), [0.5], overrides=[f"client.lr={number + 1}"])
    (tmp_path / "secret").write_text("- client.lr=777\n")
    file = tmp_path / "0" / name
    file.unlink()
    if link:
        file.symlink_to(tmp_path / "secret")
    else:
        os.mkfifo(file)
    reason = fedhet.results(tmp_path).runs.set_index("folder").loc["0", "reason"]
    told = {"config.yaml": "None", "overrides.yaml": "overrides.yaml is missing or damaged"}
    assert str(reason).startswith(told.get(name, "summary.json is damaged: it is a link"))
    assert "777" not in report.write(tmp_path).page.read_text()


@pytest.mark.timeout(60)
def test_the_experiment_is_read_from_a_plain_file(made: Path) -> None:
    (made / "experiment.json").rename(made / "other.json")
    os.mkfifo(made / "experiment.json")
    with pytest.raises(DataError, match=r"experiment\.json .*damaged: .*link, .*folder, "):
        report.write(made)
    (made / "experiment.json").unlink()
    (made / "experiment.json").symlink_to("other.json")
    with pytest.raises(DataError, match=r"experiment\.json .*damaged: .*link, .*folder, "):
        report.write(made)


FORMULAS = ["=HYPERLINK('http://a')", "+1+1", "-1+1", "@SUM(A1)", "\t=1+1", "\r=1+1", " =1+1"]


@pytest.mark.usefixtures("undrawn")
def test_no_text_in_a_table_is_a_formula(tmp_path: Path) -> None:
    """Numbers are as they are, and so is the name of a run, by which its row is found."""
    axes = {"method": FORMULAS, "partition.alpha": [-0.5, "-7"], "seed": [0, 1]}
    made = make_experiment(tmp_path / "made", axes, lambda axes: -0.5 - axes["seed"])
    cells = json.loads((made / "experiment.json").read_text())["cells"]
    (made / "cells" / "cell-000").rename(made / "-cell")
    cells[0]["folder"] = "-cell"
    change(made / "experiment.json", cells=cells)
    change(made / "cells" / "cell-001" / "cell.json", status="failed", reason="=1+1\r\n=2")
    change(made / "cells" / "cell-001" / "summary.json", status="failed")
    change(made / "cells" / "cell-002" / "environment.json", **{"=name": "@value", "n": "-3"})
    report.write(made)
    found = {}
    for path in (made / "report" / "tables").glob("*.csv"):
        with path.open(newline="") as file:
            head, *rows = list(csv.reader(file))
        assert {len(row) for row in rows} <= {len(head)}, path
        texts = [text for row in (head, *rows) for text in row]
        found[path.stem] = [dict(zip(head, row, strict=True)) for row in rows]
        numbers = [text for text in texts if re.fullmatch(r"-[0-9.]+(e-?[0-9]+)?", text)]
        named = {"-cell"} if path.stem == "runs" else set()
        wrong = [text for text in texts if re.match(r"\s*[=+@-]", text)]
        assert set(wrong) - set(numbers) == named, path
    assert found["runs"][0]["folder"] == "-cell"
    assert found["runs"][0]["method"] == "'=HYPERLINK('http://a')"
    assert {row["setting"] for row in found["runs"]} == {"alpha = -0.5", "alpha = -7"}
    assert float(found["scores"][0]["mean"]) < 0
    assert found["missing"][0]["partition.alpha"] == "-0.5"
    assert {"name": "n", "value": "-3", "runs": "1"} in found["environment"]
    assert {"name": "'=name", "value": "'@value", "runs": "1"} in found["environment"]
