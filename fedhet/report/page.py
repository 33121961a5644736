"""The report of a folder: what is in it, and its files."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from fedhet.core.check import counted
from fedhet.core.errors import clean
from fedhet.record.files import unwritable, write_text
from fedhet.report import figures, tables
from fedhet.report.comparisons import (
    ASSUMPTIONS,
    against_reference,
    comparison_table,
    pairs_table,
    sentences,
)
from fedhet.report.document import Document, Section, as_html, as_latex, as_markdown
from fedhet.report.folders import Written
from fedhet.report.results import Results, results
from fedhet.report.study import Study

PAGE = "index.html"
OWN = "report"
# The names, without their ends, of all tables and figures that a report may have.
TABLES = (
    "comparison|scores|all_scores|details|sites|pairs|ranks|thresholds|targets|costs|seconds|bytes"
    "|memory|methods|tuned|missing|runs|environment"
)
FIGURES = (
    "differences|wins|critical-distance|(curves-by-(round|megabytes|seconds)|clients|labels)(-[0-9]+)?"
    r"|tuning-[\w-]+"
)
NO_THRESHOLDS = (
    "No thresholds were set, so that what it costs to reach one is unknown;"
    " eval.thresholds=[.8,.9] records it."
)
DUPLICATES = (
    "runs have the same method, setting and seed as others, of which only the last by its folder's"
    " name is shown."
)


def write_report(folder: Path | str | Sequence[Path | str], out: Path | str | None) -> Written:
    """Write the report, as `fedhet.report.write` describes."""
    found = results(folder)
    home = Path(out) if out is not None else found.source.folders[0] / OWN
    document = compose(found, home / "figures")
    for table in document.tables:
        write_text(home / "tables" / f"{table.name}.csv", table.data.to_csv(index=False))
        write_text(home / "tables" / f"{table.name}.tex", as_latex(table))
    write_text(home / "report.md", as_markdown(document))
    write_text(home / PAGE, as_html(document))
    names = {table.name for table in document.tables}
    pictures = {figure.name for section in document.sections for figure in section.figures}
    _remove_others(home / "tables", ("csv", "tex"), names, TABLES if out else ".*")
    _remove_others(home / "figures", ("png", "svg", "pdf"), pictures, FIGURES if out else ".*")
    return Written(home / PAGE, document.sentences)


def _remove_others(folder: Path, kinds: Collection[str], kept: Collection[str], names: str) -> None:
    """Remove what an earlier report has left, so that nothing in the folder contradicts the page.

    Args:
        folder: the folder, which may be missing.
        kinds: the ends of the files.
        kept: the names, without their ends, of the files that stay.
        names: a pattern for the names of the files that may be removed.

    Raises:
        WriteError: a file cannot be removed.
    """
    for path in sorted(folder.glob("*.*")):
        of_a_report = path.suffix[1:] in kinds and re.fullmatch(names, path.stem, re.DOTALL)
        if of_a_report and path.stem not in kept and path.is_file():
            try:
                path.unlink()
            except OSError as error:
                raise unwritable(path, error) from error


def compose(found: Results, pictures: Path) -> Document:
    """Compute what the report says, and save its figures.

    Args:
        found: the runs.
        pictures: the folder for the figures.

    Raises:
        ConfigError: no run has a result.
        WriteError: a figure cannot be written.
    """
    study, experiment = Study(found), found.source.experiment
    tested = against_reference(study)
    notes = experiment.get("report", {}).get("notes") or []
    own = {name: each.set_index("a")["difference"] for name, each in study.differences.items()}
    costs, tuned = tables.cost_tables(study), tables.tuning_table(study)
    missing, made = tables.missing_table(study), tables.making_section(study)
    duplicates = sum(cell.counts for cell in found.cells) - len(study.cells)
    sections = [
        Section(
            f"Compared with {study.reference}",
            [clean(str(note)) for note in notes],
            [comparison_table(study, tested)] if len(study.methods) > 1 else [],
            figures.differences(tested, own, study.title, study.reference, pictures),
            ASSUMPTIONS if len(study.methods) > 1 else [],
            folded=False,
        ),
        Section(
            "Scores by setting, and curves",
            [tables.DIVERGENCE],
            [
                tables.deciding(study),
                pairs_table(study),
                tables.every_score(study),
                *tables.detail_tables(study),
            ],
            [*figures.curves(study, pictures), *figures.win_matrix(study, pictures)],
        ),
        Section(
            "Clients",
            figures=[
                *figures.boxes(study, pictures),
                *figures.label_distribution(study, pictures),
            ],
        ),
        Section(
            "Costs",
            [] if any(table.name == "thresholds" for table in costs) else [NO_THRESHOLDS],
            costs,
        ),
        Section(
            "Settings of the methods",
            [],
            [table for table in (tables.methods_table(study), tuned) if table],
            figures.tuning_response(study, pictures),
        ),
        Section(
            "What is missing",
            [
                *(f"Damaged: {problem}." for problem in found.problems),
                *([] if missing else ["Every run has a result."]),
                *([f"{duplicates} {DUPLICATES}"] if duplicates else []),
            ],
            [missing] if missing else [],
            folded=not any((missing, found.problems, duplicates)),
        ),
        made,
    ]
    return Document(
        title=str(
            experiment.get("title")
            or experiment.get("experiment")
            or f"Runs in {found.source.folders[0].resolve().name}"
        ),
        about=_about(study),
        sentences=sentences(study, tested),
        warnings=[*study.notes, *tables.mixed_code(study)],
        sections=sections,
    )


def _about(study: Study) -> str:
    every, shown = len(study.results.cells), len(study.cells)
    datasets = sorted(
        {str(c.summary.get("dataset") or "data given as a Task") for c in study.cells}
    )
    runs = counted(shown, "run") if shown == every else f"{shown} of {every} runs"
    return f"{runs} on {', '.join(datasets)}."
