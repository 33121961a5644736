"""docs/features.md has each choice of conf/, and names pages and tests that know the feature."""

from __future__ import annotations

import re

from house_rules.source import ROOT

from fedhet.runs.config import catalogue

PAGE = ROOT / "docs" / "features.md"
GROUPS = ("method", "plugin", "dataset", "partition", "model", "merge", "engine", "tracker")
ROW = re.compile(r"^\| (.+) \| \[[^]]+\]\(([^)#]+)\) \| (\S+\.py) \|$", re.MULTILINE)


def words(feature: str) -> list[str]:
    """The last word of each name: `krum` of `merge=krum`, `deadline` of `replies.deadline`."""
    return [re.findall(r"-?[\w-]*\w", code)[-1] for code in re.findall(r"`([^`]+)`", feature)]


def test_every_feature_has_a_page_and_a_test_that_name_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = ROW.findall(text)
    assert len(rows) == text.count("\n| ") - text.count("\n|---")
    lacking = []
    for feature, page, test in rows:
        assert words(feature), feature
        for path in (PAGE.parent / page, ROOT / test):
            known = path.read_text(encoding="utf-8")
            lacking += [
                f"{word}: {path.relative_to(ROOT)}"
                for word in words(feature)
                if not re.search(rf"(?<![a-z]){word}(?![a-z])", known, re.IGNORECASE)
            ]
    assert not lacking


def test_every_choice_of_conf_is_a_feature() -> None:
    found = set(re.findall(r"`(\w+)=\[?(\w+)\]?`", PAGE.read_text(encoding="utf-8")))
    missing = (
        {(group, choice) for group in GROUPS for choice in catalogue.choices(group)}
        - found
        - {("tracker", "none")}
    )
    assert not missing
