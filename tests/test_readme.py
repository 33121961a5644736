"""The code of the first pages runs as printed, and their commands name what exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from composing import check_overrides

import fedhet
from fedhet import __main__ as main
from fedhet.data.toy import toy_task
from fedhet.runs import config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
START, RUNNING, PYTHON = (
    (ROOT / f"docs/{name}.md").read_text() for name in ("start", "running", "python")
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str, *pages: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", "\n".join(pages), re.DOTALL)


def test_the_printed_method_is_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(block for block in blocks("python", START) if "class FedMedian(" in block)
    (tmp_path / "printed_median.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDHET_TRUST", "printed_median")
    median = [
        "method=fedavg",
        "method._target_=printed_median.FedMedian",
        "plugin=[fedprox]",
    ]

    def weights(name: str, overrides: list[str], clients: int) -> str:
        lines = [*overrides, "rounds=2", "figures=false", f"hydra.run.dir={tmp_path}/{name}"]
        return fedhet.run(lines, task=toy_task(clients)).summary["weights_sha256"]

    # The median of one client is its weights.
    assert weights("one", median, 1) == weights("plain", ["method=fedprox"], 1)
    assert weights("three", median, 3) != weights("mean", ["method=fedprox"], 3)


def test_a_step_by_hand_and_the_test_of_the_printed_method_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, method, test = blocks("python", START)
    exec(compile(step, "start.md", "exec"), {})
    assert capsys.readouterr().out.startswith("[3, 2, 1, 0] train 1")
    (tmp_path / "fedmedian.py").write_text(method)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {}
    exec(compile(test, "start.md", "exec"), names)
    names["test_the_median_is_taken_entry_by_entry"]()


@pytest.mark.slow
def test_the_printed_programs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for program in blocks("python", PYTHON):
        names: dict[str, object] = {}
        exec(compile(program, "README.md", "exec"), names)
        run = names["run"]
        assert isinstance(run, fedhet.Run)
        assert run.summary["status"] == "ok"
    assert {path.stem for path in tmp_path.rglob("figures/*.png")} == {"accuracy", "labels"}
    # The printed results have the same form; the numbers may differ on another machine.
    printed = [re.sub(r"\d+", "0", line) for line in capsys.readouterr().out.splitlines()]
    (results,) = blocks("text", PYTHON)
    assert all(re.sub(r"\d+", "0", line) in printed for line in results.splitlines())


def test_the_printed_commands_are_shell() -> None:
    for block in blocks("bash", README, RUNNING, START):
        process = subprocess.run(
            ["bash", "-n"], input=block, text=True, capture_output=True, check=False
        )
        assert process.stderr == "", block


def is_other(words: list[str]) -> bool:
    """Whether these arguments of `python -m fedhet` start no run."""
    is_command = bool(words) and words[0] in main.commands()
    return is_command or any(word.startswith("--") for word in words)


def commands() -> list[list[str]]:
    """The overrides of every printed run, as words."""
    text = "\n".join(blocks("bash", README, RUNNING)).replace("\\\n", " ")
    lines = [line.partition("  #")[0] for line in text.splitlines()]
    runs = [shlex.split(line)[3:] for line in lines if line.startswith("python -m fedhet ")]
    for line in lines:
        if overrides := re.search(r"overrides='([^']*)'", line):
            runs.append(shlex.split(overrides[1]))
    return [words for words in runs if not is_other(words)]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_printed_commands_are_accepted(words: list[str], tmp_path: Path) -> None:
    if words and words[0].startswith("resume="):
        (tmp_path / "overrides.yaml").write_text("[]\n")
        assert config.compose([f"resume={tmp_path}", *words[1:]]).resumes
        return
    overrides = [word for word in words if word != "-m"]
    assert check_overrides(overrides, sweep="-m" in words)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them; of equal ones only the first."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    lost = []
    for page in PAGES:
        for target, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]+))?\)", page.read_text()):
            if target.startswith("https://"):
                continue
            path = page.parent / target if target else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                lost.append(f"{page.name}: {target}#{anchor}")
    assert not lost
