"""How the runs were made: configuration, versions, machines, seeds, and what is missing."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from contextlib import suppress
from typing import Any

import pandas as pd

from fedhet.core.errors import clean
from fedhet.experiment.code import short
from fedhet.experiment.tuning import FEWEST_OF_A_GRID
from fedhet.report.document import NOTHING, Columns, Section, Table, number, plain
from fedhet.report.folders import DIVERGED, FAILED, FINISHED, Values
from fedhet.report.study import Study

LONGEST_CONFIG = 40_000


def making_section(study: Study) -> Section:
    """The section about the making of the runs."""
    section = Section("How it was made")
    experiment = study.results.source.experiment
    if experiment.get("command"):
        section.listings.append(("The command that repeats it", command(experiment["command"])))
    else:
        section.paragraphs.append(
            "No experiment.json names a command. Each run's overrides.yaml has the overrides that"
            " repeat it."
        )
    seeds = sorted(set(study.scores["seed"]))
    section.paragraphs.append(f"Seeds: {', '.join(map(str, seeds))}.")
    section.tables += [runs_table(study), environment_table(study)]
    cell = study.cells[0]
    with suppress(OSError, ValueError):
        text = (cell.folder / "config.yaml").read_text(encoding="utf-8")
        # The others differ from it by the overrides in the table.
        section.listings.append((f"config.yaml of {cell.name}", text[:LONGEST_CONFIG]))
    return section


def command(overrides: Any) -> str:
    """The command line with its arguments quoted for a shell.

    Without `axes.*`, which only choose the part of the experiment that was run last.
    """
    lines = [str(line) for line in (overrides if isinstance(overrides, list) else [overrides])]
    kept = [shlex.quote(line) for line in lines if not line.startswith("axes.")]
    return " ".join(["python -m fedhet", *kept])


def runs_table(study: Study) -> Table:
    """Every run with its overrides and its status."""
    records = [
        {
            "folder": cell.name,
            study.compare: str(cell.axes.get(study.compare, NOTHING)),
            "setting": study.condition_of(cell.axes),
            "seed": str(cell.axes.get("seed", cell.summary.get("seed", NOTHING))),
            "status": cell.status,
            "overrides": " ".join(f"{key}={value}" for key, value in cell.overrides.items()),
        }
        for cell in study.results.cells
    ]
    columns = [(name, name) for name in records[0]]
    caption = "Every run, with the overrides that repeat it."
    return Table.of("runs", "Runs", caption, records, columns, folded=True)


def environment_table(study: Study) -> Table:
    """The versions and machines of all runs that count; what differs has several rows."""
    found: dict[str, Counter[str]] = {}
    for cell in study.cells:
        code = {f"code: {name}": value for name, value in cell.code.items()}
        for name, value in {**study.results.environment(cell), **code}.items():
            if name != "resumed":
                found.setdefault(name, Counter())[_text(value)] += 1
    records = [
        {"name": name, "value": value, "runs": count}
        for name, counts in found.items()
        for value, count in counts.most_common()
    ]
    caption = "What the runs record of versions and machines; the last column is the runs that do."
    columns = [("", "name"), ("value", "value"), ("runs", "runs")]
    data = pd.DataFrame(records, columns=["name", "value", "runs"])
    return Table.of("environment", "Versions and hardware", caption, records, columns, data)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def mixed_code(study: Study) -> list[str]:
    """A warning if the runs and trials were made by several versions of the code.

    Commits do not count: another one may have the same code.
    """
    trials = [cell for cell in study.results.source.cells if cell.trial and cell.counts]
    versions = Counter(
        " ".join(
            f"{name} {short(cell.code[name])}"
            for name in ("version", "digest")
            if cell.code.get(name)
        )
        for cell in [*study.cells, *trials]
        if cell.code
    )
    kinds: Counter[str] = Counter()
    for cell in study.cells:
        kinds[_text(study.results.environment(cell).get("fedhet"))] += 1
    for counts in (versions, kinds):
        if len(counts) > 1:
            told = "; ".join(f"{clean(name)} in {count}" for name, count in counts.items())
            what = "runs and trials" if trials else "runs"
            return [f"The {what} were made by different versions of the code: {told}."]
    return []


def missing_table(study: Study) -> Table | None:
    """The runs and trials without a result."""
    frame = study.results.missing
    if frame.empty:
        return None
    # As texts: what the axes of runs without a result are is no measurement.
    columns: Columns = [
        (name, lambda r, name=name: plain(None if pd.isna(r[name]) else str(r[name])))
        for name in map(str, frame.columns)
    ]
    caption = "Runs without a result count nowhere."
    return Table.of("missing", "What is missing", caption, frame, columns)


def methods_table(study: Study) -> Table | None:
    """What each method was run with, where the methods differ; None if they do not."""
    own: dict[str, dict[str, Any]] = {}
    for cell in study.cells:
        method = study.place(cell)[0]
        before = own.get(method, cell.overrides).items()
        own[method] = {k: v for k, v in before if cell.overrides.get(k) == v}
    shared = set.intersection(*(set(lines.items()) for lines in own.values()))
    records = [
        {
            study.compare: method,
            "settings": " ".join(f"{k}={v}" for k, v in lines.items() if (k, v) not in shared),
        }
        for method, lines in own.items()
    ]
    if not any(record["settings"] for record in records):
        return None
    columns = [(name, name) for name in (study.compare, "settings")]
    caption = "The settings of each method that it has in all of its runs, and others have not."
    return Table.of("methods", "What the methods were run with", caption, records, columns)


def tuning_table(study: Study) -> Table | None:
    """The tuned values by method and condition; None if nothing was tuned."""
    experiment = study.results.source.experiment
    tuned = experiment.get("tuned") or []
    if not tuned:
        return None
    trials = [cell for cell in study.results.source.cells if cell.trial]
    records = []
    for entry in tuned:
        axes = entry.get("axes", {})
        ends = [cell.status for cell in trials if axes.items() <= cell.axes.items()]
        lost = sum(status in (FAILED, DIVERGED) for status in ends)
        records += [
            {
                "method": str(axes.get(study.compare)),
                "setting": study.condition_of(axes),
                "parameter": name,
                "value": value,
                "at the edge": _edge(experiment, entry, name),
                "validation": entry.get("validation"),
                "trials": len(ends),
                "failed or diverged": lost,
                "not run": len(ends) - lost - ends.count(FINISHED),
            }
            for name, value in (
                entry.get("chosen") or {NOTHING: "none: no trial has a score"}
            ).items()
        ]
    columns: Columns = [
        (study.compare, "method"),
        ("setting", "setting"),
        ("parameter", "parameter"),
        ("chosen", "value"),
        ("at the edge of its grid", "at the edge"),
        ("validation score", lambda r: number(r["validation"])),
        *((name, name) for name in ("trials", "failed or diverged", "not run")),
    ]
    caption = (
        "The values that were tuned, chosen by the score on the clients' validation data, never by"
        " test data, with seeds that are not reported. A value at the edge of its grid may not be"
        " the best one. Of an interval, and of one or two values, it is not known whether a better"
        " one lies beyond; names have no edge. Trials that were interrupted, or whose records are"
        " damaged, count as not run."
    )
    return Table.of("tuned", "Tuned values", caption, records, columns)


def _edge(experiment: Values, entry: Values, name: str) -> str:
    """Whether the chosen value lies at the edge of its grid, as far as there is one."""
    if name in (entry.get("at_the_edge") or []):
        return "yes"
    tune = experiment.get("tune") or {}
    values = (tune.get("space") or {}).get(name)
    for label in (entry.get("axes") or {}).values():
        values = (tune.get("own") or {}).get(str(label), {}).get(name, values)
    if not isinstance(values, list) or len(values) < FEWEST_OF_A_GRID:
        return "not known"
    return "no" if all(type(value) in (int, float) for value in values) else NOTHING
