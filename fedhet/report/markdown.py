"""The report as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fedhet.report.document import Document, FigureFile, Table, TableEntry

# What begins something in Markdown or HTML, wherever it stands.
SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~$])")


def escaped(text: str) -> str:
    """The text, in which no character has a meaning to Markdown."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def as_markdown(document: Document) -> str:
    """The report with its tables; figures are links to the files in figures/."""
    return "\n".join(_lines(document)).rstrip() + "\n"


def _lines(document: Document) -> Iterator[str]:
    yield f"# {escaped(document.title)}\n"
    yield f"{escaped(document.about)}\n"
    for warning in document.warnings:
        yield f"> {escaped(warning)}\n"
    yield from (f"- {escaped(sentence)}" for sentence in document.sentences)
    yield f"\n{escaped(document.rule)}\n"
    for section in document.sections:
        yield f"## {escaped(section.title)}\n"
        yield from (f"{escaped(paragraph)}\n" for paragraph in section.paragraphs)
        for table in section.tables:
            yield from _table(table)
        for figure in section.figures:
            yield from _figure(figure)
        if section.notes:
            yield "### What this assumes\n"
            yield from (f"- {escaped(note)}" for note in section.notes)
            yield ""
        for title, text in section.listings:
            yield f"{escaped(title)}:\n"
            yield from (f"    {line}" for line in text.splitlines())
            yield ""


def _figure(figure: FigureFile) -> Iterator[str]:
    yield f"![{escaped(figure.alt)}](figures/{figure.name}.png)\n"
    yield f"{escaped(figure.caption)}\n"


def _table(table: Table) -> Iterator[str]:
    yield f"### {escaped(table.title)}\n"
    yield f"{escaped(table.caption)}\n"
    yield f"| {' | '.join(map(escaped, table.columns))} |"
    yield "|" + "---|" * len(table.columns)
    for row in table.rows:
        yield f"| {' | '.join(map(_entry, row))} |"
    yield ""


def _entry(entry: TableEntry) -> str:
    text = escaped(entry.text)
    return (f"**{text}**" if entry.best else text) + entry.mark
