"""Runs compared with a paper: run folders with given scores, and the verdicts that follow."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from report.made_runs import make_experiment

from fedhet.core.errors import ConfigError, WriteError
from fedhet.study.report.results import results
from fedhet.study.report.statistics import NOT_SHOWN, NOT_TESTED
from papers import table
from papers.judge import Comparison, Row, compare, judge
from papers.measures import check
from papers.paper import Claim, Figure, Paper
from papers.verdict import (
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
    "seed": [0, 1, 2, 3, 4, 5, 6, 7],  # what six comparisons need
}
# Means over the seeds: host .60, better .70, worse .50; the differences vary by .001.
SCORES = {"host": 0.60, "better": 0.70, "worse": 0.50}


def score(axes: dict[str, Any]) -> float | None:
    if axes["method"] not in SCORES:
        return None
    own = 0.001 * axes["seed"] if axes["method"] != "host" else 0.0
    return SCORES[axes["method"]] + 0.002 * (axes["seed"] - 3.5) + own


def figure(method: str, value: float, spread: float | None = None, **entries: Any) -> Figure:
    return Figure({"alpha": "1"}, method, entries.pop("measure", "last"), value, spread, **entries)


FIGURES = (
    figure("host", 0.61),  # within two points, and so is the whole interval
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
    reasons={"better": "Fewer rounds.", "worse": "The paper tuned it on test data."},
    explained=("paper", "cpu"),
    axes=tuple(AXES),
    choices=("Everything.",),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made_folder(tmp_path)


def claims_of(comparison: Comparison) -> list[Row]:
    return [row for row in comparison.rows if row.kind == "claim"]


def rows(comparison: Comparison) -> dict[str, Row]:
    return {row.method: row for row in comparison.rows if row.kind == "figure"}


def test_each_figure_has_the_verdict_of_the_rule(folder: Path) -> None:
    found = compare(PAPER, results(folder), "paper")
    verdicts = {name: (row.verdict, row.direction) for name, row in rows(found).items()}
    assert verdicts == {
        "host": (REPRODUCED, None),
        "better": (DIRECTION_ONLY, SAME),
        "worse": (NOT_REPRODUCED, OPPOSITE),
        "lost": (NOT_RUN, NOT_TESTED),
    }
    better = rows(found)["better"].ours
    # .003 times the standard deviation of 0 to 7.
    assert (better.mean, better.spread) == pytest.approx((0.7035, 0.003 * 6**0.5))
    assert rows(found)["worse"].reason == "The paper tuned it on test data."
    assert rows(found)["better"].reason == "Fewer rounds."
    assert found.missing == 16


def test_what_has_fewer_seeds_than_its_family_needs_is_not_tested(tmp_path: Path) -> None:
    made = make_experiment(tmp_path / "few", {**AXES, "seed": range(7)}, score)
    found = compare(PAPER, results(made), "cpu")
    assert {row.verdict for row in found.rows} == {NOT_COMPARABLE, NOT_TESTED, NOT_RUN}
    # A smaller family needs fewer seeds, and the level of a figure needs five.
    found = compare(dataclasses.replace(PAPER, claims=()), results(made), "paper")
    assert rows(found)["better"].verdict == DIRECTION_ONLY


def test_a_claim_that_is_tested_and_not_shown_is_not_reproduced(tmp_path: Path) -> None:
    same = dataclasses.replace(CLAIMS[0], greater={"method": "host"})
    paper = dataclasses.replace(PAPER, claims=(same,))
    for seeds, shown, expected in ((5, NOT_TESTED, NOT_TESTED), (8, NOT_SHOWN, NOT_REPRODUCED)):
        made = make_experiment(tmp_path / f"{seeds}", {**AXES, "seed": range(seeds)}, score)
        [row] = claims_of(compare(paper, results(made), "paper"))
        assert (row.direction, row.verdict) == (shown, expected)


def test_what_few_seeds_tuned_apart_is_not_tested(folder: Path) -> None:
    """`host` and `better` have different tuned values, which one seed or five seeds chose."""
    file = folder / "experiment.json"
    content = json.loads(file.read_text())
    for cell in content["cells"]:
        if cell["axes"]["method"] == "better":
            cell["tuned"] = {"client.lr": 0.3}
    for seeds, expected in ((1, NOT_TESTED), (5, SAME)):
        content["tune"] = {"seeds": [*range(1000, 1000 + seeds)]}
        file.write_text(json.dumps(content))
        found = compare(PAPER, results(folder), "paper")
        assert rows(found)["better"].direction == claims_of(found)[0].direction == expected
        assert rows(found)["worse"].direction == OPPOSITE


def made_folder(home: Path) -> Path:
    return make_experiment(home / "made", AXES, score)


def test_at_another_scale_only_the_direction_counts(folder: Path) -> None:
    found = rows(compare(PAPER, results(folder), "cpu"))
    assert found["host"].verdict == NOT_COMPARABLE
    assert found["better"].verdict == DIRECTION_ONLY
    assert found["worse"].verdict == NOT_REPRODUCED
    assert [found[name].reason for name in ("better", "worse")] == ["", PAPER.reasons["worse"]]
    found = rows(compare(PAPER, results(folder), "smoke"))
    assert {row.verdict for row in found.values()} == {NOT_COMPARABLE, NOT_RUN}
    assert {row.direction for row in found.values()} == {None}


@pytest.mark.parametrize(
    ("scale", "changed", "explained"),
    [
        ("paper", ["alpha=1", "method=host,worse"], True),
        ("paper", ["client.lr=1"], False),
        ("tuned", [], False),
        (None, [], False),
    ],
)
def test_a_reason_is_given_for_the_runs_of_which_it_is_known(
    folder: Path, scale: str | None, changed: list[str], explained: bool
) -> None:
    claim = dataclasses.replace(CLAIMS[1], reason="As in the table.")
    paper = dataclasses.replace(PAPER, claims=(claim,), compared={})
    found = compare(paper, results(folder), scale, changed)
    assert rows(found)["worse"].verdict == claims_of(found)[0].verdict == NOT_REPRODUCED
    reasons = [rows(found)["worse"].reason, claims_of(found)[0].reason]
    assert reasons == ([PAPER.reasons["worse"], claim.reason] if explained else ["", ""])


def test_runs_without_a_value_are_not_taken_for_missing_ones(folder: Path) -> None:
    paper = Paper("own/t", "", "", figures=(figure("host", 9, measure="made_rounds"),))
    paper = dataclasses.replace(paper, claims=(dataclasses.replace(CLAIMS[0], measure="rank"),))
    found = compare(paper, results(folder), "paper")  # no rank: one method has no result
    assert [row.verdict for row in found.rows] == [NOT_COMPARABLE] * 2


def test_a_figure_whose_level_means_nothing_is_compared_by_its_order(folder: Path) -> None:
    times = (figure("host", 0.6, levels=False), figure("better", 0.7, 0.1, levels=False))
    paper = Paper("own/t", "", "", hosts=HOSTS, figures=times)
    found = rows(compare(paper, results(folder), "paper"))
    assert [row.verdict for row in found.values()] == [NOT_COMPARABLE, DIRECTION_ONLY]


@pytest.mark.parametrize(("levels", "expected"), [(True, NOT_REPRODUCED), (False, NOT_SHOWN)])
def test_a_claim_about_what_has_no_levels_is_compared_by_its_order(
    folder: Path, levels: bool, expected: str
) -> None:
    """The host does not differ from itself at another setting."""
    other = {"method": "host", "alpha": "0.1"}
    claim = Claim("the larger", "last", {}, {"method": "host", "alpha": "1"}, (other,))
    paper = Paper("own/t", "", "", figures=(figure("host", 0.6, levels=levels),), claims=(claim,))
    [row] = claims_of(compare(paper, results(folder), "paper"))
    assert (row.direction, row.verdict) == ("not shown", expected)


def test_claims_are_compared_pair_by_pair_and_those_of_no_run_are_left_out(folder: Path) -> None:
    found = claims_of(compare(PAPER, results(folder), "paper"))
    assert [(row.setting, row.method, row.verdict) for row in found] == [
        ("better wins", "better above host", DIRECTION_ONLY),
        ("worse wins", "worse above host", NOT_REPRODUCED),
        ("worse wins", "worse above lost", NOT_RUN),
    ]
    # One difference for each seed, the mean over both settings.
    assert (found[1].ours.count, found[1].ours.mean) == (8, pytest.approx(-0.0965))


def test_seeds_are_compared_in_the_settings_that_all_of_them_have(folder: Path) -> None:
    """The gain is .1 at alpha=1, and .3 at alpha=.1; one seed has no run at alpha=.1."""

    def easier(axes: dict[str, Any]) -> float | None:
        found = score(axes)
        if axes["method"] != "better" or found is None or axes["alpha"] == 1:
            return found
        return None if axes["seed"] == 4 else found + 0.2

    made = make_experiment(folder.parent / "uneven", AXES, easier)
    claim = Claim("better wins", "last", {}, {"method": "better"}, ({"method": "host"},))
    [row] = claims_of(compare(Paper("own/t", "", "", claims=(claim,)), results(made), "paper"))
    assert (row.ours.count, row.ours.mean) == (8, pytest.approx(0.1035))


def test_a_figure_that_leaves_an_axis_open_is_refused(folder: Path) -> None:
    """Its settings would count as seeds."""
    paper = Paper("own/t", "", "", figures=(Figure({}, "host", "last", 0.6, None),))
    with pytest.raises(ConfigError, match=r"host .*not .*alpha.*\(0.1, 1\)"):
        compare(paper, results(folder), "paper")


def test_a_gain_is_that_over_the_host(folder: Path) -> None:
    def narrowing(axes: dict[str, Any]) -> float | None:
        found = score(axes)
        more = axes["method"] == "better" and axes["alpha"] == 0.1
        return None if found is None else found + 0.1 * more

    made = make_experiment(folder.parent / "narrowing", AXES, narrowing)
    claim = Claim("it narrows", "gain_last", {}, {"alpha": "0.1"}, ({"alpha": "1"},))
    paper = Paper("own/t", "", "", hosts=HOSTS, claims=(claim,))
    [row] = claims_of(compare(paper, results(made), "paper"))
    # One of the two methods with runs has .1 more; the base method has no gain.
    assert (row.ours.mean, row.ours.spread) == pytest.approx((0.05, 0.0))
    assert row.verdict == DIRECTION_ONLY


def test_what_the_trials_chose_is_shown(folder: Path) -> None:
    file = folder / "experiment.json"
    content = json.loads(file.read_text())
    chosen = {"host": 0.1, "better": 0.3}
    content["tuned"] = [
        {
            "axes": {"method": name},
            "chosen": {"client.lr": lr},
            "validation": 0.5,
            "trials": 3,
            "at_the_edge": ["client.lr"] if name == "better" else [],
        }
        for name, lr in chosen.items()
    ]
    for cell in content["cells"]:
        if cell["axes"]["method"] in chosen:
            cell["tuned"] = {"client.lr": chosen[cell["axes"]["method"]]}
    file.write_text(json.dumps(content))
    found = compare(PAPER, results(folder), "paper")
    assert rows(found)["host"].tuned == "client.lr=0.1"
    assert rows(found)["better"].tuned == "client.lr=0.3, at the edge"
    assert rows(found)["worse"].tuned == ""
    assert claims_of(found)[0].tuned == "client.lr=0.3, at the edge against client.lr=0.1"
    lines = table.records(found)
    page = table.as_markdown(lines)
    assert "| verdict | reason | tuned |" in page
    assert "| client.lr=0.3, at the edge |" in page
    assert page.endswith(
        "\nReason 1: Fewer rounds.\n\nReason 2: The paper tuned it on test data.\n"
    )


def test_measures_are_read_from_the_run_folder(tmp_path: Path) -> None:
    """The curve of `make_experiment` ends at s after s/2, 3s/4 and 7s/8."""
    measures = {
        "rounds@.9": 5.0,  # never
        "score@2": 0.45,
        "rank": 2.0,
        "clients": 0.60,
        "loss": 0.5,
    }
    targets = "rounds@.449"  # of .60: .30, .45, .525, .60; of seed 2: .597, hence .448 in round 2
    figures = [figure("host", 1, measure=measure) for measure in (targets, *measures)]
    paper = Paper("", "", "", figures=tuple(figures))
    made = make_experiment(tmp_path / "made", {**AXES, "method": list(SCORES)}, score)
    found = compare(paper, results(made), "paper").rows
    ours = {row.measure: row.ours for row in found}
    assert ours.pop(targets).mean == pytest.approx((3 * 3 + 5 * 2) / 8)
    assert {name: sample.mean for name, sample in ours.items()} == pytest.approx(measures)
    with pytest.raises(ConfigError, match=r"measure 'lastt' .*none .*last"):
        check("lastt")


def test_the_comparison_is_written_and_read_back(folder: Path) -> None:
    comparison = compare(PAPER, results(folder), "paper", ["rounds=4"])
    page = table.write(comparison, folder / "report").read_text()
    assert "7 comparisons: 1 reproduced, 2 direction only, 2 not reproduced, 2 not run" in page
    assert "| alpha=1 | better | last | .704 ± .007 (8 seeds) | .800 |" in page
    assert "Changed for these runs: `rounds=4`." in page
    assert "16 runs of the experiment have no result." in page
    lines = table.read_csv(folder / "report" / "reproduction.csv", PAPER)
    assert lines == table.records(comparison)
    assert lines[1]["differences"] == "[0.1, 0.101, 0.102, 0.103, 0.104, 0.105, 0.106, 0.107]"
    assert table.as_markdown(lines) in page


@pytest.mark.parametrize("name", ["", "reproduction.md", "reproduction.csv"])
def test_the_comparison_is_written_through_no_link(folder: Path, tmp_path: Path, name: str) -> None:
    theirs, home = tmp_path / "theirs", tmp_path / "report"
    theirs.mkdir()
    (theirs / "reproduction.md").write_text("theirs")
    if name:
        home.mkdir()
    (home / name).symlink_to(theirs / "reproduction.md" if name else theirs)
    with pytest.raises(WriteError, match=rf"^{home}.* link"):
        table.write(compare(PAPER, results(folder), "paper"), home)
    assert [path.read_text() for path in theirs.iterdir()] == ["theirs"]


def test_a_folder_of_no_reproduction_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="reproduction 'made'"):
        judge(folder)
