"""The parts of a report, and its formats: HTML, Markdown and LaTeX."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import yaml
from markupsafe import Markup
from rich.filesize import decimal

from fedhet.core.errors import clean

NOTHING = "–"


@dataclass
class TableEntry:
    """An entry of a table.

    Attributes:
        text: the text for readers.
        value: the value by which the column is sorted; None: the text.
        best: whether it is the best value of its column and condition.
    """

    text: str
    value: float | None = None
    best: bool = False


# The head of each column, and the key or function that turns a record into an entry.
Columns = list[tuple[str, Any]]


@dataclass
class Table:
    """A table.

    Attributes:
        name: the name of its files.
        title: its title in a few words.
        caption: what the table shows, and how to read it.
        columns: the heads of the columns.
        rows: the entries.
        data: the same data in a tidy form, for the CSV file.
        folded: whether readers must unfold it on the page.
    """

    name: str
    title: str
    caption: str
    columns: list[str]
    rows: list[list[TableEntry]]
    data: pd.DataFrame
    folded: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        caption: str,
        records: Iterable[Mapping[str, Any]] | pd.DataFrame,
        columns: Columns,
        data: pd.DataFrame | None = None,
        folded: bool = False,
    ) -> Table:
        """Make a table with a row for each record.

        Args:
            name: see the attributes of the class.
            title: see the attributes.
            caption: see the attributes.
            records: the rows: a mapping name -> value for each, or one frame.
            columns: the head of each column, and a name in the record or a function of the record
                that gives the entry. A missing value becomes a dash.
            data: the tidy form; None: the records themselves.
            folded: see the attributes.
        """
        if isinstance(records, pd.DataFrame):
            data, records = records, records.to_dict("records")
        records = list(records)
        rows = [
            [
                plain(record[form]) if isinstance(form, str) else form(record) or plain(None)
                for _, form in columns
            ]
            for record in records
        ]
        heads = [head for head, _ in columns]
        frame = pd.DataFrame(records) if data is None else data
        return cls(name, title, caption, heads, rows, frame, folded)

    @cached_property
    def numeric(self) -> list[bool]:
        """Whether each column has numbers, that is an entry with a value."""
        return [
            any(row[i].value is not None for row in self.rows) for i in range(len(self.columns))
        ]


@dataclass
class FigureFile:
    """A saved figure.

    Attributes:
        name: the name of its files in figures/, without the ending.
        caption: what the figure shows, and how to read it.
        alt: what the figure shows, for readers who cannot see it.
        png: the content of the PNG file.
    """

    name: str
    caption: str
    alt: str
    png: bytes


@dataclass
class Section:
    """A part of the report, in the order of its attributes.

    Attributes:
        title: its title.
        paragraphs: texts.
        tables: tables.
        figures: figures.
        notes: the assumptions.
        listings: verbatim texts, each with its title.
        folded: whether readers must unfold it on the page.
    """

    title: str
    paragraphs: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[FigureFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    listings: list[tuple[str, str]] = field(default_factory=list)
    folded: bool = True


@dataclass
class Document:
    """A report.

    Attributes:
        title: the title of the experiment.
        about: one line about the experiment.
        sentences: the summary.
        warnings: sentences above the summary that the reader must know first.
        sections: all other parts.
    """

    title: str
    about: str
    sentences: list[str]
    warnings: list[str]
    sections: list[Section]

    @property
    def tables(self) -> list[Table]:
        """All tables."""
        return [table for section in self.sections for table in section.tables]


def plain(value: Any) -> TableEntry:
    """Make an entry from a text or a number; a missing value becomes a dash."""
    if value is None or value != value:
        return TableEntry(NOTHING)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return TableEntry(clean(str(value)))
    return TableEntry(f"{value:g}", float(value))


def number(value: float | None, form: str = ".3f") -> TableEntry:
    """Make an entry from a number; a missing or infinite number becomes a dash."""
    if value is None or not math.isfinite(value):
        return TableEntry(NOTHING)
    return TableEntry(format(value, form), float(value))


def p_value(value: float) -> TableEntry:
    """Make an entry from a p-value; NaN becomes a dash."""
    if math.isnan(value):
        return TableEntry(NOTHING)
    return TableEntry("< .001" if value < 0.001 else f"{value:.3f}", value)


def mean_std(values: pd.Series, form: str = ".3f") -> TableEntry:
    """Make an entry with mean and standard deviation; a single value has the mean only."""
    known = values.dropna()
    if known.empty:
        return TableEntry(NOTHING)
    mean = float(known.mean())
    text = format(mean, form)
    if len(known) > 1:
        text += f" ± {known.std(ddof=1):{form}}"
    return TableEntry(text, mean)


def size(count: float) -> str:
    """Format a number of bytes in a decimal unit, such as kB or MB."""
    text, unit = decimal(int(count), precision=2).split()
    return f"{float(text.replace(',', '')):g} {unit}"


def extent(numbers: Collection[float]) -> str:
    """Format the smallest and the largest number, as "12 to 55"; equal numbers are named once."""
    return " to ".join(
        str(end) if isinstance(end, int) else f"{end:g}"
        for end in dict.fromkeys((min(numbers), max(numbers)))
    )


def joined(names: list[str]) -> str:
    """Join names for a sentence: "a, b and c"."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


