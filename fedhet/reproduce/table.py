"""The comparison with a paper as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fedhet.core.check import counted
from fedhet.report.exports import escaped
from fedhet.reproduce.judge import Comparison, Row
from fedhet.reproduce.measures import in_words, is_share
from fedhet.reproduce.verdict import VERDICTS

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
    "direction",
    "verdict",
    "reason",
    "code",
    "tuned",
)
Record = Mapping[str, str]  # a line of the CSV file


def records(comparison: Comparison) -> list[dict[str, str]]:
    """The comparison as lines of its CSV file."""
    common = {
        "reproduction": comparison.paper.name,
        "source": comparison.paper.source,
        "scale": comparison.scale or "",
        "changed": json.dumps(list(comparison.changed)) if comparison.changed else "",
        "code": "; ".join(comparison.code),
    }
    kinds = (("figure", comparison.figures), ("claim", comparison.claims))
    return [{**common, "kind": kind, **_record(row)} for kind, rows in kinds for row in rows]


def _record(row: Row) -> dict[str, str]:
    return {
        "setting": row.setting,
        "method": row.method,
        "measure": row.measure,
        "seeds": str(len(row.ours.values)),
        "mean": _exact(row.ours.mean),
        "spread": _exact(row.ours.spread),
        "paper": _exact(row.value),
        "paper_spread": _exact(row.spread),
        "direction": row.direction or "",
        "verdict": row.verdict,
        "reason": row.reason,
        "tuned": row.tuned,
    }


def as_csv(lines: Iterable[Record]) -> str:
    """The lines as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def read_csv(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file that `as_csv` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def tally(lines: Sequence[Record]) -> str:
    """How many figures have which verdict, in a sentence."""
    found = Counter(line["verdict"] for line in lines)
    parts = [f"{found[name]} {name}" for name in VERDICTS if found[name]]
    return f"{counted(len(lines), 'comparison')}: {', '.join(parts)}" if lines else "no figures"


def as_markdown(lines: Sequence[Record]) -> str:
    """The tables of one reproduction: its figures, then its claims; the reasons stand below."""
    reasons = list(dict.fromkeys(line["reason"] for line in lines if line["reason"]))
    numbers = {reason: str(number) for number, reason in enumerate(reasons, 1)}
    tables = _tables([{**line, "reason": numbers.get(line["reason"], "")} for line in lines])
    below = [f"\nReason {number}: {escaped(reason)}" for reason, number in numbers.items()]
    return "\n".join([*tables, *below]) + "\n"


def _tables(lines: Sequence[Record]) -> Iterator[str]:
    figures = [line for line in lines if line["kind"] == "figure"]
    claims = [line for line in lines if line["kind"] == "claim"]
    if figures:
        heads = ["setting", "method", "measure", "ours", "paper", "direction", "verdict"]
        heads += ["reason", "tuned"]
        cells = [
            [
                line["setting"],
                line["method"],
                in_words(line["measure"]),
                _shown(line, "mean", "spread") + f" ({counted(int(line['seeds']), 'seed')})",
                _shown(line, "paper", "paper_spread"),
                line["direction"],
                line["verdict"],
                line["reason"],
                line["tuned"],
            ]
            for line in figures
        ]
        yield from _table(heads, cells)
    if figures and claims:
        yield ""
    if claims:
        heads = ["what the paper says", "compared", "measure", "difference", "verdict"]
        heads += ["reason", "tuned"]
        cells = [
            [
                line["setting"],
                line["method"],
                in_words(line["measure"]),
                _shown(line, "mean", "spread") + f" ({counted(int(line['seeds']), 'seed')})",
                f"{line['verdict']} ({line['direction']})"
                if line["direction"]
                else line["verdict"],
                line["reason"],
                line["tuned"],
            ]
            for line in claims
        ]
        yield from _table(heads, cells)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    kept = [i for i, _ in enumerate(heads) if any(row[i] for row in rows)]
    yield f"| {' | '.join(heads[i] for i in kept)} |"
    yield "|" + "---|" * len(kept)
    for row in rows:
        yield f"| {' | '.join(escaped(row[i]) or '–' for i in kept)} |"


def _shown(line: Record, name: str, spread: str) -> str:
    if not line[name]:
        return "–"
    texts = [_rounded(line[key], line["measure"]) for key in (name, spread) if line[key]]
    return " ± ".join(texts)


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
    """The whole page of one reproduction, as it is written beside the report."""
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
    """Write reproduction.md and reproduction.csv into the folder; return the former's path."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{NAME}.md"
    page.write_text(text(comparison), encoding="utf-8")
    (folder / f"{NAME}.csv").write_text(as_csv(records(comparison)), encoding="utf-8")
    return page
