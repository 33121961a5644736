"""A report stays in its folder: it writes through no link, and takes away nothing of others."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from made_runs import make_experiment

from fedhet.core.errors import DataError, WriteError
from fedhet.study import report

pytestmark = pytest.mark.usefixtures("undrawn")
Content = dict[str, bytes]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    axes = {"method": ["A", "B"], "seed": list(range(6))}
    return make_experiment(tmp_path / "made", axes, lambda a: 0.5 + a["seed"] / 100)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Somebody's folder, with files that have the names and the ends of a report's."""
    for name in (
        "tables/scores.csv",
        "tables/mine.tex",
        "figures/labels.png",
        "index.html",
        "a.pdf",
    ):
        path = tmp_path / "theirs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"their {name}")
    return tmp_path / "theirs"


def content(folder: Path) -> Content:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "name, target, again",
    [
        ("report", "theirs", False),
        ("report/tables", "theirs/tables", False),
        ("report/tables", "theirs/tables", True),
        ("report/figures", "theirs/figures", False),
        ("report/figures", "nowhere", True),
        ("report/index.html", "theirs/index.html", False),
        ("report/tables/scores.csv", "theirs/tables/scores.csv", True),
        ("report/figures/curves-by-round.svg", "nowhere", False),
        ("report/files.json", "theirs/a.pdf", True),
    ],
)
def test_nothing_is_written_or_removed_through_a_link(
    made: Path, theirs: Path, name: str, target: str, again: bool
) -> None:
    """Not in the first report, and not where a report has been before."""
    if again:
        report.write(made)
    link = made / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(theirs.parent / target)
    before, around = content(made), content(theirs)
    with pytest.raises(WriteError, match=re.escape(f"{link} is a link")):
        report.write(made)
    assert content(theirs) == around and content(made) == before
    assert link.is_symlink() and not (theirs.parent / "nowhere").exists()


def test_a_link_that_is_named_is_none_to_write_through(made: Path, theirs: Path) -> None:
    (made.parent / "link").symlink_to(theirs)
    before = content(theirs)
    with pytest.raises(WriteError, match=r"link .*a link"):
        report.write(made, made.parent / "link")
    assert content(theirs) == before


def test_an_experiment_that_is_named_by_a_link_has_its_report(made: Path) -> None:
    (made.parent / "latest").symlink_to(made)
    assert report.write(made.parent / "latest").page.exists()
    assert (made / "report" / "index.html").is_file()


def test_a_link_in_place_of_a_half_written_file_is_not_followed(made: Path, theirs: Path) -> None:
    """Whoever knows the number of the process knows the name."""
    before = content(theirs)
    (made / "report").mkdir()
    for name in ("index.html", "report.md", "files.json"):
        (made / "report" / f".{name}.{os.getpid()}.part").symlink_to(theirs / "index.html")
    report.write(made)
    assert content(theirs) == before


def test_files_of_others_stay(made: Path) -> None:
    """Also in report/, and also with the name of a table or figure that this report has not."""
    names = ("tables/mine.csv", "tables/missing.csv", "figures/mine.png", "figures/labels-9.pdf")
    for name in names:
        (made / "report" / name).parent.mkdir(parents=True, exist_ok=True)
        (made / "report" / name).write_text("mine")
    for _ in range(2):
        report.write(made)
        assert [(made / "report" / name).read_text() for name in names] == ["mine"] * 4


@pytest.mark.parametrize("name", ["index.html", "report.md", "tables/scores.csv"])
def test_a_file_that_no_report_has_written_is_not_replaced(made: Path, name: str) -> None:
    out = made.parent / "site"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("<p>their page</p>")
    with pytest.raises(WriteError, match=rf"site/{name} .*report"):
        report.write(made, out)
    assert content(out) == {name: b"<p>their page</p>"}


def test_what_the_record_of_a_foreign_report_names_is_not_removed(made: Path, theirs: Path) -> None:
    """A record can name any file, of which only those in tables/ and figures/ are a report's."""
    home = made / "report"
    report.write(made)
    (home / "mine.csv").write_text("mine")
    (home / "tables" / "missing.csv").symlink_to(theirs / "a.pdf")
    names = ["../../theirs/a.pdf", str(theirs / "a.pdf"), "mine.csv", "tables/missing.csv"]
    record = json.loads((home / "files.json").read_text())["files"]
    (home / "files.json").write_text(json.dumps({"files": [*record, *names]}))
    before = content(theirs)
    report.write(made)
    assert content(theirs) == before and (home / "mine.csv").exists()
    assert (home / "tables" / "missing.csv").is_symlink()


def test_a_damaged_record_is_one_error(made: Path) -> None:
    report.write(made)
    (made / "report" / "files.json").write_text('{"files": [1]}')
    with pytest.raises(DataError, match=r"files\.json .*damaged: files .*\[1\]"):
        report.write(made)
