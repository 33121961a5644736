"""A disk that is full, and folders that cannot be written: what is said, and what is left."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import safetensors.torch
import torch
from contracts.short import slow_unless
from small_disks import FULL, Disk

import fedhet
from fedhet.__main__ import main
from fedhet.core.errors import WriteError
from fedhet.core.messages import Upload
from fedhet.data.storage import LastingJson
from fedhet.data.toy import toy_task
from fedhet.engines import shared
from fedhet.runs.stores import DiskStore

# What a run writes before its figures.
FILES = {
    "summary.json",
    "config.yaml",
    "overrides.yaml",
    "partition.json",
    "environment.json",
    "rounds.jsonl",
    "round-000001.parquet",
    "fednorm-1.safetensors",
    "best_val.safetensors",
    "model.safetensors",
}
HOMES = {"round-000001.parquet": "clients", "fednorm-1.safetensors": "arrays"}


def check_failure(folder: Path, reason: str, *, recorded: bool = True) -> None:
    """Check what a run has left that could not write a file for this reason."""
    summary = folder / "summary.json"
    assert summary.exists() == recorded
    if recorded:
        content = json.loads(summary.read_text())
        assert content["status"] == "failed"
        assert content["reason"].split("; ")[0] == reason
    rounds = folder / "rounds.jsonl"
    for line in rounds.read_text().splitlines(keepends=True) if rounds.exists() else []:
        assert json.loads(line) and line.endswith("\n")
    for weights in folder.glob("*.safetensors"):
        assert safetensors.torch.load_file(weights)
    assert not [path for path in folder.rglob(".*") if "spare" not in path.name]


@pytest.mark.parametrize(
    ("rooms", "files"),
    [
        pytest.param(
            [1, 10, 11, 12, 99],
            {"summary.json", "fednorm-1.safetensors", "rounds.jsonl", "model.safetensors"},
            id="few",
        ),
        pytest.param(itertools.count(), FILES, id="every", marks=pytest.mark.slow),
    ],
)
def test_whatever_file_does_not_fit_is_named_and_the_run_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rooms: Iterable[int], files: set[str]
) -> None:
    """The last room is large enough."""
    monkeypatch.setattr("fedhet.runs.record.figures.draw", lambda *args: [])
    named = set()
    for room in rooms:
        folder = tmp_path / str(room)
        lines = ["method=fedavg", "plugin=[fednorm]", "rounds=1", f"hydra.run.dir={folder}"]
        with pytest.MonkeyPatch.context() as patch:
            Disk(folder, room, patch)
            try:
                run = fedhet.run(lines, task=toy_task())
                break
            except fedhet.RunFailed as error:
                caught = error
        file = caught.reason.partition(" ")[0]
        named.add(file)
        home = folder / HOMES.get(file, "")
        assert caught.reason == f"{file} cannot be written in {home}: {FULL}"
        # Where there is no room for two files, none was taken for the record of the failure.
        check_failure(folder, caught.reason, recorded=room > 1)
        assert caught.folder == (str(folder) if room > 1 else None)
    assert named == files
    assert run.summary["status"] == "ok"
    assert not list(folder.rglob(".*"))  # the room that was taken is given back


def test_what_a_failed_run_cannot_save_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reason names the first file, and that of its weights."""
    lines = ["method=fedavg", "rounds=1", f"hydra.run.dir={tmp_path / 'run'}"]

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, FULL)

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(fedhet.RunFailed, match=r"^round-000001.parquet "):
        fedhet.run(lines, task=toy_task())
    reason = json.loads((tmp_path / "run" / "summary.json").read_text())["reason"]
    assert f"; model.safetensors cannot be written in {tmp_path / 'run'}: {FULL}" in reason


