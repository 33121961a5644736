"""docs/faults.md and docs/threats.md name tests that exist."""

from __future__ import annotations

import ast
import re

import pytest
from house_rules.source import ROOT

PAGE = ROOT / "docs" / "faults.md"
NAMED = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def functions_of(path: str) -> set[str]:
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return {part.name for part in body if isinstance(part, ast.FunctionDef)}


@pytest.mark.parametrize("page", ["faults.md", "threats.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = NAMED.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
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


def test_every_threat_has_a_test_or_says_that_it_is_not_defended() -> None:
    page = (ROOT / "docs" / "threats.md").read_text(encoding="utf-8")
    _, _, *threats = [line for line in page.splitlines() if line[:1] == "|"]
    assert len(threats) > 20
    for row in threats:
        assert NAMED.search(row) or "**not defended" in row, row
