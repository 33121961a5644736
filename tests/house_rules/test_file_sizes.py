"""Files, and the package's first level, stay small enough to be read at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from house_rules.source import FILES, PACKAGE, ROOT, name

# Lines of a file as formatted: about as much as can be read and kept in mind in one sitting.
LONGEST_FILE = 300
# Python files directly in fedhet/, the first thing that a reader of the source sees.
MOST_MODULES = 25

OTHERS = [path for folder in ("tests", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", [*FILES, *OTHERS], ids=name)
def test_files_stay_small(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_FILE, (
        f"{name(path)} has {lines} lines, more than {LONGEST_FILE}: cut it where one subject ends"
        " and the next begins"
    )


def test_the_package_has_few_modules_at_its_first_level() -> None:
    modules = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(modules) <= MOST_MODULES, (
        f"fedhet/ has {len(modules)} Python files, more than {MOST_MODULES}: put the new one into"
        f" a folder with those that it belongs to; there are {modules}"
    )
