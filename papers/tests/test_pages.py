"""The pages are made of papers/results, which hold what the rule says of what was measured."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from report.made_runs import make_experiment

from fedhet.core.errors import ConfigError
from fedhet.experiment import definition
from fedhet.report.results import FoundRuns, Results
from papers import __main__ as pages
from papers.command import main
from papers.estimate import TIMES, note_time
from papers.judge import compare
from papers.paper import LEVELS, Figure, Paper, every, find
from papers.table import Record, read_csv, records
from papers.tables import RESULTS, kept
from papers.verdict import (
    DIRECTION_ONLY,
    NOT_REPRODUCED,
    NOT_RUN,
    Sample,
    direction,
    level,
    verdict,
)

PUBLISHED = [path for path in sorted(RESULTS.glob("*-*.csv")) if "helps" not in path.stem]


@pytest.mark.slow
def test_the_summary_has_the_tables_of_the_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pages.main(["--check"]) == 0
    changed = tmp_path / "reproduction.md"
    changed.write_text(pages.DOCS[0].read_text().replace("| FedGMM | 2.3 |", "| FedGMM | 1.3 |"))
    monkeypatch.setattr(pages, "DOCS", [changed])
    assert pages.main(["--check"]) == 1
    assert "has other tables" in capsys.readouterr().out


@pytest.mark.slow
def test_the_pages_show_all_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "PAGES", tmp_path)
    summary = tmp_path / "summary.md"
    monkeypatch.setattr(pages, "DOCS", [summary])
    summary.write_text("<!-- table: confirmed -->\n<!-- end table -->\n")
    assert pages.main([]) == 0
    assert "| FedGMM | Dirichlet 0.1, 5 rounds |" in summary.read_text()
    page = (tmp_path / "reproduction.md").read_text()
    every = [(line["reproduction"], line["scale"]) for p in PUBLISHED for line in read_csv(p)]
    assert page.count("\n## ") == len({*every})
    for path in re.findall(r"\]\((reproduction/.*?\.svg)\)", page):
        assert (tmp_path / path).exists()
    assert "![Our figures and the paper's for FedAvgM" in page
    assert "(reproduction/peers-flower-cpu-2.svg)" in page


def test_a_reproduction_is_taken_over(tmp_path: Path) -> None:
    """Made-up runs take the place of earlier ones of the same scale, with times and curves."""
    experiment = definition.read(["experiment=fedgmm/figure6", "scale=cpu"])
    assert experiment is not None
    made = make_experiment(
        tmp_path / "made",
        {axis: list(labels) for axis, labels in experiment.labels.items()},
        lambda axes: 0.5 if axes["method"] == "FedAvg" else 0.6,
        name=experiment.name,
        command=list(experiment.command),
        report={"compare": "method", "metric": "last", "reference": None},
    )
    path = tmp_path / "fedgmm-figure6.csv"
    earlier = [{**line, "scale": scale} for scale in ("cpu", "paper") for line in LINES]
    pd.DataFrame(earlier).to_csv(path, index=False)
    for _ in range(2):
        pages.take_over(made, tmp_path)
        lines = read_csv(path)
        means = [line["mean"] for line in lines if line["scale"] == "paper"]
        assert means == [line["mean"] for line in LINES]
        assert [line["mean"] for line in lines if line["measure"] == "rounds@.75"] == ["5"] * 3 + [
            line["mean"] for line in LINES if line["measure"] == "rounds@.75"
        ]
        runs = len(experiment.labels["method"]) * len(experiment.labels["seed"])
        assert kept(tmp_path / "times.csv", TIMES).to_numpy().tolist() == [
            ["fedgmm/figure6", "cpu", runs, 0, runs]
        ]
        curves = pd.read_csv(tmp_path / "curves.csv")
        assert curves[curves["method"] == "FedAvg"]["mean"].to_list() == [0.25, 0.375, 0.438, 0.5]


LINES = [line for line in read_csv(RESULTS / "fedgmm-figure6.csv") if line["scale"] == "cpu"]


def test_a_later_time_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    first, second = ("own/table2", "cpu", 6, 18, 90), ("own/table1", "cpu", 1, 0, 7)
    for time in (first, second, (*first[:-1], 80)):
        note_time(path, *time)
    assert kept(path, TIMES).to_numpy().tolist() == [[*second], [*first[:-1], 80]]
    assert path.read_text().startswith("reproduction,scale,runs,trials,seconds\nown/table1,cpu,1,0")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name,seconds\nown/table1,7\n", "its columns are name,seconds"),
        (f"{','.join(TIMES)}\nown/table1,cpu,1,0,soon\n", "soon"),
        (f"{','.join(TIMES)}\nown/table1,cpu\n", "invalid literal for int"),
    ],
)
def test_a_file_of_something_else_is_kept(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(text)
    for attempt in (
        lambda: note_time(path, "own/table1", "cpu", 1, 0, 7),
        lambda: main(["fedgmm/figure6", "scale=smoke", "--estimate", "--times", str(path)]),
    ):
        with pytest.raises(
            ConfigError, match=rf"times\.csv: .*{says}.*; expected is reproduction,"
        ):
            attempt()
    assert path.read_text() == text


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem == "fedlex-figure4" else pytest.mark.slow)
        for path in PUBLISHED
    ],
    ids=lambda path: path.stem,
)
def test_a_published_table_is_that_of_its_file(path: Path) -> None:
    every = read_csv(path)
    paper = find(every[0]["reproduction"])
    for scale in dict.fromkeys(line["scale"] for line in every):
        lines = [line for line in every if line["scale"] == scale]
        experiment = definition.read([f"experiment={paper.name}", f"scale={scale}"])
        assert experiment is not None
        record = {"axes": experiment.labels, "report": experiment.report}
        expected = records(compare(paper, Results(FoundRuns([], record, [])), scale))
        keys = ("source", "kind", "setting", "method", "measure", "paper", "paper_spread")
        assert [[line[k] for k in keys] for line in lines] == [
            [e[k] for k in keys] for e in expected
        ]


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
