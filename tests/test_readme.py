"""The README's code runs as printed, and its commands name what exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

import fedhet
from fedhet import config
from fedhet.data.toy import toy_task

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_printed_method_is_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(block for block in blocks("python") if "class FedMedian(" in block)
    (tmp_path / "printed_median.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDHET_TRUST", "printed_median")
    chosen = [
        "method=fedavg",
        "method._target_=printed_median.FedMedian",
        "plugin=[fedprox]",
        "rounds=2",
    ]
    one = fedhet.run([*chosen, f"hydra.run.dir={tmp_path}/one"], task=toy_task(1))
    plain = fedhet.run(
        ["method=fedprox", "rounds=2", f"hydra.run.dir={tmp_path}/plain"], task=toy_task(1)
    )
    assert (
        one.summary["weights_sha256"] == plain.summary["weights_sha256"]
    )  # the median of one client is its weights
    three = fedhet.run([*chosen, f"hydra.run.dir={tmp_path}/three"], task=toy_task(3))
    mean = fedhet.run(
        ["method=fedprox", "rounds=2", f"hydra.run.dir={tmp_path}/mean"], task=toy_task(3)
    )
    assert three.summary["weights_sha256"] != mean.summary["weights_sha256"]


def test_the_printed_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for program in (block for block in blocks("python") if block.startswith("import")):
        names: dict[str, object] = {}
        exec(compile(program, "README.md", "exec"), names)
        run = names["run"]
        assert isinstance(run, fedhet.Run)
        assert run.summary["status"] == "ok"
    assert {path.stem for path in tmp_path.rglob("figures/*.png")} == {"accuracy", "labels"}


@pytest.mark.parametrize("block", blocks("bash"))
def test_the_printed_commands_are_shell(block: str) -> None:
    assert (
        subprocess.run(
            ["bash", "-n"], input=block, text=True, capture_output=True, check=False
        ).stderr
        == ""
    )


def commands() -> list[list[str]]:
    lines = [
        line.partition("  #")[0]
        for block in blocks("bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    found = [shlex.split(line)[3:] for line in lines if line.startswith("python -m fedhet ")]
    for line in lines:
        if found_overrides := re.search(r"overrides='([^']*)'", line):
            found.append(shlex.split(found_overrides[1]))
    return [each for each in found if not any(word.startswith("--") for word in each)]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_printed_commands_are_accepted(words: list[str]) -> None:
    assert config.check([word for word in words if word != "-m"], sweep="-m" in words) is not None


def test_the_tables_of_methods_are_whole() -> None:
    from fedhet.config import catalogue

    for method in catalogue.choices("method"):
        assert f"`{method}`" in README, method
    for plugin in catalogue.choices("plugin"):
        assert f"`plugin=[{plugin}]`" in README, plugin


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
