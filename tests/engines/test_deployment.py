"""A SuperLink and SuperNodes as real processes, with TLS and node keys.

scripts/local_deployment.sh starts and ends them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import fedhet

pytestmark = pytest.mark.deployment
SCRIPT = Path(__file__).parents[2] / "scripts" / "local_deployment.sh"
SECONDS = 600  # on a busy machine; a quiet one needs a tenth
# Client state and partial participation: three of four clients in each round, on three nodes, so
# that one can get two messages.
OVERRIDES = [
    "method=scaffold",
    "plugin=[fednorm]",
    "partition.clients=4",
    "fraction=.75",
    "rounds=2",
    "eval.clients=false",
    "seed=2",
]
FEDLEX = [
    "method=fedlex",
    "plugin.fedlex.c_exp=2",
    "plugin.fedlex.e_exp=2",
    "fraction=.3",
    "rounds=2",
    "eval.clients=false",
    "seed=2",
]


@contextmanager
def deployment(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The script, in a folder whose name needs quoting, with its work folder in `home`.

    At the end no process that it started is running.
    """
    here = home / "a folder, with 'quotes'"
    here.mkdir()
    environment = os.environ | {
        "TMPDIR": str(home),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    environment.pop("VIRTUAL_ENV", None)
    process = subprocess.Popen(
        [str(SCRIPT), *arguments],
        cwd=here,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.terminate()  # if the test has failed; the script then ends the rest
    assert started_below(home) == []
    assert [path.name for path in home.iterdir()] == [here.name]  # the keys are gone, too


def started_below(home: Path) -> list[str]:
    """The command lines of processes whose FLWR_HOME is below `home`.

    All processes that the script starts inherit such a FLWR_HOME.
    """
    lines = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME", "").startswith(str(home)):
                lines.append(" ".join(process.cmdline()))
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return lines


def run_folder(output: str) -> Path:
    """The folder that the last line of the script's output names."""
    return Path(output.splitlines()[-1].removeprefix("run folder: "))


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [OVERRIDES, pytest.param(FEDLEX, marks=pytest.mark.matrix)],
    ids=["scaffold-fednorm", "fedlex"],
)
def test_three_nodes_give_the_bytes_of_the_in_process_engine(
    tmp_path: Path, overrides: list[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with deployment(home, *overrides, "hydra.run.dir=../../run") as process:
        output, log = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, log
    assert run_folder(output) == tmp_path / "run"
    summary = read(tmp_path / "run")
    expected = fedhet.run([*overrides, f"hydra.run.dir={tmp_path / 'expected'}"]).summary
    assert summary["status"] == "ok"
    for key in ("weights_sha256", "accuracy", "loss", "bytes"):
        assert summary[key] == expected[key], key
    rows = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    *_, first, second = (set(json.loads(row)["cohort"]) for row in rows)
    assert first & second  # a state was read again, in a new process on the same node


@pytest.mark.matrix
def test_a_setting_that_the_server_app_refuses_is_reported(tmp_path: Path) -> None:
    with deployment(tmp_path, "--nodes", "1", "method=scaffold", "client.momentum=.9") as process:
        output, log = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "client.momentum=0.9: method=scaffold " in log.splitlines()[-1]
    assert output == ""  # no run folder


@pytest.mark.matrix
def test_an_interrupted_run_leaves_its_folder_and_no_process(tmp_path: Path) -> None:
    with deployment(tmp_path, "--nodes", "1", "method=fedavg", "hydra.run.dir=run") as process:
        assert process.stderr
        # Wait until the server app is working.
        assert any("fedhet: run folder" in line for line in process.stderr)
        assert started_below(tmp_path)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert read(run_folder(output))["status"] == "interrupted"
