"""The package's source as syntax trees, for the house rules."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import fedhet

PACKAGE = Path(fedhet.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
METHOD_FOLDER = PACKAGE / "methods"
METHODS = [
    path for path in sorted(METHOD_FOLDER.rglob("*.py")) if path != METHOD_FOLDER / "__init__.py"
]
# scripts/size/source.py: what counts code and finds imports and circles.
SIZE = runpy.run_path(str(ROOT / "scripts" / "size" / "source.py"))
imports: Callable[[ast.AST], Iterator[str]] = SIZE["imports"]


def name(path: Path) -> str:
    """The path as it is named from the repository's root."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_packages(module: ast.AST) -> set[str]:
    """The first parts of the imported names."""
    return {dotted.partition(".")[0] for dotted in imports(module)}


def calls(module: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name as written, call)."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node
