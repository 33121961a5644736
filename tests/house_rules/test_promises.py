"""Each promise of docs/promises.md against a fault or a threat has a test, and it exists."""

from __future__ import annotations

import ast
import re

from house_rules.source import ROOT

PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
FOLDER = ROOT / "tests" / "house_rules"
FAULTS, THREATS = (
    (FOLDER / name).read_text(encoding="utf-8") for name in ("faults.txt", "threats.txt")
)
NAMED = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def functions_of(path: str) -> set[str]:
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return {part.name for part in body if isinstance(part, ast.FunctionDef)}


def rows(header: str) -> list[str]:
    """The rows of the table that has this header."""
    table = PAGE[PAGE.index(f"\n{header}\n") :].partition("\n\n")[0]
    return table.strip().split("\n")[2:]


def test_every_test_that_is_named_exists() -> None:
    named = NAMED.findall(PAGE + FAULTS + THREATS)
    missing = [f"{path}::{test}" for path, test in named if test not in functions_of(path)]
    assert named and not missing


def test_every_fault_has_a_test() -> None:
    """faults.txt names each row of the page's table by its beginning."""
    found = rows("| what goes wrong | what fedhet does |")
    assert len(found) >= 24
    entries = re.findall(r"(?m)^([^#].*?): (.*)$", FAULTS)
    for row, (beginning, tests) in zip(found, entries, strict=True):
        assert row.startswith(f"| {beginning}") and NAMED.search(tests), beginning


def test_every_threat_has_a_test() -> None:
    threats = re.split(r"(?m)^(?=[^ #])", THREATS)[1:]
    assert len(threats) >= 16
    assert not [threat for threat in threats if not NAMED.search(threat)]


def test_every_other_file_of_tests_that_the_page_names_exists() -> None:
    assert all((ROOT / path).is_file() for path in re.findall(r"tests/[\w/]+\.py", PAGE))
