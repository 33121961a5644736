"""The page of all methods, which `make docs` makes."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from fedhet.config import catalogue

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
