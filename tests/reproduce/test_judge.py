"""Runs beside a paper: run folders whose scores are given, and verdicts that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report.made_runs import make_experiment

from fedhet.errors import ConfigError
from fedhet.report.results import results
from fedhet.reproduce import table
from fedhet.reproduce.judge import Comparison, Row, compare, judge
from fedhet.reproduce.measures import check
from fedhet.reproduce.paper import Claim, Figure, Paper
from fedhet.reproduce.verdict import (
    DIRECTION_ONLY,
    NOT_COMPARABLE,
    NOT_REPRODUCED,
    NOT_RUN,
    OPPOSITE,
    REPRODUCED,
    SAME,
)

AXES: dict[str, Any] = {
    "method": ["host", "better", "worse", "lost"],
    "alpha": [0.1, 1],
    "seed": [0, 1, 2],
}
# Means over the seeds: host .60, better .70, worse .50; the differences vary by .001.
SCORES = {"host": 0.60, "better": 0.70, "worse": 0.50}


def score(axes: dict[str, Any]) -> float | None:
    if axes["method"] not in SCORES:
        return None
    own = 0.001 * axes["seed"] if axes["method"] != "host" else 0.0
    return SCORES[axes["method"]] + 0.02 * (axes["seed"] - 1) + own


def figure(method: str, value: float, spread: float | None = None, **entries: Any) -> Figure:
    return Figure({"alpha": "1"}, method, entries.pop("measure", "last"), value, spread, **entries)


FIGURES = (
    figure("host", 0.61),  # within two standard errors, 2 (.02 / sqrt 3)
    figure("better", 0.80),  # the level is not, the order is
    figure("worse", 0.90, 0.05),  # neither
    figure("lost", 0.9),
)
CLAIMS = (
    Claim("better wins", "last", {"alpha": "1"}, {"method": "better"}, ({"method": "host"},)),
    Claim("worse wins", "last", {}, {"method": "worse"}, ({"method": "host"}, {"method": "lost"})),
    Claim("not here", "last", {}, {"method": "other"}, ({"method": "host"},)),
)
HOSTS = {"better": "host", "worse": "host", "lost": "host"}
PAPER = Paper(
    "own/table1",
    "A table",
    "A paper, table 1",
    hosts=HOSTS,
    figures=FIGURES,
    claims=CLAIMS,
    reasons={"worse": "The paper tuned it on test data."},
    choices=("Everything.",),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_experiment(tmp_path / "made", AXES, score)


def rows(comparison: Comparison) -> dict[str, Row]:
    return {row.method: row for row in comparison.figures}


def test_each_figure_has_the_verdict_of_the_rule(folder: Path) -> None:
    found = compare(PAPER, results(folder), "paper")
    verdicts = {name: (row.verdict, row.direction) for name, row in rows(found).items()}
    assert verdicts == {
        "host": (REPRODUCED, None),
        "better": (DIRECTION_ONLY, SAME),
        "worse": (NOT_REPRODUCED, OPPOSITE),
        "lost": (NOT_RUN, "not shown"),
    }
    better = rows(found)["better"].ours
    assert better.mean == pytest.approx(0.701)
    assert better.spread == pytest.approx(0.021)
    assert rows(found)["worse"].reason == "The paper tuned it on test data."
    assert rows(found)["better"].reason == ""
    assert found.missing == 6


def test_at_another_scale_only_the_direction_counts(folder: Path) -> None:
    found = rows(compare(PAPER, results(folder), "cpu"))
    assert found["host"].verdict == NOT_COMPARABLE
    assert found["better"].verdict == DIRECTION_ONLY
    assert found["worse"].verdict == NOT_REPRODUCED
    found = rows(compare(PAPER, results(folder), "smoke"))
    assert {row.verdict for row in found.values()} == {NOT_COMPARABLE, NOT_RUN}
    assert {row.direction for row in found.values()} == {None}


def test_a_figure_whose_level_means_nothing_is_compared_by_its_order(folder: Path) -> None:
    times = (figure("host", 0.6, levels=False), figure("better", 0.7, 0.1, levels=False))
    paper = Paper("own/t", "", "", hosts=HOSTS, figures=times)
    found = rows(compare(paper, results(folder), "paper"))
    assert [row.verdict for row in found.values()] == [NOT_COMPARABLE, DIRECTION_ONLY]


def test_claims_are_compared_pair_by_pair_and_those_of_no_run_are_left_out(folder: Path) -> None:
    found = compare(PAPER, results(folder), "paper").claims
    assert [(row.setting, row.method, row.verdict) for row in found] == [
        ("better wins", "better above host", DIRECTION_ONLY),
        ("worse wins", "worse above host", NOT_REPRODUCED),
        ("worse wins", "worse above lost", NOT_RUN),
    ]
    # One difference for each seed, the mean over both settings.
    assert found[1].ours.values == pytest.approx((-0.1, -0.099, -0.098))


def test_measures_are_read_from_the_run_folder(folder: Path) -> None:
    """The curve of `make_experiment` ends at s after s/2, 3s/4 and 7s/8."""
    measures = {
        "rounds@.44": 3.0,  # of .60: .30, .45, .525, .60; of seed 0: .58, hence .435 in round 2
        "rounds@.9": 5.0,  # never
        "score@2": 0.45,
        "rank": 2.0,
        "clients": 0.60,
        "loss": 0.5,
    }
    paper = Paper("", "", "", figures=tuple(figure("host", 1, measure=m) for m in measures))
    found = compare(paper, results(folder), "paper").figures
    ours = {row.measure: row.ours for row in found}
    assert ours.pop("rounds@.44").values == (3.0, 2.0, 2.0)
    expected = {name: value for name, value in measures.items() if name in ours}
    assert {name: sample.mean for name, sample in ours.items()} == pytest.approx(expected)
    with pytest.raises(ConfigError, match="measure 'lastt' is none of last"):
        check("lastt")


def test_the_comparison_is_written_and_read_back(folder: Path) -> None:
    comparison = compare(PAPER, results(folder), "paper", ["rounds=4"])
    page = table.write(comparison, folder / "report").read_text()
    assert "7 comparisons: 1 reproduced, 2 direction only, 2 not reproduced, 2 not run" in page
    assert "| alpha=1 | better | last | .701 ± .021 (3 seeds) | .800 |" in page
    assert "Changed for these runs: `rounds=4`." in page
    assert "6 runs of the experiment have no result." in page
    lines = table.read_csv(folder / "report" / "reproduction.csv")
    assert lines == table.records(comparison)
    assert table.as_markdown(lines) in page


def test_a_folder_of_no_reproduction_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no reproduction 'made'"):
        judge(folder)
