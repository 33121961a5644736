"""The report of a folder: what is in it, and its files."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from fedhet.core.errors import clean
from fedhet.record.files import unwritable, write_text
from fedhet.report import curves, figures, making
from fedhet.report.comparisons import statistics_section
from fedhet.report.costs import cost_tables
from fedhet.report.document import Document, Section
from fedhet.report.exports import as_html, as_latex, as_markdown
from fedhet.report.findings import RULE, sentences
from fedhet.report.found import Written
from fedhet.report.results import Results, results
from fedhet.report.scores import DIVERGENCE, score_tables
from fedhet.report.study import Study

PAGE = "index.html"
OWN = "report"
# The names, without their ends, of all tables and figures that a report may have.
TABLES = (
    "scores|all_scores|pairs|ranks|thresholds|targets|seconds|bytes|memory|methods|tuned|missing|runs"
    "|environment"
)
FIGURES = (
    "wins|critical-distance|(curves-by-(round|megabytes|seconds)|clients|labels)(-[0-9]+)?"
    r"|tuning-[\w-]+"
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
    own = out is None
    tables = {table.name for table in document.tables}
    pictures = {figure.name for section in document.sections for figure in section.figures}
    _remove_others(home / "tables", ("csv", "tex"), tables, ".*" if own else TABLES)
    _remove_others(home / "figures", ("png", "svg", "pdf"), pictures, ".*" if own else FIGURES)
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
    tests, ranking = statistics_section(study)
    tests.figures += figures.critical_difference(study, ranking, pictures)
    tests.figures += figures.win_matrix(study, pictures)
    scores = Section("Scores", [DIVERGENCE], score_tables(study), curves.curves(study, pictures))
    clients = Section("Clients", figures=figures.boxes(study, pictures))
    clients.figures += figures.label_distribution(study, pictures)
    costs = Section("Costs", tables=cost_tables(study))
    if not any(table.name == "thresholds" for table in costs.tables):
        costs.paragraphs.append(
            "No thresholds were set, so that what it costs to reach one is unknown;"
            " eval.thresholds=[.8,.9] records it."
        )
    tuning = Section("Tuning", figures=figures.tuning_response(study, pictures))
    tuned = making.tuning_table(study)
    tuning.tables += [table for table in (making.methods_table(study), tuned) if table]
    if not tuned:
        tuning.paragraphs.append(
            "These runs had no trials before them: their settings are those that the file or the"
            " command line of the experiment gives, and the defaults."
        )
    gaps = Section("What is missing")
    missing = making.missing_table(study)
    gaps.tables += [missing] if missing else []
    made = making.making_section(study)
    gaps.paragraphs += [f"Damaged: {problem}." for problem in found.problems]
    if not missing:
        gaps.paragraphs.append("Every run has a result.")
    if study.duplicates:
        gaps.paragraphs.append(
            f"{study.duplicates} runs have the same method, setting and seed as others, of which"
            " only the last by its folder's name is shown."
        )
    warnings = [*study.notes, *making.mixed_code(study)]
    return Document(
        title=str(
            experiment.get("title")
            or experiment.get("experiment")
            or f"Runs in {found.source.folders[0].resolve().name}"
        ),
        about=_about(study),
        sentences=sentences(study, ranking),
        rule=RULE,
        warnings=warnings,
        sections=[scores, tests, clients, costs, tuning, gaps, made],
    )


def _about(study: Study) -> str:
    cells = study.results.cells
    counted = len(study.cells)
    datasets = sorted(
        {str(c.summary.get("dataset") or "data given as a Task") for c in study.cells}
    )
    runs = f"{counted} run{'' if counted == 1 else 's'}"
    if counted < len(cells):
        runs = f"{counted} of {len(cells)} runs"
    notes = study.results.source.experiment.get("report", {}).get("notes") or []
    return " ".join([f"{runs} on {', '.join(datasets)}.", *(clean(str(note)) for note in notes)])
