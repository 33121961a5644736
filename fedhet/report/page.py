"""The report of a folder: what is in it, and its files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import jinja2

from fedhet.errors import clean
from fedhet.record.files import write_text
from fedhet.report import Written, curves, figures, making
from fedhet.report.comparisons import statistics_section
from fedhet.report.costs import cost_tables
from fedhet.report.document import Document, Section
from fedhet.report.findings import RULE, sentences
from fedhet.report.latex import as_latex
from fedhet.report.markdown import as_markdown
from fedhet.report.results import Results, results
from fedhet.report.scores import DIVERGENCE, score_tables
from fedhet.report.study import Study

TEMPLATES = Path(__file__).parent / "templates"
PAGE = "index.html"


def write_report(folder: Path | str | Sequence[Path | str], out: Path | str | None) -> Written:
    """Write the report, as `fedhet.report.write` describes."""
    found = results(folder)
    home = Path(out) if out is not None else found.source.folders[0] / "report"
    document = compose(found, home / "figures")
    for table in document.tables:
        write_text(home / "tables" / f"{table.name}.csv", table.data.to_csv(index=False))
        write_text(home / "tables" / f"{table.name}.tex", as_latex(table))
    write_text(home / "report.md", as_markdown(document))
    write_text(home / PAGE, as_html(document))
    return Written(home / PAGE, document.sentences)


def compose(found: Results, pictures: Path) -> Document:
    """Compute what the report says, and save its figures.

    Args:
        found: the runs.
        pictures: the folder for the figures.

    Raises:
        ConfigError: no run has a result.
        WriteError: a figure cannot be written.
    """
    study = Study(found)
    tests, ranking = statistics_section(study)
    tests.figures += figures.critical_difference(study, ranking, pictures)
    tests.figures += figures.win_matrix(study, pictures)
    scores = Section("Scores", [DIVERGENCE], score_tables(study), curves.curves(study, pictures))
    clients = Section("Clients", figures=figures.boxes(study, pictures))
    clients.figures += figures.label_distribution(study, pictures)
    costs = Section("Costs", tables=cost_tables(study))
    if not any(table.name == "targets" for table in costs.tables):
        costs.paragraphs.append(
            "No targets were set, so that no costs until a target are known; eval.targets=[.8,.9]"
            " records them."
        )
    tuning = Section("Tuning", figures=figures.tuning_response(study, pictures))
    tuned = making.tuning_table(study)
    tuning.tables += [tuned] if tuned else []
    if not tuned:
        tuning.paragraphs.append("Nothing was tuned: all settings are those given or the defaults.")
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
        title=str(found.source.experiment.get("title") or _title(found)),
        about=_about(study),
        sentences=sentences(study, ranking),
        rule=RULE,
        warnings=warnings,
        sections=[scores, tests, clients, costs, tuning, gaps, made],
    )


def _title(found: Results) -> str:
    name = found.source.experiment.get("experiment")
    return str(name or f"Runs in {found.source.folders[0].resolve().name}")


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


def as_html(document: Document) -> str:
    """The report as one page that needs nothing else."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment.get_template("report.html").render(document=document)
