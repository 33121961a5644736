"""The pages are made from papers/results, which have the measured values and the verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from report.made_runs import make_experiment

from fedhet.core.errors import ConfigError
from fedhet.study import definition
from fedhet.study.report.results import FoundRuns, Results
from papers import __main__ as pages
from papers.judge import compare
from papers.paper import LEVELS, Paper, every
from papers.table import Record, read_csv, records
from papers.tables import RESULTS, TIMES, kept, note_time, replace
from papers.verdict import DIRECTION_ONLY, NOT_REPRODUCED, SAME

PAPERS = {paper.name: paper for paper in every()}
PUBLISHED = [path for path in sorted(RESULTS.glob("*-*.csv")) if "helps" not in path.stem]


@pytest.mark.slow
def test_the_summary_has_the_tables_of_the_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pages.main(["--check"]) == 0
    changed = tmp_path / "reproduction.md"
    text = pages.DOCS[0].read_text()
    changed.write_text(re.sub(r"\| FedGMM \| [\d.]+ \|", "| FedGMM | 99.9 |", text, count=1))
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
    every = [(line["reproduction"], line["scale"]) for p in PUBLISHED for line in lines_of(p)]
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
        lines = read_csv(path, PAPERS[experiment.name])
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


FIGURE6 = read_csv(RESULTS / "fedgmm-figure6.csv", PAPERS["fedgmm/figure6"])
LINES = [line for line in FIGURE6 if line["scale"] == "cpu"]


def test_a_run_without_a_score_stays_one(tmp_path: Path) -> None:
    """Otherwise a pool with such a run could not be run again in part."""
    path = tmp_path / "pool.csv"
    for name in ("a", "None", "a"):
        rows = {"setting": [name, name], "seed": [0, 1], "validation": [0.5, None]}
        replace(path, pd.DataFrame(rows), ["setting"])
    assert path.read_text() == "setting,seed,validation\nNone,0,0.5\nNone,1,\na,0,0.5\na,1,\n"


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
        ("name,seconds\nown/table1,7\n", "columns .*name,seconds"),
    ],
)
def test_a_file_of_something_else_is_kept(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"times\.csv: .*{says}.*; .*reproduction,"):
        note_time(path, "own/table1", "cpu", 1, 0, 7)
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
    every = lines_of(path)
    paper = PAPERS[every[0]["reproduction"]]
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
    for path in PUBLISHED:
        for line in lines_of(path):
            yield PAPERS[line["reproduction"]], line


def lines_of(path: Path) -> list[dict[str, str]]:
    """The lines of a published table, as pages show them."""
    name = pd.read_csv(path, nrows=1)["reproduction"][0]
    return read_csv(path, PAPERS[name])


def test_what_is_not_reproduced_has_the_reason_of_its_file() -> None:
    wrong = [
        line
        for paper, line in published()
        if line["reason"] not in reasons(paper, line)
        or (line["verdict"] == NOT_REPRODUCED and not line["reason"])
    ]
    assert not wrong


def reasons(paper: Paper, line: Record) -> set[str]:
    """The reasons that the file has for the line; several claims may have the same text."""
    if line["kind"] == "figure":
        levels = paper.compared[line["scale"]] == LEVELS and paper.has_levels(line["measure"])
        missed = [NOT_REPRODUCED, DIRECTION_ONLY] if levels else [NOT_REPRODUCED]
        return {paper.reasons.get(line["method"], "") if line["verdict"] in missed else ""}
    if line["verdict"] != NOT_REPRODUCED:
        return {""}
    same = (c for c in paper.claims if (c.says, c.measure) == (line["setting"], line["measure"]))
    return {claim.reason for claim in same}


def test_the_files_have_the_verdicts_of_the_rule() -> None:
    """Pages apply the rule to means and spreads; readers of the files get the same verdicts."""
    for path in PUBLISHED:
        kept = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
        assert read_csv(path, PAPERS[kept[0]["reproduction"]]) == kept


def test_a_file_has_what_recomputes_its_directions(tmp_path: Path) -> None:
    """The verdicts in the file are not used; the family has all comparisons, even without runs."""
    names = ["differences", "direction", "verdict"]
    path = tmp_path / "figure6.csv"
    shown, eight, nine = ["", "", ""], str([*range(1, 9)]), str([*range(1, 10)])
    for differences, expected in ((eight, "not tested"), (nine, SAME)):
        table = pd.DataFrame(LINES)
        table[names] = shown
        row = table.index[table["kind"] == "claim"][0]
        table.loc[row, names] = [differences, "opposite", NOT_REPRODUCED]
        table.to_csv(path, index=False)
        lines = read_csv(path, PAPERS["fedgmm/figure6"])
        assert sum(line["direction"] != "" for line in lines) == 8  # 8 * 2 / 2^9 = .031
        assert lines[row]["direction"] == expected
        assert lines[row]["verdict"] == (DIRECTION_ONLY if expected == SAME else expected)
