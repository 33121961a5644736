"""Counts the code, by package."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def count(source: str) -> Counter[str]:
    """Count a file's functions and statements.

    Docstrings do not count as statements. Neither formatting nor moving code changes the numbers.
    """
    nodes = [*ast.walk(ast.parse(source))]
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | FUNCTION)]
    docstrings = sum(ast.get_docstring(node) is not None for node in documented)
    statements = sum(isinstance(node, ast.stmt) for node in nodes) - docstrings
    functions = sum(isinstance(node, FUNCTION) for node in nodes)
    return Counter(files=1, functions=functions, statements=statements)


def packages(root: Path) -> dict[str, Counter[str]]:
    """Count each package of fedhet, then fedhet, papers and scripts, then all; without tests."""
    rows: dict[str, Counter[str]] = {}
    for folder in ("fedhet", "papers", "scripts"):
        for path in (root / folder).rglob("*.py"):
            _, first, *deeper = path.relative_to(root).parts
            if first == "tests":
                continue
            own = [f"fedhet/{first if deeper else '*.py'}"] if folder == "fedhet" else []
            counted = count(path.read_text(encoding="utf-8"))
            for row in (*own, folder, "all"):
                rows.setdefault(row, Counter()).update(counted)
    return dict(sorted(rows.items(), key=lambda row: (row[0] == "all", "/" not in row[0], row[0])))


def over_budget(counted: Mapping[str, Mapping[str, int]], budget: Mapping[str, int]) -> list[str]:
    """Return a message for each name of the budget (such as "all") with too many statements."""
    return [
        f"{name} has {counted[name]['statements']:,} statements; budget.json allows {allowed:,}"
        for name, allowed in budget.items()
        if counted[name]["statements"] > allowed
    ]
