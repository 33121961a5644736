"""The package's source as syntax trees, for the house rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import networkx as nx

import fedhet

PACKAGE = Path(fedhet.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
METHOD_FOLDER = PACKAGE / "methods"
METHODS = [
    path for path in sorted(METHOD_FOLDER.rglob("*.py")) if path != METHOD_FOLDER / "__init__.py"
]
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def name(path: Path) -> str:
    """The path as it is named from the repository's root."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


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


def imported_packages(module: ast.AST) -> set[str]:
    """The first parts of the imported names."""
    return {dotted.partition(".")[0] for dotted in imports(module)}


def calls(module: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name as written, call)."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node
