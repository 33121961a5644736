"""Tests of behaviour match what a message names, and not its prose, which may be written anew."""

from __future__ import annotations

import re

from source import FILES, ROOT

MATCH = re.compile(r"""match=[rf]{0,2}(["'])(.*?)\1""")
PROSE = re.compile(r"(?<![-\w])(?:[a-z]+[,;:]? ){3}[a-z]+\b")
PAPERS = sorted(path for path in (ROOT / "papers").rglob("*.py") if "tests" not in path.parts)
TESTS = [
    path
    for folder in ("tests", "papers/tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.parent.name != "house_rules"
]


def test_no_pattern_repeats_four_words_of_a_message() -> None:
    """Messages of Python, PyTorch and the tests themselves are not ours to write anew."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in (*FILES, *PAPERS))
    said = re.sub(r'"\s+f?"', "", code)
    offenders = [
        f"{path.relative_to(ROOT)}: {words}; write .* between what the message names"
        for path in TESTS
        for match in MATCH.finditer(path.read_text(encoding="utf-8"))
        for words in PROSE.findall(match[2])
        if words in said
    ]
    assert offenders == []
