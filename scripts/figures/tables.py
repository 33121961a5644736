"""The tables of measured figures: their definitions, measurements and pages.

docs/figures/<name>.yaml defines a table:

    title: the title of the table
    runs: the overrides of every run
    task: a function of tasks.py that changes the configured task (optional)
    seeds: the number of seeds, counted from 0 (optional; 3)
    show: mean (with the standard deviation) or seeds (the value of every seed) (optional; mean)
    columns:
      a label: one of
        acc_global@20: a value of training round 20 in rounds.jsonl
        ess@weigh: a value of the last step of the phase "weigh"
        bytes/down/model: an entry of summary.json; if it has entries of its own, their sum
        attack/auc: a value of scripts/nearest_sample.py
      another: {value: ..., with: overrides of this column, unit: divisor, digits: decimals}
    rows:
      a label: the overrides of this row
    reference: {a row: {a column: a figure from elsewhere, seeds: its number of seeds}} (optional)

docs/figures/<name>.json has the measurements: for every run and value a list over the seeds, with a
number, "diverged", or null if the run has no such value. A page prints the table between
`<!-- figures: <name> -->` and `<!-- end figures -->`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import textwrap
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fedhet.runs.config import components

BLOCK = re.compile(r"<!-- figures: (\S+) -->\n(.*?)<!-- end figures -->", re.DOTALL)
DIVERGED = "diverged"
Values = list[float | str | None]  # one per seed


@dataclass(frozen=True)
class Cell:
    """A figure of a table: its run, and its name in the run's record."""

    row: str
    column: str
    task: str | None
    overrides: tuple[str, ...]
    value: str
    unit: float = 1.0
    digits: int = 3

    @property
    def key(self) -> str:
        """The figure's name in the file of measurements."""
        task = f"{self.task}: " if self.task else ""
        return f"{task}{shlex.join(self.overrides)} -> {self.value}"

    def number(self, value: float | str | None) -> str:
        """Return a value in its printed form."""
        if not isinstance(value, float | int):
            return value or ""
        return re.sub(r"^(-?)0(?=\.)", r"\1", f"{value / self.unit:.{self.digits}f}")

    def text(self, values: Values, show: str) -> str:
        """Return the figure in its printed form."""
        if show == "seeds":
            return " ".join(map(self.number, values))
        if DIVERGED in values:
            return f"{values.count(DIVERGED)} of {len(values)} {DIVERGED}"
        if None in values or len(values) == 1:
            return self.number(values[0])
        return f"{self.number(statistics.mean(values))} ({self.number(statistics.stdev(values))})"


@dataclass
class Table:
    """A table of figures, read from its file; the module's docstring describes the keys."""

    file: Path
    title: str
    runs: str
    columns: dict[str, Any]
    rows: dict[str, str]
    task: str | None = None
    seeds: int = 3
    show: str = "mean"
    reference: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The table's name on pages and on the command line."""
        return self.file.stem

    @property
    def stored(self) -> Path:
        """The file of measurements."""
        return self.file.with_suffix(".json")

    @property
    def command(self) -> str:
        """The command that measures the table."""
        return f"make figures ONLY={self.name}"

    @cached_property
    def cells(self) -> list[Cell]:
        """The figures of the table, row by row."""
        cells = []
        for row, overrides in self.rows.items():
            for column, given in self.columns.items():
                spec = dict(given) if isinstance(given, dict) else {"value": given}
                lines = shlex.split(f"{self.runs} {spec.pop('with', '')} {overrides}")
                cells.append(Cell(row, column, self.task, tuple(lines), **spec))
        return cells

    def read(self) -> dict[str, Any]:
        """Read the last measurements: `about`, and `figures` by the cells' keys; empty if none."""
        if not self.stored.exists():
            return {"about": {}, "figures": {}}
        return json.loads(self.stored.read_text(encoding="utf-8"))

    def write(self, about: dict[str, str], figures: dict[str, Values]) -> None:
        """Store the measurements, with a line for each figure."""
        lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in figures.items())
        text = f'{{"about": {json.dumps(about)},\n"figures": {{\n{lines}\n}}}}\n'
        self.stored.write_text(text, encoding="utf-8")

    def markdown(self) -> str | None:
        """Return the table in the form that pages print; None if a figure was never measured."""
        content = self.read()
        figures, about = content["figures"], content["about"]
        if any(len(figures.get(cell.key, ())) != self.seeds for cell in self.cells):
            return None
        compared = [c for c in self.columns if any(c in row for row in self.reference.values())]
        columns = [*self.columns, *(f"{column}, independent" for column in compared)]
        lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for row in self.rows:
            texts = [c.text(figures[c.key], self.show) for c in self.cells if c.row == row]
            texts += [self.reference.get(row, {}).get(column, "") for column in compared]
            lines.append(f"| {row} | " + " | ".join(texts) + " |")
        what = "Each" if self.show == "seeds" else "Mean (standard deviation)"
        source = (
            f"{what} of the seeds 0 to {self.seeds - 1}. `{self.command}`"
            f" (docs/figures/{self.file.name}) with fedhet {about['fedhet']} at {about['commit']},"
            f" torch {about['torch']}."
        )
        return "\n\n".join([_wrapped(f"{self.title}:"), "\n".join(lines), _wrapped(source)]) + "\n"


def find_components() -> None:
    """Let runs select components from conf/ in this folder; their classes are in attack.py."""
    components.extend_search_path([str(Path(__file__).with_name("conf"))])
    os.environ[components.TRUST] = "attack"


def tables(root: Path) -> dict[str, Table]:
    """Return all tables of the repository, by name."""
    files = sorted((root / "docs" / "figures").glob("*.yaml"))
    return {
        file.stem: Table(file, **yaml.safe_load(file.read_text(encoding="utf-8"))) for file in files
    }


def pages(root: Path) -> list[Path]:
    """Return the pages that may show tables."""
    docs = root / "docs"
    return [root / "README.md", *sorted(docs.glob("*.md")), *sorted(docs.glob("methods/*.md"))]


def problems(root: Path) -> list[str]:
    """Return where pages, definitions and measurements disagree; empty if they agree."""
    every = tables(root)
    used = set()
    found = []
    for page in pages(root):
        for name, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            where = page.relative_to(root).as_posix()
            used.add(name)
            if name not in every:
                found.append(f"{where}: docs/figures/{name}.yaml does not exist")
            elif block != every[name].markdown():
                command = f"{every[name].command} ARGS=--write"
                found.append(
                    f"{where}: the block {name!r} differs from the measurements; run {command}"
                )
    unused = (f"docs/figures/{name}.yaml: no page shows it" for name in every if name not in used)
    return [*found, *unused]


def write_pages(root: Path, names: set[str]) -> None:
    """Write these tables into the pages' blocks."""
    every = tables(root)
    for page in pages(root):
        old = page.read_text(encoding="utf-8")

        def block(found: re.Match[str]) -> str:
            if found[1] not in names:
                return found[0]
            return f"<!-- figures: {found[1]} -->\n{every[found[1]].markdown()}<!-- end figures -->"

        new = BLOCK.sub(block, old)
        if new != old:
            page.write_text(new, encoding="utf-8")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
