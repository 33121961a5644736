"""The report as one HTML page and as Markdown, and its tables as LaTeX for the package booktabs."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import yaml
from markupsafe import Markup

from fedhet.report.document import Document, Table, TableEntry

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
    "†": r"\textsuperscript{\textdagger}",
    "‡": r"\textsuperscript{\textdaggerdbl}",
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
    """The table as a float; columns of numbers are aligned to the right."""

    def in_latex(text: str) -> str:
        return "".join(IN_LATEX.get(character, character) for character in " ".join(text.split()))

    def entry(entry: TableEntry) -> str:
        text = in_latex(entry.text)
        # A row that begins with [ would be read as an option of the line break before it.
        text = f"{{{text}}}" if text.startswith(("[", "*")) else text
        return (rf"\textbf{{{text}}}" if entry.best else text) + in_latex(entry.mark)

    rows = [list(map(entry, row)) for row in table.rows]
    written = pd.DataFrame(rows, columns=list(map(in_latex, table.columns))).style.hide()
    return "% \\usepackage{booktabs}\n" + written.to_latex(
        column_format="".join("r" if numeric else "l" for numeric in table.numeric),
        caption=in_latex(f"{table.title}. {table.caption}"),
        label=f"tab:{table.name.replace('_', '-')}",
        position_float="centering",
        hrules=True,
    )
