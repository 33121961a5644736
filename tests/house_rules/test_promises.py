"""Each promise of docs/promises.md against a fault or a threat names a test, and it exists."""

from __future__ import annotations

import ast
import re

import pytest
from house_rules.source import ROOT

PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
NAMED = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def functions_of(path: str) -> set[str]:
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return {part.name for part in body if isinstance(part, ast.FunctionDef)}


def rows(header: str) -> list[str]:
    """The rows of the table that has this header."""
    table = PAGE[PAGE.index(f"\n{header}\n") :].partition("\n\n")[0]
    return table.strip().split("\n")[2:]


def test_every_test_that_the_page_names_exists() -> None:
    named = NAMED.findall(PAGE)
    missing = [f"{path}::{test}" for path, test in named if test not in functions_of(path)]
    assert named and not missing


@pytest.mark.parametrize(
    ("header", "least"),
    [
        ("| what goes wrong | what fedhet does | test |", 24),
        ("| who | tries to | what holds | test |", 16),
    ],
)
def test_every_fault_and_every_threat_has_a_test(header: str, least: int) -> None:
    found = rows(header)
    assert len(found) >= least
    assert not [row for row in found if not NAMED.search(row.rpartition(" | ")[2])]


def test_every_other_file_of_tests_that_the_page_names_exists() -> None:
    assert all((ROOT / path).is_file() for path in re.findall(r"tests/[\w/]+\.py", PAGE))
