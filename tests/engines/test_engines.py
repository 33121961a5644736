"""One configuration has one result in every engine, also when a client or its process fails."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from composing import composed

import fedhet
from fedhet.data.toy import toy_task
from fedhet.engines.dispatch import run_job
from fedhet.runs.config import compose
from fedhet.runs.job import Job, begin

HERE = Path(__file__).parent
FEDAVG = ["method=fedavg", "rounds=3"]
# Client state, extras both ways, two kinds of weights, partial participation.
SCAFFOLD = ["method=scaffold", "plugin=[fednorm]", "fraction=.5", "rounds=3"]
RUNS = pytest.mark.parametrize("overrides", [FEDAVG, SCAFFOLD], ids=["fedavg", "scaffold-fednorm"])


def summary(folder: Path, *overrides: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        # Figures take a second of each run.
        patch.setattr("fedhet.runs.record.figures.draw", lambda *args: [])
        if any(line.startswith("engine=") for line in overrides):
            return fedhet.run([*overrides, f"hydra.run.dir={folder}"]).summary
        settings = replace(composed(*overrides), run_dir=str(folder), run_dir_given=True)
        return run_job(settings).summary


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    for key in ("weights_sha256", "accuracy", "loss", "phases", "partition", "bytes"):
        assert a[key] == b[key], key


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The in-process runs with one worker, which every other engine must reproduce."""
    home = tmp_path_factory.mktemp("reference")
    return {run[0]: summary(home / str(i), *run) for i, run in enumerate((FEDAVG, SCAFFOLD))}


@RUNS
def test_two_workers_give_the_same_bytes(
    tmp_path: Path, reference: dict[str, dict[str, Any]], overrides: list[str]
) -> None:
    same(summary(tmp_path / "run", *overrides, "engine.workers=2"), reference[overrides[0]])
    assert not multiprocessing.active_children()


def test_a_seed_repeats_and_another_does_not(
    tmp_path: Path, reference: dict[str, dict[str, Any]]
) -> None:
    same(summary(tmp_path / "a", *SCAFFOLD), reference[SCAFFOLD[0]])
    other = summary(tmp_path / "b", *SCAFFOLD, "seed=1")
    assert other["weights_sha256"] != reference[SCAFFOLD[0]]["weights_sha256"]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """FedAvg with the plug-in of faulty.py, which processes that are started here can import."""
    monkeypatch.setenv("FEDHET_TRUST", "faulty")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(HERE))
    return [
        "method=fedavg",
        "plugin=[fednorm]",
        "plugin.fednorm._target_=faulty.Faulty",
        "rounds=3",
        "client.epochs=1",
        "model.hidden=[8]",
    ]


CAUSES = {
    "raise": "OSError: the disk is full",
    "nonfinite": "NaN or infinite",
    "shape": "expected a float32 tensor of shape",
    "extra": "'fednorm.z' holds NaN or infinite values",
}


def failures(recorded: dict[str, Any]) -> list[tuple[int, int]]:
    """(round, client) of each failure."""
    return [(failure["round"], failure["pid"]) for failure in recorded["failures"]]


@pytest.mark.parametrize("how", CAUSES)
def test_a_failing_client_stops_the_run(tmp_path: Path, faulty: list[str], how: str) -> None:
    folder = tmp_path / "run"
    place = "client 3 failed .*phase 'train', step 2"
    with pytest.raises(fedhet.RunFailed, match=place) as caught:
        summary(folder, *faulty, f"plugin.fednorm.z_when={how}")
    assert CAUSES[how].removeprefix("expected a float32") in caught.value.reason
    recorded = json.loads((folder / "summary.json").read_text())
    assert recorded["status"] == "failed"
    assert recorded["reason"] == caught.value.reason
    assert failures(recorded) == [(2, 3)]
    (failure,) = recorded["failures"]
    assert (failure["phase"], failure["step"]) == ("train", 2)
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 1  # the round before is kept
    assert (folder / "model.safetensors").exists()


