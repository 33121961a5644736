"""scripts/size counts a file, and finds circles, as one does by hand."""

from __future__ import annotations

import ast

from house_rules.source import SIZE

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


def circles(executed: bool, **files: str) -> list[list[str]]:
    trees = {name: ast.parse(source) for name, source in files.items()}
    found: list[list[str]] = SIZE["circles"](SIZE["graph"](trees, executed))
    return found


def test_circles_by_all_imports_and_by_those_that_are_executed() -> None:
    files = {
        "a": "from b import function",
        "b": "import typing\nif typing.TYPE_CHECKING:\n    import c\nelse:\n    import os",
        "c": "def function():\n    import a",
        "d": "import a, d_e",
    }
    assert circles(False, **files) == [["a", "b", "c"]]
    assert circles(True, **files) == []
    files["b"] = "try:\n    from a import x\nexcept ImportError:\n    pass"
    assert circles(True, **files) == [["a", "b"]]
