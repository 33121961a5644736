"""docs/methods.md is generated, and up to date."""

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


def test_the_page_is_up_to_date(generator: ModuleType) -> None:
    written = generator.PAGE.read_text(encoding="utf-8")
    assert written == generator.page(), f"docs/methods.md is stale; run {generator.COMMAND}"


def test_every_method_has_a_section(generator: ModuleType) -> None:
    page = generator.page()
    headings = re.findall(r"(?m)^## (.*)", page)
    anchors = {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}
    assert set(re.findall(r"\]\(#(.*?)\)", page)) <= anchors
    for group, choice in (("method", "method={}"), ("plugin", "plugin=[{}]")):
        for name in catalogue.choices(group):
            assert f"`{choice.format(name)}`" in page, name


@pytest.mark.parametrize(
    ("docstring", "rendered"),
    [
        ("One line.\n\n    x <- y\n\nMore.", ["One line.", "```text\nx <- y\n```", "More."]),
        (
            "A sum is a\n- b.\n\n- a list\n    of one",
            ["A sum is a\n\\- b.", "- a list\n    of one"],
        ),
        (
            "    down: x      up: w_k, |a|      client keeps: nothing\n    server keeps: x",
            [
                "| down | up | client keeps | server keeps |\n| --- | --- | --- | --- |\n"
                "| x | w_k, \\|a\\| | nothing | x |"
            ],
        ),
        (
            "    fit    down: nothing    up: `p`\n    train  down: x          up: w,\n"
            "           n\n\n    client keeps: p      server keeps: x",
            [
                "| phase | down | up |\n| --- | --- | --- |\n| fit | nothing | `p` |\n"
                "| train | x | w, n |\n\nThe client keeps: p. The server keeps: x."
            ],
        ),
        ("    and down: x, but also\n    down: y  down: z", None),
    ],
)
def test_docstrings_become_markdown(
    generator: ModuleType, docstring: str, rendered: list[str] | None
) -> None:
    blocks = [generator._render(*block) for block in generator._blocks(docstring)]
    if rendered is None:  # in no form that a table could have
        assert blocks[0].startswith("```text\n")
    else:
        assert blocks == rendered
