"""Launchers for several machines, tried on this one, and which of them a configuration may name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedhet
from fedhet import __main__ as main
from fedhet.runs import config
from fedhet.runs.config import catalogue

ROOT = Path(__file__).parents[2]


def test_the_launchers_are_no_group_of_a_run() -> None:
    assert "hydra" not in catalogue.groups()
    settings = config.compose(["hydra/launcher=processes", "seed=3"])
    assert "hydra" not in settings.cfg
    assert "hydra/launcher" not in settings.choices


@pytest.mark.parametrize(
    "line",
    [
        "hydra.launcher._target_=fedhet.study.executors.Processes",
        "hydra.sweeper._target_=hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "+hydra.launcher.inner._target_=fedhet.study.executors.Processes",
        "hydra.launcher='${hydra.sweep}'",
    ],
)
def test_others_are_refused(line: str) -> None:
    with pytest.raises(fedhet.ConfigError, match=r"(trusted|allowed)"):
        config.compose([line])


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("num_cpus=0", "hydra.launcher.num_cpus=0"),
        pytest.param("num_gpus=-1", "hydra.launcher.num_gpus=-1", marks=pytest.mark.slow),
        (
            "address=localhost",
            "hydra.launcher.address=localhost: it must be auto, or <host>:<port>",
        ),
    ],
)
def test_wrong_settings_of_ray(
    setting: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["-m", "hydra/launcher=ray", f"hydra.launcher.{setting}", "seed=0,1"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {reason}")


def sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedhet", "-m", "seed=0,1", "rounds=2", *overrides]
    return subprocess.run(
        [*command, f"hydra.sweep.dir={folder}"], cwd=ROOT, capture_output=True, text=True
    )


def digests(folder: Path) -> list[str]:
    """The digests of the weights of the runs below a folder."""
    files = sorted(folder.glob("*/summary.json"))
    return [json.loads(file.read_text())["weights_sha256"] for file in files]


@pytest.fixture
def expected(launch: Callable[..., Any]) -> list[str]:
    runs = (launch("method=fednorm", f"seed={seed}", "rounds=2") for seed in (0, 1))
    return [run.summary["weights_sha256"] for run in runs]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sweep"


@pytest.mark.matrix
def test_runs_on_ray(folder: Path, expected: list[str]) -> None:
    failing = ("dataset=digits,mnist", "data_dir=/nowhere")
    done = sweep(folder, "hydra/launcher=ray", "hydra.launcher.address=null", *failing)
    assert done.returncode == 1
    assert digests(folder) == expected
    told = f"to compare the runs: python -m fedhet report {folder}"
    assert done.stdout == f"run folder: {folder}\n{told}\n"
    assert done.stderr.count(": failed: data not found") == 2
    assert "train 2, acc_global" in next(folder.glob("*digits*/log.txt")).read_text()


@pytest.mark.matrix
def test_runs_through_submitit(folder: Path, expected: list[str]) -> None:
    """Its local executor stands for Slurm, which is not tested."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    assert sweep(folder, "hydra/launcher=submitit_local").returncode == 0
    assert digests(folder) == expected


def test_slurm_is_trusted() -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    slurm = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu"]
    assert config.compose([*slurm, "hydra.sweep.dir=here"]).cfg.seed == 0
