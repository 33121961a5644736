"""Tables as LaTeX, for the package booktabs."""

from __future__ import annotations

from fedhet.report.document import Table, TableEntry

SPECIAL = {
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


def escaped(text: str) -> str:
    """The text, in which no character has a meaning to LaTeX."""
    return "".join(SPECIAL.get(character, character) for character in " ".join(text.split()))


def as_latex(table: Table) -> str:
    """The table as a float; columns of numbers are aligned to the right."""
    lines = [
        "% \\usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escaped(f'{table.title}. {table.caption}')}}}",
        rf"\label{{tab:{table.name.replace('_', '-')}}}",
        rf"\begin{{tabular}}{{{_columns(table)}}}",
        r"\toprule",
        _row([escaped(name) for name in table.columns]),
        r"\midrule",
        *(_row([_entry(entry) for entry in row]) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _columns(table: Table) -> str:
    return "".join("r" if numeric else "l" for numeric in table.numeric)


def _row(entries: list[str]) -> str:
    # A row that begins with [ would be read as an option of the line break before it.
    first = f"{{{entries[0]}}}" if entries[0].startswith(("[", "*")) else entries[0]
    return " & ".join([first, *entries[1:]]) + r" \\"


def _entry(entry: TableEntry) -> str:
    text = escaped(entry.text)
    return (rf"\textbf{{{text}}}" if entry.best else text) + escaped(entry.mark)
