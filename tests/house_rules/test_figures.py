"""Every measured figure on a page stands in a table that `make figures` measures and compares."""

from __future__ import annotations

import importlib
import math
import re
import runpy
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from statistics import mean, stdev
from types import ModuleType

import pytest
from house_rules.source import ROOT, name

from fedhet.data.toy import toy_task
from fedhet.runs import config
from fedhet.runs.config import components
from fedhet.runs.job import Job

SCRIPT = ROOT / "scripts" / "figures"
TABLE = """\
title: Accuracy on the toy
runs: experiment=smoke client.lr=.1
seeds: 2
columns:
  round 1: acc_global@1
  round 2: acc_global@2
  bytes: bytes/up
  own: acc_personal_mean@2
rows:
  FedAvg: method=fedavg
  Ditto: method=ditto
"""
PAGE = "Some text.\n\n<!-- figures: tiny -->\n<!-- end figures -->\n\nMore.\n"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT)
    for variable in (components.SEARCH_PATH, components.TRUST):  # `find_components` sets them
        monkeypatch.setenv(variable, "")
    return importlib.import_module("tables")


@pytest.fixture
def figures(tables: ModuleType) -> Callable[..., int]:
    """`main` of the script, which takes the arguments and the repository's root."""
    main: Callable[..., int] = runpy.run_path(str(SCRIPT / "__main__.py"))["main"]
    return main


def test_pages_show_what_was_measured(tables: ModuleType) -> None:
    assert tables.problems(ROOT) == []


def test_our_means_are_those_of_independent_loops(tables: ModuleType) -> None:
    """Two may differ by two standard errors of their difference, and by what was rounded."""
    table = tables.tables(ROOT)["independent"]
    ours = table.read()["figures"]
    for cell in table.cells:
        values, reference = ours[cell.key], table.reference[cell.row]
        printed = reference[cell.column]
        error = stdev(values) * math.sqrt(1 / len(values) + 1 / reference["seeds"])
        allowed = 2 * error + 0.5 * 10 ** -len(printed.partition(".")[2])
        assert abs(mean(values) - float(printed)) <= allowed, cell.key


@pytest.mark.parametrize("name", ["fedsgd", pytest.param("*", marks=pytest.mark.slow)])
def test_the_runs_of_every_table_compose(tables: ModuleType, name: str) -> None:
    tables.find_components()
    chosen = [table for table in tables.tables(ROOT).values() if fnmatch(table.name, name)]
    runs = {cell.overrides for table in chosen for cell in table.cells}
    assert runs
    for overrides in sorted(runs):
        assert Job(config.compose(list(overrides)), toy_task()).strategy.name


@pytest.mark.slow
def test_what_pages_print_can_be_measured_again(
    figures: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    readme = tmp_path / "README.md"
    readme.write_text(PAGE)
    definition = tmp_path / "docs" / "figures" / "tiny.yaml"
    definition.write_text(TABLE)

    assert figures(["tiny"], tmp_path) == 1
    assert "FedAvg, round 1: printed -, now ." in capsys.readouterr().out
    assert figures(["--write"], tmp_path) == 0
    assert "README.md" not in capsys.readouterr().out
    printed = readme.read_text()
    assert printed.startswith("Some text.\n\n<!-- figures: tiny -->\nAccuracy on the toy:\n\n| |")
    assert printed.endswith("<!-- end figures -->\n\nMore.\n")
    assert "`make figures ONLY=tiny`" in printed
    (fedavg,) = re.findall(r"(?m)^\| FedAvg \| (.*) \|$", printed)
    accuracy = r"\.\d{3} \(\.\d{3}\)"
    assert re.fullmatch(rf"{accuracy} \| {accuracy} \| [\d.]+ \(.000\) \| ", fedavg)

    assert figures([], tmp_path) == 0
    out = capsys.readouterr().out
    assert "differs" not in out and "Ditto, own: printed" in out

    first = fedavg.partition(" ")[0]
    readme.write_text(printed.replace(first, ".999"))
    assert figures(["tiny"], tmp_path) == 1
    assert "README.md: the block 'tiny' differs from the measurements" in capsys.readouterr().out

    readme.write_text(printed)
    stored = definition.with_suffix(".json")
    text = re.sub(r"(acc_global@1\": )\[.*?\]", r"\1[0.5, 0.5]", stored.read_text(), count=1)
    stored.write_text(text)
    assert figures(["tiny"], tmp_path) == 1
    assert f"FedAvg, round 1: printed .500 (.000), now {first}" in capsys.readouterr().out

    definition.write_text(TABLE + "  Other: method=fedavg client.epochs=2\n")
    readme.write_text(PAGE.replace("tiny", "lost"))
    assert figures([], tmp_path) == 1
    out = capsys.readouterr().out
    assert "README.md: docs/figures/lost.yaml does not exist" in out
    assert "docs/figures/tiny.yaml: no page shows it" in out


def test_a_table_may_change_the_data_that_its_overrides_choose(tables: ModuleType) -> None:
    runs = ("partition=iid", "partition.clients=6", "rounds=1", "client.epochs=1")
    rows, _ = importlib.import_module("measure").run("inverted", runs, 0)
    assert rows[-1]["acc_global"] is not None


# What is no measured figure: the tables themselves, code, addresses.
EXEMPT = re.compile(
    r"<!-- figures: .*?<!-- end figures -->"
    r"|<!-- table: .*?<!-- end table -->"  # papers/tests/test_pages.py
    r"|```.*?```|`[^`]+`|\]\([^)]*\)|^    [^\n]*$",
    re.DOTALL | re.MULTILINE,
)
# An accuracy or another share, as tables print them: .87, 0.871.
FIGURE = re.compile(r"(?<![\w.])0?\.\d{2,}")


def pages() -> list[Path]:
    """All pages but those whose every table names its benchmark or its source."""
    docs = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.stem != "performance"]
    return [ROOT / "README.md", *docs]


def test_a_figure_is_told_from_a_setting() -> None:
    text = "`client.lr=.05` reaches .871 ([paper](https://arxiv.org/abs/2212.01197), section 4.25)"
    assert FIGURE.findall(EXEMPT.sub("", text)) == [".871"]


def test_measured_figures_stand_in_tables_only() -> None:
    """In prose they would go stale unnoticed; settings are told from figures by being code.

    They go into a table of `make figures` (CONTRIBUTING.md), and settings into backticks.
    """
    found = [
        f"{name(page)}: {line}"
        for page in pages()
        for line in EXEMPT.sub("", page.read_text(encoding="utf-8")).splitlines()
        if FIGURE.search(line)
    ]
    assert not found