def test_a_failing_client_is_left_out_and_reported(tmp_path: Path, faulty: list[str]) -> None:
    """The bytes are the same however it failed."""
    hashes = {}
    for how in CAUSES:
        folder = tmp_path / how
        recorded = summary(folder, *faulty, f"plugin.fednorm.z_when={how}", "on_failure=skip")
        assert recorded["status"] == "ok", how
        assert failures(recorded) == [(2, 3)], how
        rows = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
        assert [len(row["failures"]) for row in rows] == [0, 1, 0], how
        hashes[how] = recorded["weights_sha256"]
    assert len(set(hashes.values())) == 1, hashes


def test_a_worker_process_that_dies_is_noticed_and_replaced(
    tmp_path: Path, faulty: list[str]
) -> None:
    dies = [*faulty, "plugin.fednorm.z_when=exit", "engine.workers=2"]
    cause = r"client 3 .*worker process died \(exit code 7\)"
    with pytest.raises(fedhet.RunFailed, match=cause):
        summary(tmp_path / "stop", *dies)
    died = summary(tmp_path / "skip", *dies, "on_failure=skip")
    raised = summary(tmp_path / "raise", *faulty, "plugin.fednorm.z_when=raise", "on_failure=skip")
    assert failures(died) == [(2, 3)]
    assert died["weights_sha256"] == raised["weights_sha256"]
    assert not multiprocessing.active_children()


LOSES = [
    "method=scaffold",
    "client.lr=.1",
    "plugin.fednorm.z_when=forgets",
    "on_lost_state=restart",
    "replies.max_lost=1",
]
ELSEWHERE = [
    ["engine.workers=2"],
    pytest.param(["engine=ray"], marks=pytest.mark.matrix),
    pytest.param(["engine=flwr", "engine.workers=2"], marks=pytest.mark.matrix),
]


@pytest.mark.parametrize("engine", ELSEWHERE, ids=lambda lines: lines[0])
def test_a_client_whose_state_is_lost_starts_afresh_in_every_engine(
    tmp_path: Path, faulty: list[str], engine: list[str]
) -> None:
    lines = [*faulty[1:], *LOSES]
    here, there = summary(tmp_path / "here", *lines), summary(tmp_path / "there", *lines, *engine)
    same(here, there)
    for recorded in (here, there):
        assert failures(recorded) == [(2, 3)]
        assert (recorded["rejected"], recorded["restarted"]) == ({"lost state": 1}, 1)
    rows = map(json.loads, (tmp_path / "there" / "rounds.jsonl").read_text().splitlines())
    assert [row["accepted"] for row in rows] == [10, 9, 10]


@pytest.mark.parametrize("engine", ELSEWHERE, ids=lambda lines: lines[0])
def test_a_first_step_is_taken_again_in_every_engine(
    tmp_path: Path, faulty: list[str], engine: list[str]
) -> None:
    """Client 3 is huge in it; the clients keep something, of which the second version counts."""
    lines = [*faulty, "method=scaffold", "plugin.fednorm.z_when=huge", "on_failure=skip"]
    here = summary(tmp_path / "here", *lines)
    there = summary(tmp_path / "there", *lines, *engine)
    assert failures(here) == failures(there) == [(1, 3)]
    same(here, there)


def descendants() -> list[str]:
    """The command lines of the processes that this one has started, directly or not."""
    children = psutil.Process().children(recursive=True)
    return [" ".join(c.cmdline()) for c in children if c.status() != psutil.STATUS_ZOMBIE]


# Phases before the training, masks down, a second slot, sample weights kept by the clients.
FEDLEX = [
    "method=fedlex",
    "plugin.fedlex.c_exp=3",
    "plugin.fedlex.e_exp=2",
    "client.lr=.05",
    "fraction=.5",
    "rounds=2",
]
FEDDISK = [
    "method=feddisk",
    "rounds=2",
    *(
        f"plugin.feddisk.{key}=2"
        for key in ("made_max_rounds", "local_max_epochs", "clf_max_epochs")
    ),
]


@pytest.mark.matrix
@pytest.mark.parametrize("overrides", [FEDLEX, FEDDISK], ids=["fedlex", "feddisk"])
def test_other_phases_give_the_same_bytes_under_ray(tmp_path: Path, overrides: list[str]) -> None:
    under_ray = summary(tmp_path / "ray", *overrides, "engine=ray")
    same(under_ray, summary(tmp_path / "local", *overrides))


