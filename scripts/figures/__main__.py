"""Measures the figures of README.md and docs/ again, and reports which figures differ.

    python scripts/figures [NAME ...] [--write]

It runs every table of docs/figures/, or only the tables named. For each figure it prints the stored
value and the new one. The exit code is 1 if a figure differs, or if a page does not show the
measurements. With --write, it stores the new figures and writes them into the pages. If several
tables need the same run, it makes the run once. tables.py describes the tables.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout, wherever the command is started

import tables  # noqa: E402
import torch  # noqa: E402
from measure import measure  # noqa: E402


def compare(table: tables.Table, figures: dict[str, tables.Values]) -> bool:
    """Print each figure's stored and new value; return whether all are the same."""
    stored = table.read()["figures"]
    same = True
    print(f"{table.name}: {table.title}")
    for cell in table.cells:
        old, new = stored.get(cell.key, []), figures[cell.key]
        printed, now = (cell.text(values, table.show) if values else "-" for values in (old, new))
        same &= printed == now
        verdict = "same" if printed == now else "differs"
        print(f"  {cell.row}, {cell.column}: printed {printed}, now {now}: {verdict}")
    return same


def about() -> dict[str, str]:
    """Return what else the figures depend on, apart from the overrides: code, torch, processor."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    code = ("--", "fedhet", "conf", "scripts/figures")
    changed = git("status", "--porcelain", *code)
    return {
        "fedhet": version("fedhet"),
        "commit": git("log", "-1", "--format=%h", *code) + (" with changes" if changed else ""),
        "torch": torch.__version__.partition("+")[0],
        "cpu": platform.processor() or platform.machine(),
    }


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Measure the tables that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables.find_components()
    every = tables.tables(root)
    names = ", ".join(every)
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument(
        "--write", action="store_true", help="store the new figures and update the pages"
    )
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - set(every):
        parser.error(f"unknown table {', '.join(sorted(unknown))}; the tables are {names}")
    same = True
    for name in args.names or every:
        figures = measure(every[name])
        same &= compare(every[name], figures)
        if args.write:
            every[name].write(about(), figures)
            tables.write_pages(root, {name})
    found = tables.problems(root)
    print(*found, sep="\n", end="\n" if found else "")
    return 0 if not found and (same or args.write) else 1


if __name__ == "__main__":
    sys.exit(main())