def test_thousands_of_failures_do_not_keep_a_failed_run_from_being_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedhet.data import storage as files

    path = tmp_path / "summary.json"
    record = files.LastingJson(path)
    record.write({"status": "interrupted"})
    spare = files.SPARE_BYTES
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (spare, limit[1]))
    try:
        with pytest.raises(WriteError, match=r"^summary\.json "):
            record.write_last({"failures": ["?" * spare]})
        assert json.loads(path.read_text()) == {"status": "interrupted"}
        record.write_last({"status": "failed"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert json.loads(path.read_text()) == {"status": "failed"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = []

    def mount(kib: int) -> Path:
        options = ["-t", "tmpfs", "-o", f"size={kib}k", "none", str(folder)]
        result = subprocess.run(["mount", *options], capture_output=True, check=False)
        if result.returncode:
            pytest.skip("only root can mount a file system of a given size")
        mounted.append(folder)
        return folder

    yield mount
    for _ in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
@pytest.mark.parametrize("kib", slow_unless([16, 100], [16, 80, 88, 100, 108]))
def test_a_file_system_that_is_really_full(small_disk: Callable[[int], Path], kib: int) -> None:
    folder = small_disk(kib) / "run"
    lines = ["method=fedavg", "plugin=[fednorm]", "rounds=3", f"hydra.run.dir={folder}"]
    with pytest.raises(fedhet.RunFailed, match=f"{folder}.*: {FULL}") as error:
        fedhet.run(lines, task=toy_task())
    check_failure(folder, error.value.reason)


def in_a_process(home: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run whose files may have 100 kB each."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    return subprocess.run(
        [sys.executable, "-m", "fedhet", *overrides, f"hydra.run.dir={home / 'run'}"],
        env={**os.environ, "FEDHET_CACHE": str(home / "cache")},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_run_whose_model_does_not_fit_ends_with_one_line(tmp_path: Path) -> None:
    """The data do not fit into the cache either, which is said once and does no harm."""
    run = in_a_process(tmp_path, "method=fedavg", "rounds=1")
    assert run.returncode == 1
    reason = f"best_val.safetensors cannot be written in {tmp_path / 'run'}: File too large"
    lines = run.stderr.splitlines()
    assert [line for line in lines if line.startswith("error")] == [f"error: {reason}"]
    assert [line for line in lines if "cached" in line] == lines[:1]
    assert "Traceback" not in run.stderr
    assert run.stdout.splitlines()[-1] == f"run folder: {tmp_path / 'run'}"
    check_failure(tmp_path / "run", reason)


@pytest.mark.parametrize(
    ("setting", "flags", "place"),
    [
        ("hydra.run.dir", [], "file/run"),
        pytest.param("hydra.run.dir", [], "file", marks=pytest.mark.slow),
        pytest.param("hydra.sweep.dir", ["-m"], "file/run", marks=pytest.mark.slow),
        ("hydra.sweep.dir", ["-m"], "file"),
    ],
)
def test_a_folder_that_cannot_be_created_is_a_wrong_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, setting: str, flags: list[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*flags, "method=fedavg", f"{setting}={tmp_path / place}"]) == 2
    printed = capsys.readouterr()
    start = f"error: {setting}: the folder {tmp_path / place} cannot be created"
    assert printed.err.startswith(start) and printed.err.count("\n") == 1


def test_from_python_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(fedhet.ConfigError, match=r"file/run .*created"):
        fedhet.run([f"hydra.run.dir={tmp_path}/file/run"], task=toy_task())


# ---- what is on the disk when a run says that it has ended well
def test_a_run_that_has_ended_well_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the power fails afterwards, what summary.json speaks of is there."""
    lasting: set[str] = set()
    ended: list[set[str]] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        lasting.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        lasting.discard(str(target))
        if str(self) in lasting:
            lasting.add(str(target))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write_last = LastingJson.write_last

    def last(self: LastingJson, value: Any) -> None:
        ended.append(set(lasting))
        write_last(self, value)
        ended.append(set(lasting))

    monkeypatch.setattr(LastingJson, "write_last", last)
    folder = tmp_path / "run"
    run = fedhet.run(["method=ditto", "rounds=2", f"hydra.run.dir={folder}"], task=toy_task())
    assert run.summary["status"] == "ok"
    before, after = ended
    names = {str(path) for path in folder.rglob("*.safetensors")}
    assert names | {str(folder), str(folder / "rounds.jsonl")} <= before
    assert {str(folder / "summary.json"), str(folder)} <= after


@pytest.mark.parametrize("free", [2**20, 2**30])
def test_a_checkpoint_leaves_the_room_that_the_run_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int
) -> None:
    """On a disk with so many free bytes once a checkpoint is written."""
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    lines = ["method=fedavg", "rounds=2", "checkpoint.every=0", f"hydra.run.dir={tmp_path / 'run'}"]
    assert fedhet.run(lines, task=toy_task()).summary["status"] == "ok"
    written = list((tmp_path / "run" / "checkpoints").glob("0*"))
    assert len(written) == (2 if free == 2**30 else 0)
    assert ("it leaves 1048576 bytes" in caplog.text) == (free == 2**20)


# ---- other files of a run
def test_a_client_state_that_does_not_fit_is_named(tmp_path: Path) -> None:
    (tmp_path / "3").touch()
    with pytest.raises(WriteError, match=rf"^2.safetensors .*{tmp_path}/3: "):
        DiskStore(tmp_path).save(3, 2, {"scaffold.c/w": torch.zeros(3)}, keep=[1])


def test_shared_memory_that_does_not_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, FULL)

    monkeypatch.setattr(os, "posix_fallocate", full)
    update = Upload(pid=0, num_examples=1, weights={"w": torch.zeros(3)})
    with pytest.raises(WriteError, match=rf"^replies\.64 .*{tmp_path}: {FULL}"):
        shared.Writer(tmp_path / "replies").write([update])
