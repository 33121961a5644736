"""The ways in which fedhet is used, once each with real processes.

The fixtures do the work, which takes more processor time than one test may. The full matrix is in
tests/engines, tests/deploy and tests/experiment, marked `slow` or `matrix`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from engines.real_sites import Sites, summary, wait_for

import fedhet
from fedhet.testing import check_equal

# A client state, extras in both directions, and not all clients in each round.
SMALL = [
    "method=scaffold",
    "plugin=[fednorm]",
    "partition.clients=4",
    "fraction=.5",
    "rounds=3",
    "eval.every=3",
    "client.epochs=1",
    "model.hidden=[8]",
    "figures=false",
]
FEDHET = [sys.executable, "-m", "fedhet"]
TWO = """# @package _global_
figures: false
model: {hidden: [8]}
client: {epochs: 1}
partition: {clients: 3}
rounds: 2
axes:
  method: {FedAvg: method=fedavg, FedSGD: method=fedsgd}
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> fedhet.Run:
    """The run in this process, which all others must reproduce."""
    folder = tmp_path_factory.mktemp("here") / "run"
    return fedhet.run([*SMALL, f"hydra.run.dir={folder}"])


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in ("status", "weights_sha256", "accuracy", "loss", "phases", "bytes"):
        assert one[key] == other[key], key


@pytest.fixture(scope="module")
def through_flwr_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("flwr") / "a folder, with 'quotes'"
    lines = ["engine=flwr", "engine.workers=2", f'hydra.run.dir="{folder}"']
    return fedhet.run([*SMALL, *lines]).summary


def test_flwr_run_gives_the_same_bytes(here: fedhet.Run, through_flwr_run: dict[str, Any]) -> None:
    equal(through_flwr_run, here.summary)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A SuperLink, and one SuperNode of `deploy node`, which hosts all four clients.

    The end is seen in the run folder: each of Flower's commands takes two seconds of its own.
    """
    home = tmp_path_factory.mktemp("deployed")
    sites = Sites(home, 1, warm=True)
    try:
        sites.start_link()
        sites.start_node(0)
        sites.submit(*SMALL, f"hydra.run.dir={home / 'run'}")
        wait_for(lambda: (home / "run" / "model.safetensors").exists(), "the end of the run")
        wait_for(lambda: summary(home / "run")["status"] != "interrupted", "its record")
    finally:
        sites.__exit__()
    return summary(home / "run")


def test_a_supernode_gives_the_same_bytes(here: fedhet.Run, deployed: dict[str, Any]) -> None:
    equal(deployed, here.summary)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed by SIGKILL after its second round or later."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    lines = [*SMALL, "engine.workers=2", "checkpoint.every=0", f"hydra.run.dir={folder}"]
    process = subprocess.Popen([*FEDHET, *lines], stderr=subprocess.DEVNULL)
    rounds = folder / "rounds.jsonl"
    deadline = time.monotonic() + 300
    while not rounds.exists() or rounds.read_bytes().count(b"\n") < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return folder


def test_a_killed_run_goes_on_to_the_same_end(here: fedhet.Run, killed: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedhet.runs.record.figures.draw", lambda *args: [])
        run = fedhet.run([f"resume={killed}"])
    check_equal(here, run, "killed", ignored=["config.yaml"])


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """An experiment from the command line, in a folder of its own."""
    home = tmp_path_factory.mktemp("compared")
    (home / "conf" / "experiment").mkdir(parents=True)
    (home / "conf" / "experiment" / "two.yaml").write_text(TWO)
    command = [*FEDHET, f"--config-dir={home / 'conf'}", "experiment=two"]
    return subprocess.run(command, cwd=home, capture_output=True, text=True, check=True)


def test_an_experiment_ends_with_its_page(
    compared: subprocess.CompletedProcess[str],
) -> None:
    folder = Path(compared.stdout.splitlines()[-1].removeprefix("run folder: "))
    assert "experiment two: 2 of 2 runs are complete" in compared.stdout
    page = (folder / "report" / "index.html").read_text()
    assert "FedAvg" in page and "FedSGD" in page
    runs = fedhet.results(folder).runs
    assert list(runs["status"]) == ["finished", "finished"]
    done = [json.loads(path.read_text()) for path in folder.glob("cells/*/summary.json")]
    assert {one["weights_sha256"] for one in done} == set(runs["weights_sha256"])
