"""The options that start no run: help, list, version, configuration."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from fedhet import __main__ as main
from fedhet.runs.cli.help import help_text, options_text
from fedhet.runs.config import Config, catalogue

pytestmark = pytest.mark.usefixtures("own_process")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("argv", [["--zzz"], ["--cfg"], ["--config-dir"], ["--cfg", "zzz"]])
def test_unknown_options(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(argv) == 2
    assert capsys.readouterr().err.endswith("see python -m fedhet --help\n")


def test_hydra_prints_the_configuration_at_any_position_of_the_option(
    jobs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (["--cfg", "job", "seed=3"], ["seed=3", "-c", "job"]):
        assert main.main(argv) == 0
        assert "\nseed: 3\n" in capsys.readouterr().out
    assert jobs == []


def test_one_configuration_is_shown_not_those_of_a_sweep(
    jobs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (["-m", "--cfg", "job", "seed=0,1"], ["experiment=first_look", "-m", "-c", "job"]):
        assert main.main(argv) == 2
        assert "with -m: " in capsys.readouterr().err
    assert jobs == []


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert catalogue.ONE_METHOD in " ".join(out.split())
    lines = [line.split() for line in out.splitlines()]
    assert list(catalogue.choices("plugin")) in lines
    assert ["fedavg", *["+"] * 8] in lines
    assert ["fednorm", *"++++=+++"] in lines
    assert ["feddiskab", *"+-++++++"] in lines
    assert "scaffold + fedlex method=scaffold refuses plugin 'fedlex'" in " ".join(out.split())
    assert all(any(line[:1] == [name] for line in lines) for name in catalogue.choices("method"))


@pytest.mark.parametrize("option", ["--help", "--list"])
def test_help_imports_neither_torch_nor_hydra(option: str) -> None:
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fedhet", option],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
    )
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "fedhet.runs.cli.help" in imported
    assert not {"torch", "flwr", "numpy", "hydra"} & imported


def test_help_names_every_choice_command_and_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    out = capsys.readouterr().out
    words = set(out.replace("*", "").split())
    for group, choices in catalogue.groups().items():
        assert {group, *(catalogue.shown(group) if group == "experiment" else choices)} <= words
    for name, (_, line) in main.commands().items():
        assert f" {name} {line}" in " ".join(out.split())
    for key in (
        "seed=0",
        "rounds=20",
        "fraction=1.0",
        "client.lr=0.2",
        "partition.alpha=0.3",
        "engine.workers=1",
        "eval.every=1",
    ):
        assert key in words
    assert "*fednorm" in out
    assert "flwr run ." in out
    assert max(map(len, out.splitlines())) <= 100


def test_experiments_that_only_fedhet_needs_are_not_offered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["--help", "experiment=smoke"]) == 0  # but still explained
    capsys.readouterr()
    assert main.main(["experiment=smoky"]) == 2
    for text in (help_text(main.COMMANDS), options_text(["experiment"]), capsys.readouterr().err):
        words = set(text.replace(",", " ").split())
        assert {"first_look", "digits", "leaderboard", "peers/flamby"} <= words
        assert not {"design", "smoke", "helps/search"} & words


@pytest.mark.parametrize("words", [[name] for name in main.commands()] + [["data", "declare"]])
def test_the_usage_is_what_was_typed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main([*words, "--help"])
    usage = capsys.readouterr().out.removeprefix("usage: ")
    assert usage.startswith(f"python -m fedhet {' '.join(words)} ")


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    versions = {"fedhet": "1.2.3"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError
        return versions[name]

    monkeypatch.setattr(main, "version", version)
    assert main.main(["--version"]) == 0
    versions.clear()
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == "fedhet 1.2.3\nfedhet, not installed\n"
