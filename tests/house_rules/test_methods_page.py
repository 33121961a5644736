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
    """docs/methods/README.md has each method and plug-in, README.md those that have a page."""
    for path, text in generator.tables().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `make docs`"
    table = (generator.NOTES / "README.md").read_text(encoding="utf-8")
    readme = (generator.ROOT / "README.md").read_text(encoding="utf-8")
    for group, choice in (("method", "{}"), ("plugin", "plugin=[{}]")):
        for name in catalogue.choices(group):
            assert f"`{choice.format(name)}`" in table, name
            if generator.notes(generator.module_of(group, name)).exists():
                assert f"`{name}`" in readme, name


def test_a_method_has_its_title_on_its_page_and_once_on_the_page_of_all(
    generator: ModuleType,
) -> None:
    page = generator.page()
    for module, choices in generator.sections().items():
        title = generator.title(choices)
        assert len(re.findall(rf"(?m)^#+ {re.escape(title)}$", page)) == 1, title
        if (path := generator.notes(module)).exists():
            assert path.read_text(encoding="utf-8").startswith(f"# {title}\n\n"), path.name
    assert page.count("| method | what it does |") == 1
