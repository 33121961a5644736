"""What people write first, and what they are told to write instead."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from composing import check_overrides

import fedhet
from fedhet import __main__ as main
from fedhet.core.errors import ConfigError
from fedhet.data.toy import toy_task
from fedhet.runs.config import compose
from fedhet.runs.config.lines import refuse_blanks
from fedhet.study.progress import Progress


@pytest.mark.parametrize("given", ["method=fedavg", {"method": "fedavg"}, [1], None])
def test_overrides_are_a_list_of_texts(given: Any) -> None:
    with pytest.raises(ConfigError, match=rf"overrides .*list.*{re.escape(repr(given))}"):
        fedhet.run(given)


def test_a_setting_names_what_to_use_instead() -> None:
    for check in (check_overrides, fedhet.run):
        with pytest.raises(ConfigError, match="auto, cpu, cuda"):
            check(["method=fedprox", "device=gpu"])


def test_a_plug_in_that_is_named_again_acts_once() -> None:
    check_overrides(["method=fedprox,fedavg", "plugin=[fedprox]"], sweep=True)
    for line in ("plugin=[fedprox]", "plugin=[fedprox,fedprox]"):
        assert compose(["method=fedprox", line]).plugins == ("fedprox",)


@pytest.mark.parametrize(
    "words, told",
    [
        (["rounds = 5"], "'rounds = 5': .* rounds=5"),
        (["rounds", "=", "5"], "'rounds = 5': "),
        (["seed=1", "rounds=", "5"], "'rounds= 5': "),
        (["seed=1", "client.lr", "=.5"], "client.lr=.5"),
        (["method=fedavg", "seed=1", "method=fednorm"], "method=fedavg .*method=fednorm"),
        (["-m", "seed=1", "+seed=2,3"], r"seed .*\bseed=1 .*\+seed=2,3"),
    ],
)
def test_what_is_written_in_too_many_words(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words) == 2
    assert re.search(told, capsys.readouterr().err)


def test_blanks_that_are_part_of_a_value() -> None:
    lines = ["report.notes=['a = b, c']", "tracker=mlflow", "tracker.group=''"]
    refuse_blanks([*lines, "client.lr=", "seed=1"])  # an empty text is a value
    check_overrides(lines)


def test_the_commands_of_a_deployment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init = ["deploy", "init", "--sites", "a", "--out", str(tmp_path / "out")]
    assert main.main([*init, "--server", "host.example.org:9092"]) == 2
    told = capsys.readouterr().err
    assert (
        "--server 'host.example.org:9092'" in told and "without scheme (https://) and port" in told
    )
    assert main.main(["deploy", "check", str(tmp_path / "gone")]) == 2
    assert f"{tmp_path / 'gone'} " in capsys.readouterr().err
    assert main.main(["deploy", "check", str(tmp_path)]) == 2
    assert re.search(r"site\.toml.*server\.toml", capsys.readouterr().err)


def test_a_regression_has_no_labels(launch: Callable[..., Any]) -> None:
    run = launch("method=fedavg", "rounds=1", task=toy_task(2))
    run.plot("labels")
    (run.dir / "partition.json").write_text(
        '{"name": "task", "clients": 2}'
    )  # as a regression's, which counts nothing
    run.summary["target"] = "number"
    with pytest.raises(ConfigError, match="figure=labels"):
        run.plot("labels")


def test_what_is_wrong_is_told_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    """And `--list` refuses what it would ignore."""
    commands = [["--list", "method"], ["partition.alpha=-1"], ["report", str(tmp_path)]]
    code = (
        "import sys; from fedhet import __main__ as main;"
        f"print([main.main(argv) for argv in {commands}]);"
        "print([name for name in ('torch', 'pandas', 'matplotlib') if name in sys.modules])"
    )
    here = Path(fedhet.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[2, 2, 2]\n[]\n"
    first, second, third = done.stderr.splitlines()
    assert "--list method: " in first
    assert re.search(r"partition\.alpha=-1 .* > 0", second)
    assert "runs" in third


@pytest.mark.usefixtures("own_process")
def test_ctrl_c_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(progress: Progress) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "run", stopped)
    assert main.main(["experiment=first_look", "hydra/launcher=basic"]) == 130
    told = [line for line in capsys.readouterr().err.splitlines() if "interrupted" in line]
    assert told == ["interrupted"]