@pytest.mark.matrix
@RUNS
def test_ray_gives_the_same_bytes(
    tmp_path: Path, reference: dict[str, dict[str, Any]], overrides: list[str]
) -> None:
    same(summary(tmp_path / "run", *overrides, "engine=ray"), reference[overrides[0]])


@pytest.mark.matrix
def test_a_ray_worker_that_dies_is_replaced(tmp_path: Path, faulty: list[str]) -> None:
    """Client 3's worker dies in the second round; in the third, all clients are there again."""
    dies = [*faulty, "plugin.fednorm.z_when=exit", "engine=ray"]
    with pytest.raises(
        fedhet.RunFailed, match=r"client 3 failed .*phase 'train', step 2: .*worker"
    ):
        summary(tmp_path / "stop", *dies)
    recorded = json.loads((tmp_path / "stop" / "summary.json").read_text())
    assert recorded["status"] == "failed"
    died = summary(tmp_path / "skip", *dies, "on_failure=skip", "replies.max_lost=1")
    rows = [
        json.loads(line) for line in (tmp_path / "skip" / "rounds.jsonl").read_text().splitlines()
    ]
    assert [row["accepted"] for row in rows] == [10, 9, 10]
    assert failures(died) == [(2, 3)]


@pytest.mark.matrix
@pytest.mark.parametrize("nodes", [2, 10])
def test_flwr_run_gives_the_same_bytes_with_any_number_of_nodes(
    tmp_path: Path, reference: dict[str, dict[str, Any]], nodes: int
) -> None:
    folder = tmp_path / "a folder, with 'quotes'"
    lines = [*SCAFFOLD, "engine=flwr", f"engine.workers={nodes}", f'hydra.run.dir="{folder}"']
    same(fedhet.run(lines).summary, reference[SCAFFOLD[0]])
    time.sleep(1)
    assert not [line for line in descendants() if "flower" in line or "ray" in line]


@pytest.mark.matrix
def test_flwr_run_reports_the_true_status_once(
    tmp_path: Path, faulty: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [*faulty, "plugin.fednorm.z_when=raise", "engine=flwr", "engine.workers=2"]
    cause = "client 3 failed .*phase 'train', step 2: OSError: .*disk is full"
    with pytest.raises(fedhet.RunFailed, match=cause):
        summary(tmp_path / "run", *lines)
    log = capfd.readouterr().err
    assert "Successfully started run" in log
    assert "RunFailed" not in log and "Traceback" not in log


def test_a_task_of_objects_runs_in_process_only() -> None:
    message = "engine=ray builds .*task again .*other processes"
    with pytest.raises(fedhet.ConfigError, match=message):
        fedhet.run(["engine=ray"], task=toy_task())


@pytest.mark.parametrize("engine", ["ray", pytest.param("flwr", marks=pytest.mark.slow)])
def test_a_client_that_asks_for_no_gpu_has_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    engine: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(fedhet.ConfigError, match=r"device=cuda .*engine\.num_gpus=0; "):
        fedhet.run([f"engine={engine}", "device=cuda"])
    for device, lines in (("auto", 1), ("cpu", 0)):
        folder = f"hydra.run.dir={tmp_path}/{device}"
        job = Job(compose([f"engine={engine}", f"device={device}", folder]), engine=engine)
        caplog.clear()
        begin(job).end("interrupted")
        assert job.run_dir == tmp_path / device
        assert job.workspace.device.type == "cpu"
        assert caplog.text.count("device=auto with engine.num_gpus=0 means the CPU") == lines


def test_engines_refuse_what_cannot_start() -> None:
    message = r"engine.num_cpus=4096.* per client, .*machine "
    with pytest.raises(fedhet.ConfigError, match=message):
        fedhet.run(["engine=ray", "engine.num_cpus=4096"])
    if sys.platform == "linux":
        message = r"engine.num_cpus=0.5: .*whole number of CPUs"
        with pytest.raises(fedhet.ConfigError, match=message):
            fedhet.run(["engine=flwr", "engine.num_cpus=.5"])
