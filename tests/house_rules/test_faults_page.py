"""docs/faults.md names tests that exist."""

from __future__ import annotations

import ast
import re

from house_rules.source import ROOT

PAGE = ROOT / "docs" / "faults.md"
NAMED = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def functions_of(path: str) -> set[str]:
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return {part.name for part in body if isinstance(part, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists() -> None:
    named = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    missing = [f"{path}::{test}" for path, test in named if test not in functions_of(path)]
    assert named and not missing


def test_every_fault_has_a_test_or_says_that_it_is_not_handled_yet() -> None:
    page, _, _ = PAGE.read_text(encoding="utf-8").partition("## What was measured")
    rows = [line for line in page.splitlines() if line[:2] == "| "]
    faults = [row for row in rows if not row.startswith("| | fault ")]
    assert len(faults) > 20
    for row in faults:
        assert NAMED.search(row) or "**not yet**" in row, row
    numbers = [int(found[1]) for row in faults if (found := re.match(r"\| (\d+) \|", row))]
    assert numbers == list(range(1, 21))
