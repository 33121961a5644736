"""Composes the report of a folder, and writes its files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fedhet.core.check import counted
from fedhet.core.errors import WriteError, clean
from fedhet.data.forms import read_object
from fedhet.data.storage import as_csv, unwritable, write_json, write_text, written
from fedhet.study.report import overviews, plots
from fedhet.study.report.compared import Study
from fedhet.study.report.comparisons import (
    ASSUMPTIONS,
    against_reference,
    comparison_table,
    pairs_table,
    sentences,
)
from fedhet.study.report.document import Document, Section, as_html, as_latex, as_markdown, extent
from fedhet.study.report.places import Written, refuse_links
from fedhet.study.report.results import Results, results

PAGE = "index.html"
OWN = "report"
KINDS = {"tables": ("csv", "tex"), "figures": ("png", "svg", "pdf")}
FILES = "files.json"  # the files of a report; the next report may remove these only
NO_THRESHOLDS = (
    "No thresholds were set, so the cost of reaching one is unknown; use"
    " eval.thresholds=[.8,.9] to record it."
)
DUPLICATES = (
    "runs have the same method, setting and seed as another run; only the last one, by the name of"
    " its folder, is shown."
)


def write_report(folder: Path | str | Sequence[Path | str], out: Path | str | None) -> Written:
    """Write the report; see `fedhet.report.write`."""
    found = results(folder)
    home = Path(out) if out is not None else found.source.folders[0] / OWN
    refuse_links(home, *(home / name for name in (*KINDS, FILES)))
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        document = compose(found, made / "figures")
        for table in document.tables:
            write_text(made / "tables" / f"{table.name}.csv", as_csv(table.data, rows="folder"))
            write_text(made / "tables" / f"{table.name}.tex", as_latex(table))
        write_text(made / "report.md", as_markdown(document))
        write_text(made / PAGE, as_html(document))
        _replace(home, made)
    return Written(home / PAGE, document.sentences)


def _replace(home: Path, made: Path) -> None:
    """Replace an earlier report by a new one.

    Args:
        home: the folder of the report; it may be missing.
        made: the folder with the files of the new report.

    Raises:
        DataError: the files.json of the earlier report is damaged.
        WriteError: a file cannot be written or removed, is a link, or was written by somebody else.
    """
    names = {path.relative_to(made).as_posix() for path in made.rglob("*.*")}
    try:
        before = set(read_object(home / FILES, {"files": [str]}, ("files",))["files"])
    except (FileNotFoundError, NotADirectoryError):
        before = set()
    for path in sorted(home / name for name in names):
        refuse_links(path)
        if path.relative_to(home).as_posix() not in before and path.exists():
            raise WriteError(
                f"{path} was not written by an earlier report, and this report would replace it:"
                " remove it, or give another folder with --out"
            )
    # Files of the earlier report would contradict the new page. Its files.json may name any file,
    # so only tables and figures are removed.
    old = {
        path.relative_to(home).as_posix(): path
        for folder, ends in KINDS.items()
        for path in sorted((home / folder).glob("*.*"))
        if path.suffix[1:] in ends
        and not path.is_symlink()
        and path.relative_to(home).as_posix() in before - names
    }
    # files.json comes first: if the process is killed, it names every file that was left.
    write_json(home / FILES, {"files": sorted({*names, *old})})
    for name in sorted(names):
        with written(home / name) as part:
            shutil.copyfile(made / name, part)
    for path in old.values():
        try:
            path.unlink()
        except OSError as error:
            raise unwritable(path, error) from error
    write_json(home / FILES, {"files": sorted(names)})


def compose(found: Results, pictures: Path) -> Document:
    """Compute the content of the report, and save its figures.

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
    costs, tuned = overviews.cost_tables(study), overviews.tuning_table(study)
    missing, made = overviews.missing_table(study), overviews.making_section(study)
    duplicates = sum(cell.counts for cell in found.cells) - len(study.cells)
    sections = [
        Section(
            f"Compared with {study.reference}",
            [clean(str(note)) for note in notes],
            [comparison_table(study, tested)] if len(study.methods) > 1 else [],
            plots.differences(tested, own, study.title, study.reference, pictures),
            ASSUMPTIONS if len(study.methods) > 1 else [],
            folded=False,
        ),
        Section(
            "Scores by setting, and curves",
            [overviews.DIVERGENCE],
            [
                overviews.deciding(study),
                pairs_table(study),
                overviews.every_score(study),
                *overviews.detail_tables(study),
            ],
            plots.curves(study, pictures),
        ),
        Section(
            "Clients",
            figures=[
                *plots.boxes(study, pictures),
                *plots.label_distribution(study, pictures),
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
            [table for table in (overviews.methods_table(study), tuned) if table],
            plots.tuning_response(study, pictures),
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
        sentences=[*sentences(study, tested), *overviews.idle(study)],
        warnings=[*study.notes, *overviews.mixed_code(study)],
        sections=sections,
    )


def _about(study: Study) -> str:
    every, shown = len(study.results.cells), len(study.cells)
    datasets = sorted(
        {str(c.summary.get("dataset") or "data given as a Task") for c in study.cells}
    )
    runs = counted(shown, "run") if shown == every else f"{shown} of {every} runs"
    rounds = extent([cell.summary["rounds"] for cell in study.cells])
    clients = extent([cell.summary["partition"]["clients"] for cell in study.cells])
    return f"{runs} on {', '.join(datasets)}: {rounds} rounds, {clients} clients."