# ---- formats: one HTML page, Markdown, and tables for the LaTeX package booktabs
TEMPLATES = Path(__file__).with_name("page.yaml")
# Characters with a meaning in Markdown or HTML at any place of a text.
IN_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|~$])")
IN_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "–": "--",
    "χ": r"$\chi$",
    "²": r"\textsuperscript{2}",
    "ⁿ": r"\textsuperscript{n}",
    "“": "``",
    "”": "''",
    "…": r"\ldots{}",
}


def rendered(template: str, document: Document, **options: Any) -> str:
    """Render the report by a template of page.yaml; `options` are for jinja2's environment."""
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(yaml.safe_load(TEMPLATES.read_text(encoding="utf-8"))),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment.get_template(template).render(document=document)


def as_html(document: Document) -> str:
    """Return the report as one HTML page that needs no other file."""
    return rendered("report.html", document, autoescape=True)


def as_markdown(document: Document) -> str:
    """Return the report as Markdown; its figures are links to the files in figures/."""

    def written(value: Any) -> Any:
        return value if isinstance(value, Markup) else escaped(str(value))

    return rendered("report.md", document, finalize=written).rstrip() + "\n"


def escaped(text: str) -> str:
    """Return the text with all characters escaped that have a meaning in Markdown."""
    return IN_MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def as_latex(table: Table) -> str:
    """Return the table as a float with the first sentence of its caption; numbers align right."""

    def in_latex(text: str) -> str:
        return "".join(IN_LATEX.get(character, character) for character in " ".join(text.split()))

    def entry(entry: TableEntry) -> str:
        text = in_latex(entry.text)
        # LaTeX would read [ or * at the begin of a row as an option of the line break before it.
        text = f"{{{text}}}" if text.startswith(("[", "*")) else text
        return rf"\textbf{{{text}}}" if entry.best else text

    first = re.split(r"\. |; ", table.caption)[0]
    heads, *rows = [
        " & ".join(cells) + r" \\"
        for cells in (map(in_latex, table.columns), *(map(entry, row) for row in table.rows))
    ]
    caption = in_latex(f"{table.title}: {first[0].lower()}{first[1:].rstrip('.')}.")
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{caption}}}",
        rf"\label{{tab:{table.name.replace('_', '-')}}}",
        rf"\begin{{tabular}}{{{''.join('r' if each else 'l' for each in table.numeric)}}}",
        *(r"\toprule", heads, r"\midrule", *rows, r"\bottomrule"),
        *(r"\end{tabular}", r"\end{table}"),
    ]
    return "".join(f"{line}\n" for line in lines)
