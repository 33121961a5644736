"""Of measured methods, pages say only what the kept results show.

A sentence that says that something is ahead of something else, or behind it, has a marker right
behind it:

    SGDM is ahead of FedAvg. <!-- shown: leaderboard; all; SGDM > FedAvg -->

It names a file, a place in it, and two methods or settings, of which the first is shown to have the
greater value (`>`), or the smaller one (`<`), or is not shown to differ (`=`), or was not tested
(`?`). Files and their places are

    leaderboard (and _personal, hospitals): all; equal steps; a setting such as "digits, 2 classes"
    helps-confirm: tuned; same rate                 helps-compute: "2 classes: as published"
    a reproduction, such as fedsa-table1: "cpu: setting=pathological: last_k_weighted", which are
        the columns scale, setting and measure
    figures/scaffold, a table of docs/figures: a column, such as "round 20"

Place and names may be patterns (`*`), which must hold wherever they match, or "10 of 12" times:

    <!-- shown: fedlex-table1; tuned: *mnist*; FedLEx* < *; 10 of 12 -->

What another source claims is marked `<!-- cited -->`. A marker may go on in the next line, but
neither it nor `>` begins a line, where they would end the paragraph in Markdown.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from house_rules.source import ROOT, name
from house_rules.test_figures import EXEMPT, SCRIPT

from fedhet.study.report import statistics
from papers import design, helps, leaderboard
from papers.paper import find
from papers.table import read_csv
from papers.tables import RESULTS
from papers.verdict import NOT_SHOWN, OPPOSITE, SAME

PAGES = [*sorted((ROOT / "docs" / "methods").glob("*.md")), ROOT / "docs" / "reproduction.md"]
PAGES += [ROOT / "papers" / f"{name}.md" for name in ("findings", "leaderboard", "where_it_helps")]
MARKER = re.compile(r"<!--\s+shown:\s+(.*?)\s+-->", re.DOTALL)
# A sentence ends with a point, unless markers follow it.
SENTENCE = re.compile(r"(.+?)(\s*(?:<!-- .*? -->\s*)+|(?<=[.!?])\s+|$)")
NAMES = re.compile(r"(?m)^#.*$|\[[^]]*\]\([^)]*\)")  # headings and links
AHEAD = re.compile(r"\b(ahead|better|outperform\w*|beats?|gain(s|ed)?|superior|helps?)\b")
BEHIND = re.compile(r"\b(behind|worse|inferior)\b")
SIGNS = {">": 1, "<": -1, "=": 0, "?": None}
Differences = dict[tuple[str, str, str], np.ndarray]  # by place and the two that are compared


class Shown(NamedTuple):
    """Whether `a` has a greater value than `b` (1), or a smaller one (-1), or neither is shown (0).

    It is None where nothing was tested.
    """

    place: str
    a: str
    b: str
    sign: int | None


def sign(difference: float, p: float) -> int | None:
    return None if np.isnan(p) else int(np.sign(difference)) if p < statistics.LEVEL else 0


def of_one_table(pairs: Differences) -> Iterator[Shown]:
    """All comparisons of a table are one family of tests."""
    found = pd.DataFrame(
        {"pairs": [*map(len, pairs.values())], "p": [*map(statistics.wilcoxon, pairs.values())]}
    )
    for (where, own), p in zip(pairs.items(), statistics.decide(found)["p"], strict=True):
        yield Shown(*where, sign(own.mean() if len(own) else 0.0, p))


def of_board(stem: str) -> Iterator[Shown]:
    board, every = leaderboard.BOARDS[stem], pd.read_csv(RESULTS / f"{stem}.csv")
    runs = every[every["kind"] == "run"]
    forms = {"all": (runs, board.score)}
    if "equal_steps" in runs:
        forms["equal steps"] = (runs.dropna(subset="equal_steps"), "equal_steps")
    for place, (own, score) in forms.items():
        for row in leaderboard.compared(own, score, pooled=board.pooled).found.itertuples():
            yield Shown(place, str(row.a), leaderboard.HOST, sign(row.difference, row.p))
    for _, dataset in runs.groupby(runs["setting"].str.partition(",")[0]):
        pairs = {}
        for setting, own in dataset.groupby("setting"):
            scores = own.pivot(index="seed", columns="method", values=board.score).dropna(axis=1)
            tested = board.pooled and len(scores) >= leaderboard.SEEDS
            margin = design.margin_over([str(setting)]) if tested else 0.0
            for method in scores.columns.drop(leaderboard.HOST):
                found = (scores[method] - scores[leaderboard.HOST]).to_numpy()
                place = (str(setting), str(method), leaderboard.HOST)
                pairs[place] = statistics.beyond(found, margin)
        yield from of_one_table(pairs)


def of_search(stem: str) -> Iterator[Shown]:
    """helps-confirm and helps-compute."""
    runs = pd.read_csv(RESULTS / f"{stem}.csv")
    if stem == "helps-confirm":
        for method, row in helps.compared(runs).iterrows():
            for place, gain, p in (
                ("tuned", "gain", "p"),
                ("same rate", "gain_at_rate", "p_at_rate"),
            ):
                yield Shown(place, str(method), helps.HOST, sign(row[gain], row[p]))
        return
    blocks = runs.pivot(index="seed", columns="case", values="accuracy")
    settings = dict.fromkeys(case.partition(": ")[0] for case in blocks)
    yield from of_one_table(
        {
            (f"{setting}: {told}", a, b): (
                blocks[f"{setting}: {a}"] - blocks[f"{setting}: {b}"]
            ).to_numpy()
            for setting in settings
            for told, (a, b) in helps.COMPUTE.items()
        }
    )


def of_reproduction(stem: str) -> Iterator[Shown]:
    """Directions are computed from the differences, whatever the file says of them."""
    paper = find(stem.replace("-", "/", 1))
    lines, hosts = read_csv(RESULTS / f"{stem}.csv", paper), paper.hosts
    places = [f"{line['scale']}: {line['setting']}: {line['measure']}" for line in lines]
    printed = {
        (place, line["method"]): line["paper"] for place, line in zip(places, lines, strict=True)
    }
    for place, line in zip(places, lines, strict=True):
        a, above, b = line["method"].partition(" above ")
        theirs = 1.0
        if not above:
            b = hosts.get(a, "")
            if (place, b) not in printed:
                continue
            theirs = np.sign(float(line["paper"]) - float(printed[place, b]))
        signs = {SAME: int(theirs), OPPOSITE: -int(theirs), NOT_SHOWN: 0}
        yield Shown(place, a, b, signs.get(line["direction"]))


def of_figures(table: Any) -> Iterator[Shown]:
    """A table of docs/figures: each row with each other one, in the columns of accuracies."""
    measured = table.read()["figures"]
    cells = [cell for cell in table.cells if cell.value.startswith("acc_")]
    numbers = {
        cell: np.array(measured[cell.key], float)
        for cell in cells
        if None not in measured[cell.key]
    }
    yield from of_one_table(
        {
            (a.column, a.row, b.row): numbers[a] - numbers[b]
            for a, b in combinations(numbers, 2)
            if a.column == b.column
        }
    )


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Shown]]:
    """What a file shows, by the name that markers have for it."""
    monkeypatch.syspath_prepend(SCRIPT)
    tables = importlib.import_module("tables").tables(ROOT)

    @cache
    def of(file: str) -> list[Shown]:
        if file.startswith("figures/"):
            return [*of_figures(tables[file.removeprefix("figures/")])]
        if file in leaderboard.BOARDS:
            return [*of_board(file)]
        return [*(of_search if file.startswith("helps-") else of_reproduction)(file)]

    return of


def problem(marker: str, shown: Callable[[str], list[Shown]]) -> str | None:
    """What is wrong with a claim, or None."""
    file, place, claim, *count = " ".join(marker.split()).split("; ")
    a, symbol, b = re.fullmatch(r"(.+) ([<>=?]) (.+)", claim).groups()  # type: ignore[union-attr]
    found = []
    for row in shown(file):
        names, turned = (row.a, row.b), row.sign and -row.sign
        for (one, other), value in ((names, row.sign), (names[::-1], turned)):
            if all(map(fnmatchcase, (row.place, one, other), (place, a, b))):
                found.append(value)
                break
    holds = found.count(SIGNS[symbol])
    said = count[0] if count else f"{max(1, len(found))} of {max(1, len(found))}"
    actual = f"{holds} of {len(found)}"
    return None if said == actual else f"{marker}: it holds for {actual}"


def claims(text: str) -> Iterator[tuple[str, str]]:
    """The sentences that claim something, with the markers behind them."""
    plain = EXEMPT.sub(" ", NAMES.sub(" ", text))
    for block in re.split(r"\n\s*\n|\n(?=[|\-*] )", plain):
        for sentence, markers in SENTENCE.findall(" ".join(block.split())):
            if AHEAD.search(sentence) or BEHIND.search(sentence):
                yield sentence, markers


def unmarked(text: str) -> list[str]:
    """The sentences that claim something without a marker that says the same."""
    found = []
    for sentence, markers in claims(text):
        symbols = set(re.findall(r" ([<>=?]) ", markers))
        ahead = not AHEAD.search(sentence) or ">" in symbols
        behind = not BEHIND.search(sentence) or "<" in symbols
        if not ((ahead and behind) or symbols & {"=", "?"} or "<!-- cited -->" in markers):
            found.append(sentence)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_claims_is_shown(page: Path, shown: Callable[[str], list[Shown]]) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?m)^ *(?:<!--\s+(?:shown|cited)|> .*-->).*", text)
    markers = MARKER.findall(text)
    assert not [wrong for marker in markers if (wrong := problem(marker, shown))]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_claims_is_marked(page: Path) -> None:
    assert not unmarked(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("marker", "holds"),
    [
        ("leaderboard; all; SGDM > FedAvg", True),
        ("leaderboard; all; FedAvg < SGDM", True),
        ("leaderboard; all; SGDM < FedAvg", False),
        ("leaderboard; all; FedNorm = FedAvg", True),
        ("leaderboard; all; FedNorm > FedAvg", False),
        ("leaderboard; all; FedNrom = FedAvg", False),
        ("figures/feddyn; round *; FedDyn, `alpha=.1` ? FedAvg", True),
    ],
)
def test_a_claim_is_told_from_its_opposite(
    marker: str, holds: bool, shown: Callable[[str], list[Shown]]
) -> None:
    assert (problem(marker, shown) is None) == holds


def test_a_marker_has_the_direction_of_its_sentence() -> None:
    marker = "<!-- shown: leaderboard; all; SGDM > FedAvg -->"
    assert not unmarked(f"SGDM is ahead of it. {marker} It has momentum.")
    assert unmarked(f"SGDM is behind it. {marker}") == ["SGDM is behind it."]
    assert unmarked(f"SGDM is ahead. It has\nmomentum. {marker}") == ["SGDM is ahead."]
    assert not unmarked("In the paper it is better. <!-- cited -->")
