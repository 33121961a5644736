"""Commands: the first word of a command line decides what happens."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import types
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fedhet import __main__ as main
from fedhet.__main__ import COMMANDS
from fedhet.runs.config import Config

pytestmark = pytest.mark.usefixtures("own_process")
ROOT = Path(__file__).parents[2]


def test_every_command_names_a_main_function() -> None:
    for module, _ in COMMANDS.values():
        assert callable(import_module(module).main)


def test_a_command_gets_its_own_arguments_and_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, jobs: list[Config]
) -> None:
    calls: list[list[str]] = []

    def report(argv: Sequence[str]) -> int:
        calls.append(list(argv))
        return 7

    module = types.ModuleType("fedhet_report")
    module.main = report  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fedhet_report", module)
    monkeypatch.setitem(COMMANDS, "report", ("fedhet_report", "a report"))
    assert main.main(["report", "--all", "seed=3"]) == 7
    assert calls == [["--all", "seed=3"]]
    assert jobs == []


def test_data_takes_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["data", "describe", "partition.clients=3", "--out", "figures"]) == 0
    assert "3 clients" in capsys.readouterr().out
    assert main.main(["data", "describe", "partition.clients=0"]) == 2
    assert "partition.clients=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("dat", "(did you mean data?)"),
        ("fedavg", "(did you mean method=fedavg?)"),
        ("fedprox", "(did you mean method=fedprox or plugin=fedprox?)"),
        ("scafold", "(did you mean method=scaffold?)"),
        ("zzz", "key=value; commands: data"),
    ],
)
def test_an_unknown_word_is_reported_with_the_closest_match(
    jobs: list[Config], capsys: pytest.CaptureFixture[str], word: str, hint: str
) -> None:
    assert main.main([word, "seed=1"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {word!r} ")
    assert hint in printed.err
    assert "commands: data" in printed.err
    assert (printed.out, jobs) == ("", [])


def test_an_unknown_word_imports_neither_torch_nor_hydra() -> None:
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fedhet", "dat"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert process.returncode == 2
    assert not {"torch", "flwr", "numpy", "hydra", "fedhet.runs.data_commands"} & imported


@pytest.mark.parametrize("argv", [["seed=1", "data"], ["~seed"]])
def test_only_the_first_word_can_be_a_command(
    jobs: list[Config], capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main.main(argv) == 2
    assert "command" not in capsys.readouterr().err
    assert jobs == []


def test_the_console_script_is_python_m_fedhet() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (script,) = project["scripts"].items()
    assert script[0] == "fedhet"
    assert EntryPoint(*script, "console_scripts").load() is main.main
