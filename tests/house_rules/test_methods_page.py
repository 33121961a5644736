"""The page of all methods, which `make docs` makes."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from fedhet.runs.config import catalogue

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("methods_page")


def test_every_method_has_a_section(generator: ModuleType) -> None:
    page = generator.page()
    headings = re.findall(r"(?m)^## (.*)", page)
    anchors = {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}
    assert set(re.findall(r"\]\(#(.*?)\)", page)) <= anchors
    for group, choice in (("method", "method={}"), ("plugin", "plugin=[{}]")):
        for name in catalogue.choices(group):
            assert f"`{choice.format(name)}`" in page, name


def test_the_tables_are_those_of_the_files(generator: ModuleType) -> None:
    """And README.md has each method and plug-in."""
    for path, text in generator.tables().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make docs`"
    readme = (generator.ROOT / "README.md").read_text(encoding="utf-8")
    for group, choice in (("method", "| `{}`"), ("plugin", "`plugin=[{}]`")):
        for name in catalogue.choices(group):
            assert choice.format(name) in readme, name
