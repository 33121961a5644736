"""docs/reproduction.md shows what docs/reproduction/*.csv hold, and nothing else."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from house_rules.source import ROOT

from fedhet.experiment import definition
from fedhet.report.folders import FoundRuns
from fedhet.report.results import Results
from fedhet.reproduce.judge import compare
from fedhet.reproduce.paper import LEVELS, Figure, Paper, every, find
from fedhet.reproduce.table import FIELDS, Record, as_csv, read_csv, records
from fedhet.reproduce.verdict import (
    DIRECTION_ONLY,
    NOT_REPRODUCED,
    NOT_RUN,
    Sample,
    direction,
    level,
    verdict,
)

Main = Callable[..., int]
PUBLISHED = sorted((ROOT / "docs" / "reproduction").glob("*-*.csv"))
LINE = dict.fromkeys(FIELDS, "") | {
    "reproduction": "own/table1",
    "source": "A paper, table 1",
    "scale": "cpu",
    "kind": "figure",
    "method": "FedAvg",
    "measure": "last",
    "seeds": "3",
    "mean": "0.8125",
    "spread": "0.01",
    "paper": "0.9",
    "verdict": "not reproduced",
    "code": "0.1.0",
}


def make_cells(folder: Path, **seconds: float) -> None:
    """An experiment of one finished cell of each kind, and one that is not there."""
    cells = [{"folder": f"cells/{kind}", "kind": kind} for kind in (*seconds, "missing")]
    (folder / "experiment.json").write_text(json.dumps({"cells": cells}))
    for kind, total in seconds.items():
        cell = folder / "cells" / kind
        cell.mkdir(parents=True)
        (cell / "cell.json").write_text('{"status": "finished"}')
        (cell / "summary.json").write_text(json.dumps({"seconds": {"total": total}}))


@pytest.fixture
def main() -> Main:
    """`main` of the script, which takes the arguments and the repository's root."""
    return runpy.run_path(str(ROOT / "scripts" / "reproduction_page.py"))["main"]  # type: ignore[no-any-return]


def test_the_page_is_up_to_date(main: Main) -> None:
    assert main(["--check"]) == 0


def test_a_published_result_stands_on_the_page(main: Main, tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "reproduction"
    folder.mkdir(parents=True)
    page = Path(shutil.copy(ROOT / "docs" / "reproduction.md", tmp_path / "docs"))
    (folder / "own-table1-cpu.csv").write_text(as_csv([LINE]))
    (folder / "times.csv").write_text(
        "reproduction,scale,runs,trials,seconds\nfedlex/table1,cpu,1,0,7200\n"
    )
    assert main(["--check"], tmp_path) == 1
    assert main([], tmp_path) == 0
    text = page.read_text()
    assert "| FedAvg | last | .812 ± .010 (3 seeds) | .900 | not reproduced |" in text
    assert "| 2.0 hours |" in text
    assert main(["--check"], tmp_path) == 0
    page.write_text(text.replace(".812", ".912"))
    assert main(["--check"], tmp_path) == 1


def test_a_folder_is_published_with_its_curves(main: Main, tmp_path: Path) -> None:
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    page = Path(shutil.copy(ROOT / "docs" / "reproduction.md", tmp_path / "docs"))
    figures = tmp_path / "runs" / "report" / "figures"
    figures.mkdir(parents=True)
    (figures / "curves-by-round.svg").write_text("curves-by-round")
    (figures.parent / "beside-the-paper.svg").write_text("beside-the-paper")
    (figures.parent / "reproduction.csv").write_text(as_csv([LINE]))
    make_cells(tmp_path / "runs", run=60.4, trial=30.4)
    times = tmp_path / "docs" / "reproduction" / "times.csv"
    kept = "reproduction,scale,runs,trials,seconds\nfedlex/table1,cpu,1,0,7200\n"
    times.write_text(f"{kept}own/table1,cpu,1,0,7\n")  # an estimate
    assert main([str(tmp_path / "runs")], tmp_path) == 0
    assert times.read_text() == f"{kept}own/table1,cpu,1,1,91\n"
    assert "(reproduction/own-table1-cpu.svg)" in page.read_text()
    assert main(["--check"], tmp_path) == 0
    published = tmp_path / "docs" / "reproduction"
    drawn = {path.name: path.read_text() for path in published.glob("*.svg")}
    levels = "own-table1-cpu-beside-the-paper"
    assert drawn == {f"{levels}.svg": "beside-the-paper", "own-table1-cpu.svg": "curves-by-round"}
    assert "![Our figures beside the paper's](reproduction/own-" in page.read_text()
    (figures / "curves-by-round.svg").unlink()
    for part in (1, 2, 10):
        (figures / f"curves-by-round-{part}.svg").write_text("<svg/>")
    assert main([str(tmp_path / "runs")], tmp_path) == 0
    shown = re.findall(r"\(reproduction/(.*?)\.svg\)", page.read_text())
    # The levels come first, and nothing is left of the first publication.
    assert shown == [levels, *(f"own-table1-cpu-{part}" for part in (1, 2, 10))]


def test_the_figure_is_that_of_what_is_measured(main: Main, tmp_path: Path) -> None:
    (tmp_path / "docs" / "reproduction").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "reproduction.md", tmp_path / "docs")
    times = tmp_path / "docs" / "reproduction" / "times.csv"
    times.write_text("reproduction,scale,runs,trials,seconds\n")
    figures = tmp_path / "runs" / "report" / "figures"
    figures.mkdir(parents=True)
    make_cells(tmp_path / "runs", run=1.0)
    for name in ("curves-by-round", "critical-distance"):
        (figures / f"{name}.svg").write_text(name)
    none: list[str] = []
    of_measures = {"rank": ["critical-distance"], "made_size": none, "similarity@2": none}
    for measure, shown in of_measures.items():
        (figures.parent / "reproduction.csv").write_text(as_csv([LINE | {"measure": measure}]))
        assert main([str(tmp_path / "runs")], tmp_path) == 0
        assert [path.read_text() for path in times.parent.glob("*.svg")] == shown


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem == "fedlex-figure4-cpu" else pytest.mark.slow)
        for path in PUBLISHED
    ],
    ids=lambda path: path.stem,
)
def test_a_published_table_is_that_of_its_file(path: Path) -> None:
    lines = read_csv(path)
    name, scale = lines[0]["reproduction"], lines[0]["scale"]
    experiment = definition.read([f"experiment={name}", f"scale={scale}"])
    assert experiment is not None
    record = {"axes": experiment.labels, "report": experiment.report}
    paper = find(name)
    nothing_run = Results(FoundRuns([], record, []))
    expected = records(compare(paper, nothing_run, scale))
    keys = ("source", "kind", "setting", "method", "measure", "paper", "paper_spread")
    assert [[line[k] for k in keys] for line in lines] == [[e[k] for k in keys] for e in expected]


