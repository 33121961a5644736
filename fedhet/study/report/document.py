"""The parts of a report, and what it is written as."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
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
        text: what people read.
        value: what the column is sorted by; the text if None.
        best: whether it is the best of its column and condition.
    """

    text: str
    value: float | None = None
    best: bool = False


# The head of each column, and what makes an entry of a record.
Columns = list[tuple[str, Any]]


@dataclass
class Table:
    """A table.

    Attributes:
        name: of its files.
        title: in a few words.
        caption: what it shows, and how to read it.
        columns: their heads.
        rows: the entries.
        data: the same in a tidy form, for the CSV file.
        folded: whether the page shows it only when asked.
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
        """A table with a row for each record.

        Args:
            name: see above, as the other arguments.
            title: see above.
            caption: see above.
            records: the rows, each as name -> value, or as a frame.
            columns: the head of each column, and what makes its entry: a function of the record,
                or the name of a value in it. A dash stands where there is none.
            data: the tidy form; None for the records themselves.
            folded: see above.
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

    @property
    def numeric(self) -> list[bool]:
        """Whether each column is one of numbers, because an entry has a value."""
        return [
            any(row[i].value is not None for row in self.rows) for i in range(len(self.columns))
        ]


@dataclass
class FigureFile:
    """A figure that has been saved.

    Attributes:
        name: of its files in figures/, without the ending.
        caption: what it shows, and how to read it.
        alt: what it shows, for those who cannot see it.
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
        notes: what is assumed.
        listings: texts that are shown as they are, each with its title.
        folded: whether the page shows it only when asked.
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
        title: of the experiment.
        about: a line about it.
        sentences: the summary.
        warnings: what a reader must know before anything else.
        sections: the rest.
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
    """An entry that is a text in one line, or a number as it is; a dash where there is none."""
    if value is None or value != value:
        return TableEntry(NOTHING)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return TableEntry(clean(str(value)))
    return TableEntry(f"{value:g}", float(value))


def number(value: float | None, form: str = ".3f") -> TableEntry:
    """An entry that is a number; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return TableEntry(NOTHING)
    return TableEntry(format(value, form), float(value))


def p_value(value: float) -> TableEntry:
    """An entry that is a p-value."""
    if math.isnan(value):
        return TableEntry(NOTHING)
    return TableEntry("< .001" if value < 0.001 else f"{value:.3f}", value)


def mean_std(values: pd.Series, form: str = ".3f") -> TableEntry:
    """Mean and standard deviation; the mean alone of one value."""
    known = values.dropna()
    if known.empty:
        return TableEntry(NOTHING)
    mean = float(known.mean())
    text = format(mean, form)
    if len(known) > 1:
        text += f" ± {known.std(ddof=1):{form}}"
    return TableEntry(text, mean)


def size(count: float) -> str:
    """Bytes in the unit that suits them, with steps of a thousand."""
    text, unit = decimal(int(count), precision=2).split()
    return f"{float(text.replace(',', '')):g} {unit}"


def extent(numbers: Collection[float]) -> str:
    """The least and the most of some numbers, as "12 to 55"; one of equal numbers."""
    return " to ".join(
        str(end) if isinstance(end, int) else f"{end:g}"
        for end in dict.fromkeys((min(numbers), max(numbers)))
    )


def joined(names: list[str]) -> str:
    """Names as a sentence lists them."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


# ---- the report as one HTML page and as Markdown, its tables as LaTeX for the package booktabs
TEMPLATES = Path(__file__).with_name("page.yaml")
# What begins something in Markdown or HTML, wherever it stands.
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
    """The report by a template of page.yaml, with options of jinja2's environment."""
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
    """The report as one page that needs nothing else."""
    return rendered("report.html", document, autoescape=True)


def as_markdown(document: Document) -> str:
    """The report with its tables; figures are links to the files in figures/."""

    def written(value: Any) -> Any:
        return value if isinstance(value, Markup) else escaped(str(value))

    return rendered("report.md", document, finalize=written).rstrip() + "\n"


def escaped(text: str) -> str:
    """The text, in which no character has a meaning to Markdown."""
    return IN_MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def as_latex(table: Table) -> str:
    """The table as a float, with the first sentence of its caption; numbers are to the right."""

    def in_latex(text: str) -> str:
        return "".join(IN_LATEX.get(character, character) for character in " ".join(text.split()))

    def entry(entry: TableEntry) -> str:
        text = in_latex(entry.text)
        # A row that begins with [ would be read as an option of the line break before it.
        text = f"{{{text}}}" if text.startswith(("[", "*")) else text
        return rf"\textbf{{{text}}}" if entry.best else text

    first = re.split(r"\. |; ", table.caption)[0]
    rows = [list(map(entry, row)) for row in table.rows]
    written = pd.DataFrame(rows, columns=list(map(in_latex, table.columns))).style.hide()
    return "% \\usepackage{booktabs}\n" + written.to_latex(
        column_format="".join("r" if numeric else "l" for numeric in table.numeric),
        caption=in_latex(f"{table.title}: {first[0].lower()}{first[1:].rstrip('.')}."),
        label=f"tab:{table.name.replace('_', '-')}",
        position_float="centering",
        hrules=True,
    )
