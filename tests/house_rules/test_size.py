"""scripts/size counts a file as one does by hand."""

from __future__ import annotations

import ast
import runpy

from house_rules.source import ROOT

SIZE = runpy.run_path(str(ROOT / "scripts" / "size" / "source.py"))

FILE = '''"""A docstring
of two lines."""

import os  # 1


class Empty:  # 2
    """A docstring."""


async def function(x: int) -> str:  # 3
    """A docstring."""
    # A comment.
    if x:  # 4
        print(  # 5
            "text",
        )
    text = """Not a

docstring."""  # 6

    def inner() -> None: pass  # 7, 8

    return text  # 9
'''


def test_statements_beyond_the_budget_are_reported() -> None:
    counted = {"fedhet": {"statements": 11}, "all": {"statements": 16}}
    assert SIZE["over_budget"](counted, {"all": 16}) == []
    (line,) = SIZE["over_budget"](counted, {"all": 15})
    assert line == "all has 16 statements; budget.json allows 15"


def test_statements_and_functions() -> None:
    counted = SIZE["count"](FILE)
    assert counted == {"files": 1, "functions": 2, "statements": 9}


def test_neither_docstrings_nor_comments_nor_formatting_change_statements() -> None:
    bare = ast.parse(FILE)
    for node in ast.walk(bare):
        if isinstance(node, ast.Module | ast.ClassDef | ast.AsyncFunctionDef):
            node.body = node.body[1:] or [ast.Expr(ast.Constant("docstring"))]
    assert SIZE["count"](ast.unparse(bare))["statements"] == 9