def published() -> Iterator[tuple[Paper, Record]]:
    """Each line of the published tables, with its paper."""
    known = {paper.name: paper for paper in every()}
    for path in PUBLISHED:
        for line in read_csv(path):
            yield known[line["reproduction"]], line


def test_what_is_not_reproduced_has_the_reason_of_its_file() -> None:
    wrong = [
        line
        for paper, line in published()
        if line["reason"] not in reasons(paper, line)
        or (line["verdict"] == NOT_REPRODUCED and not line["reason"])
    ]
    assert not wrong


def reasons(paper: Paper, line: Record) -> set[str]:
    """Those that the file has for the line; several claims may say the same."""
    if line["kind"] == "figure":
        levels = paper.compared[line["scale"]] == LEVELS and paper.has_levels(line["measure"])
        missed = [NOT_REPRODUCED, DIRECTION_ONLY] if levels else [NOT_REPRODUCED]
        return {paper.reasons.get(line["method"], "") if line["verdict"] in missed else ""}
    if line["verdict"] != NOT_REPRODUCED:
        return {""}
    same = (c for c in paper.claims if (c.says, c.measure) == (line["setting"], line["measure"]))
    return {claim.reason for claim in same}


def test_the_rule_gives_the_published_verdicts() -> None:
    """Made again from the published means and spreads."""
    wrong = [line for paper, line in published() if not follows_the_rule(paper, line)]
    assert PUBLISHED and not wrong


def follows_the_rule(paper: Paper, line: Record) -> bool:
    levels = paper.compared[line["scale"]] == LEVELS
    count = int(line["seeds"])
    if not count:
        return line["verdict"] == NOT_RUN and not line["mean"] + line["spread"]
    ours = with_moments(float(line["mean"]), float(line["spread"]), count)
    shown, agrees = line["direction"] or None, None
    if line["kind"] == "claim":
        if shown != direction(ours.values, 1.0):
            return False
        own_levels = levels and paper.has_levels(line["measure"])
    else:
        figure = next(f for f in paper.figures if is_shown_in(f, line))
        agrees = level(ours, figure.value, figure.spread)
        own_levels = levels and figure.levels
    return line["verdict"] == verdict(ours, agrees, shown, levels=own_levels, directions=True)


def is_shown_in(figure: Figure, line: Record) -> bool:
    setting = ", ".join(f"{axis}={label}" for axis, label in figure.axes.items())
    place = (setting, figure.method, figure.measure)
    return place == (line["setting"], line["method"], line["measure"])


def with_moments(mean: float, spread: float, count: int) -> Sample:
    """Values of this mean and standard deviation."""
    assert count > 1
    far = spread * math.sqrt((count - 1) / 2)
    return Sample((mean - far, mean + far, *[mean] * (count - 2)))
