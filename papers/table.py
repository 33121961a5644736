"""The comparison with a paper as Markdown and as CSV."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedhet.core.check import counted
from fedhet.data.storage import as_csv, write_text
from fedhet.study.report.document import escaped
from fedhet.study.report.places import refuse_links
from papers.judge import Comparison, Row, decided
from papers.measures import in_words, is_share
from papers.paper import Paper
from papers.tables import markdown
from papers.verdict import NOT_RUN, VERDICTS, Sample

NAME = "reproduction"
FIELDS = (
    "reproduction",
    "source",
    "scale",
    "changed",
    "kind",
    "setting",
    "method",
    "measure",
    "seeds",
    "mean",
    "spread",
    "paper",
    "paper_spread",
    "differences",
    "direction",
    "verdict",
    "reason",
    "code",
    "tuned",
)
Record = Mapping[str, str]  # a line of the CSV file


def records(comparison: Comparison) -> list[dict[str, str]]:
    """Return the comparison as lines of its CSV file."""
    common = {
        "reproduction": comparison.paper.name,
        "source": comparison.paper.source,
        "scale": comparison.scale or "",
        "changed": json.dumps(list(comparison.changed)) if comparison.changed else "",
        "code": "; ".join(comparison.code),
    }
    return [{**common, **_record(row)} for row in comparison.rows]


def _record(row: Row) -> dict[str, str]:
    return {
        "kind": row.kind,
        "setting": row.setting,
        "method": row.method,
        "measure": row.measure,
        "seeds": str(row.ours.count),
        "mean": _exact(row.ours.mean),
        "spread": _exact(row.ours.spread),
        "paper": _exact(row.value),
        "paper_spread": _exact(row.spread),
        "differences": json.dumps(row.differences) if row.differences else "",
        "direction": row.direction or "",
        "verdict": row.verdict,
        "reason": row.reason,
        "tuned": row.tuned,
    }


def read_csv(path: Path, paper: Paper) -> list[dict[str, str]]:
    """Read a csv file of comparisons with a paper, and apply today's rule for the verdicts."""
    lines = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
    found = []
    for scale in dict.fromkeys(line["scale"] for line in lines):
        own = [line for line in lines if line["scale"] == scale]
        changed = json.loads(own[0]["changed"] or "[]")
        rows = decided([_row(line) for line in own], paper, scale or None, changed)
        found += [{**line, **_record(row)} for line, row in zip(own, rows, strict=True)]
    return found


def _row(line: Record) -> Row:
    """Make a row from a line of a csv file; of its verdict, only NOT_RUN is used."""

    def number(name: str) -> float | None:
        return float(line[name]) if line[name] else None

    return Row(
        line["kind"],
        line["setting"],
        line["method"],
        line["measure"],
        Sample(int(line["seeds"]), float(line["mean"] or math.nan), number("spread")),
        number("paper"),
        number("paper_spread"),
        tuple(json.loads(line["differences"] or "[]")),
        tuned=line["tuned"],
        run=line["verdict"] != NOT_RUN,
    )


def tally(lines: Sequence[Record]) -> str:
    """Return a text with the number of comparisons for each verdict."""
    found = Counter(line["verdict"] for line in lines)
    counts = ", ".join(f"{found[name]} {name}" for name in VERDICTS if found[name])
    return f"{counted(len(lines), 'comparison')}: {counts}" if lines else "no figures"


def as_markdown(lines: Sequence[Record]) -> str:
    """Return the tables of one reproduction: figures, then claims, then the reasons."""
    reasons = list(dict.fromkeys(line["reason"] for line in lines if line["reason"]))
    numbers = {reason: str(number) for number, reason in enumerate(reasons, 1)}
    numbered = [{**line, "reason": numbers.get(line["reason"], "")} for line in lines]
    parts = [
        markdown([_cells(line) for line in numbered if line["kind"] == kind])
        for kind in dict.fromkeys(line["kind"] for line in lines)
    ]
    parts += [f"Reason {number}: {escaped(reason)}" for reason, number in numbers.items()]
    return "\n\n".join(parts) + "\n"


def _cells(line: Record) -> dict[str, str]:
    ours = f"{_shown(line, 'mean', 'spread')} ({counted(int(line['seeds']), 'seed')})"
    measure, direction = in_words(line["measure"]), line["direction"]
    if line["kind"] == "figure":
        cells = {
            "setting": line["setting"],
            "method": line["method"],
            "measure": measure,
            "ours": ours,
            "paper": _shown(line, "paper", "paper_spread"),
            "direction": direction,
            "verdict": line["verdict"],
        }
    else:
        verdict = line["verdict"] + (f" ({direction})" if direction else "")
        cells = {
            "what the paper says": line["setting"],
            "compared": line["method"],
            "measure": measure,
            "difference": ours,
            "verdict": verdict,
        }
    cells |= {"reason": line["reason"], "tuned": line["tuned"]}
    return {head: escaped(text) for head, text in cells.items()}


def _shown(line: Record, name: str, spread: str) -> str:
    if not line[name]:
        return "–"
    return " ± ".join([_rounded(line[key], line["measure"]) for key in (name, spread) if line[key]])


def _rounded(text: str, measure: str) -> str:
    number = float(text)
    if is_share(measure):
        return f"{number:.3f}".replace("0.", ".", 1)
    if float(number).is_integer() and abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def _exact(number: float | None) -> str:
    return "" if number is None or not math.isfinite(number) else f"{number:.6g}"


def text(comparison: Comparison) -> str:
    """Return the page of one reproduction, which `write` puts next to the report."""
    paper = comparison.paper
    lines = records(comparison)
    parts = [f"# {paper.source}: {paper.title}", ""]
    at = f"Scale `{comparison.scale}`. " if comparison.scale else ""
    parts += [f"{at}{tally(lines).capitalize()}. The rule is in docs/reproduction.md.", ""]
    if comparison.changed:
        parts += [f"Changed for these runs: `{' '.join(comparison.changed)}`.", ""]
    if comparison.missing:
        parts += [f"{counted(comparison.missing, 'run')} of the experiment have no result.", ""]
    parts += [as_markdown(lines)]
    if paper.choices:
        parts += ["What the paper leaves open, and what was chosen:", ""]
        parts += [f"- {choice}" for choice in paper.choices]
    return "\n".join(parts).rstrip() + "\n"


def write(comparison: Comparison, folder: Path) -> Path:
    """Write reproduction.md and reproduction.csv into the folder; return the path of the page.

    Raises:
        WriteError: a file cannot be written, or the folder or a file is a link.
    """
    page = folder / f"{NAME}.md"
    refuse_links(folder, page, page.with_suffix(".csv"))
    write_text(page, text(comparison))
    lines = pd.DataFrame(records(comparison), columns=FIELDS)
    write_text(page.with_suffix(".csv"), as_csv(lines, rows="reproduction"))
    return page
