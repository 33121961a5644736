"""What the source says: how much code there is, and which modules import each other in a circle."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx as nx

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def count(source: str) -> Counter[str]:
    """Count a file's functions and statements.

    Docstrings are no statements, so neither formatting nor moving changes their number.
    """
    nodes = [*ast.walk(ast.parse(source))]
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | FUNCTION)]
    docstrings = sum(ast.get_docstring(node) is not None for node in documented)
    statements = sum(isinstance(node, ast.stmt) for node in nodes) - docstrings
    functions = sum(isinstance(node, FUNCTION) for node in nodes)
    return Counter(files=1, functions=functions, statements=statements)


def packages(root: Path) -> dict[str, Counter[str]]:
    """Count the packages of fedhet, then fedhet, the folders beside it, and all; without tests."""
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
    """Say which of the budget's names, such as all, have more statements than it allows."""
    return [
        f"{name} has {counted[name]['statements']:,} statements; budget.json allows {allowed:,}"
        for name, allowed in budget.items()
        if counted[name]["statements"] > allowed
    ]


def imports(node: ast.AST, executed: bool = False) -> Iterator[str]:
    """Yield the dotted names that a file imports, such as `fedhet.core.messages.Upload`.

    `executed` leaves out what is imported for type checkers or when a function is called.
    """
    parts = [part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.expr)]
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif executed and isinstance(node, FUNCTION):
        return
    elif executed and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        parts = [*node.orelse]
    for part in parts:
        yield from imports(part, executed)


def graph(trees: Mapping[str, ast.Module], executed: bool = False) -> dict[str, set[str]]:
    """Return which of the modules each of them imports; `executed` as in `imports`."""
    return {
        name: {one if one in trees else one.rpartition(".")[0] for one in imports(tree, executed)}
        & trees.keys()  # a name is that of a module, or of an attribute of one
        for name, tree in trees.items()
    }


def modules(package: Path) -> dict[str, ast.Module]:
    """Read the modules of a package: their dotted names and trees."""
    trees = {path: ast.parse(path.read_bytes()) for path in package.rglob("*.py")}
    names = {path: path.relative_to(package.parent).with_suffix("").parts for path in trees}
    return {".".join(names[path]).removesuffix(".__init__"): trees[path] for path in trees}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other, the largest first."""
    groups = map(sorted, nx.strongly_connected_components(nx.DiGraph(graph)))
    return sorted((one for one in groups if one[1:]), key=lambda group: (-len(group), group))
