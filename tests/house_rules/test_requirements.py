"""The lower bounds of the dependencies."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from house_rules.source import ROOT


@pytest.fixture(scope="module")
def known_holes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("known_holes", ROOT / "scripts/known_holes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_lower_bound_admits_a_release_with_a_known_hole(known_holes: ModuleType) -> None:
    assert list(known_holes.holes(ROOT)) == []


@pytest.mark.parametrize("bound", ["", ">=3.1.5", "<4", ">=3.1,<3.2"])
def test_one_that_does_is_named(known_holes: ModuleType, tmp_path: Path, bound: str) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    text = re.sub('"jinja2.*"', f'"jinja2{bound}"', text)
    (tmp_path / "pyproject.toml").write_text(text)
    (line,) = known_holes.holes(tmp_path)
    assert line.startswith("pyproject.toml: jinja2") and "3.1.6" in line and "CVE" in line


def test_every_dependency_has_a_lower_bound_which_test_lowest_installs() -> None:
    """Its recipe in the Makefile reads them with sed."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"s/( \S+)/\S+/p' pyproject.toml", makefile)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for line in text.partition("dependencies = [\n")[2].partition("]")[0].splitlines():
        assert re.match(pattern, line), line
