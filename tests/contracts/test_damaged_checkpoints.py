"""Checkpoints that are damaged, foreign or newer, and disks that do not take one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contracts.short import slow

import fedhet
from fedhet.data import storage
from fedhet.data.toy import toy_task
from fedhet.runs import checkpoint as checkpoints
from fedhet.runs import config
from fedhet.runs.config import Config
from fedhet.runs.record.outcome import Run
from fedhet.testing import check_equal, run_quietly

LINES = [
    "method=scaffold",
    "fraction=.75",
    "client.epochs=1",
    "client.lr=.1",
    "client.batch_size=5",
]
FULL = os.strerror(errno.ENOSPC)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of four rounds, with checkpoints of the third and the fourth."""
    settings = config.compose([*LINES, "rounds=4", "checkpoint.every=0"])
    return run_quietly(settings, tmp_path_factory.mktemp("whole") / "run", toy_task())


@pytest.fixture(scope="module")
def again(whole: Run) -> Config:
    return config.compose([f"resume={whole.dir}"])


@pytest.fixture
def killed(whole: Run, tmp_path: Path) -> Path:
    """The folder of that run, as if it had been killed after its last step."""
    folder = tmp_path / "run"
    shutil.copytree(whole.dir, folder)
    note(folder / "summary.json", status="interrupted")
    return folder


def note(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def resealed(path: Path, **entries: Any) -> None:
    """Change a manifest as its author would."""
    manifest = json.loads(path.read_text().partition("\n")[2])
    text = json.dumps({**manifest, **entries})
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


FILES = ("manifest.json", "values.json", "tensors.safetensors", "best_val.safetensors")
DAMAGES: list[Any] = [
    *((name, flipped, "damaged") for name in FILES),
    ("tensors.safetensors", truncated, "damaged"),
    ("manifest.json", emptied, "damaged"),
    ("values.json", Path.unlink, "No such file"),
    *((name, piped, "not a plain file") for name in FILES[:2]),
    *slow(*((name, truncated, "damaged") for name in FILES if name != "tensors.safetensors")),
    *slow(*((name, emptied, "damaged") for name in FILES if name != "manifest.json")),
    *slow(*((name, Path.unlink, "No such file") for name in FILES if name != "values.json")),
    ("manifest.json", lambda path: resealed(path, format=99), "its format is 99"),
    ("manifest.json", lambda path: resealed(path, config="0"), "a run with other settings"),
    ("manifest.json", lambda path: path.write_text("[]"), "damaged"),
]


@pytest.mark.parametrize(("name", "damage", "reason"), DAMAGES)
def test_an_older_one_is_used(
    whole: Run,
    again: Config,
    killed: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    bad = killed / "checkpoints" / "000004"
    damage(bad / name)
    resumed = run_quietly(again, killed, toy_task())
    assert f"checkpoint {bad} " in caplog.text and reason in caplog.text
    assert "the run continues after round 3" in caplog.text
    check_equal(whole, resumed, name)


@pytest.mark.parametrize("damage", [flipped, Path.unlink, *slow(truncated, emptied)])
def test_a_damaged_state(
    whole: Run,
    again: Config,
    killed: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    """One that both checkpoints need: the run starts from its beginning, and says so."""
    home = killed / "checkpoints"
    needed = []
    for name in ("000003", "000004"):
        manifest = json.loads((home / name / "manifest.json").read_text().partition("\n")[2])
        needed.append({(pid, v) for pid, versions in manifest["states"].items() for v in versions})
    pid, version = min(needed[0] & needed[1])
    damage(home / "states" / pid / f"{version}.safetensors")
    resumed = run_quietly(again, killed, toy_task())
    assert caplog.text.count("is not used: ") == 2
    assert "it starts from its beginning" in caplog.text
    check_equal(whole, resumed, "from its beginning")


def test_other_rounds(whole: Run, again: Config, killed: Path) -> None:
    """The checkpoint has the lines, whatever has become of the file."""
    (killed / "rounds.jsonl").write_text('{"round": 5}\n')
    check_equal(whole, run_quietly(again, killed, toy_task()), "other rounds")


def test_a_checkpoint_of_another_run(
    again: Config, killed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config.compose([*LINES, "seed=1", "rounds=4", "checkpoint.every=0"])
    other = run_quietly(settings, tmp_path / "other", toy_task())
    shutil.rmtree(killed / "checkpoints")
    shutil.copytree(other.dir / "checkpoints", killed / "checkpoints")
    run_quietly(again, killed, toy_task())
    assert caplog.text.count("it belongs to a run with other settings") == 2


@pytest.mark.parametrize("damage", [emptied, Path.unlink, lambda path: path.write_text("a: [")])
def test_a_damaged_configuration(
    again: Config, killed: Path, damage: Callable[[Path], object]
) -> None:
    damage(killed / "config.yaml")
    with pytest.raises((fedhet.ConfigError, fedhet.DataError), match=r"config\.yaml "):
        run_quietly(again, killed, toy_task())


def test_files_that_are_no_states(whole: Run, again: Config, killed: Path) -> None:
    """A file browser leaves some, for example."""
    stray = killed / "checkpoints" / "states" / "stray" / "file"
    stray.parent.mkdir()
    stray.touch()
    resumed = run_quietly(again, killed, toy_task())
    check_equal(whole, resumed, "a stray file")
    assert not stray.exists()


def test_settings_that_are_no_longer_composed_as_they_were(again: Config, killed: Path) -> None:
    path = killed / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.1\n", "lr: 0.2\n", 1))
    with pytest.raises(fedhet.ConfigError, match=r"client\.lr .*0\.2 "):
        run_quietly(again, killed, toy_task())


# ---- a disk that does not take a checkpoint
@pytest.fixture(scope="module")
def settings() -> Config:
    return config.compose([*LINES, "rounds=4", "checkpoint.every=0"])


STAGES = [
    *((checkpoints, "save_tensors", 1), (storage, "sync", 4)),
    *slow((checkpoints, "write_text", 1), (storage, "sync", 1)),
]


@pytest.mark.parametrize(("module", "name", "call"), STAGES)
def test_a_full_disk_leaves_the_last_checkpoint_whole(
    whole: Run,
    settings: Config,
    again: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: Any,
    name: str,
    call: int,
) -> None:
    """The run goes on, and says that it has no checkpoint of the round."""
    write, function = checkpoints.CheckpointFolder.write, getattr(module, name)
    calls = []

    def full(*args: Any) -> None:
        calls.append(args)
        if len(calls) < call:
            return function(*args)
        Path(args[0]).touch()
        raise OSError(errno.ENOSPC, FULL)

    def writing(folder: Any, round: int, *args: Any) -> None:
        with monkeypatch.context() as patch:
            if round > 2:
                patch.setattr(module, name, full)
            calls.clear()
            write(folder, round, *args)

    monkeypatch.setattr(checkpoints.CheckpointFolder, "write", writing)
    run = run_quietly(settings, tmp_path / "run", toy_task())
    check_equal(whole, run, "the run itself")
    for round in (3, 4):
        where = f"{round:06d} cannot be written in {run.dir / 'checkpoints'}: {FULL}"
        assert f"round {round} has no checkpoint: {where}" in caplog.text
    home = run.dir / "checkpoints"
    assert {path.name for path in home.iterdir()} == {"000001", "000002", "states"}
    monkeypatch.undo()
    note(run.dir / "summary.json", status="interrupted")
    check_equal(whole, run_quietly(again, run.dir, toy_task()), "from the second round")


def test_a_folder_that_cannot_be_written(
    whole: Run, settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so it is a file here."""
    write = checkpoints.CheckpointFolder.write
    reasons = []

    def writing(folder: Any, *args: Any) -> None:
        if not folder.home.exists():
            folder.home.touch()
        with pytest.raises(OSError) as error:
            write(folder, *args)
        reasons.append(str(error.value))
        raise error.value

    monkeypatch.setattr(checkpoints.CheckpointFolder, "write", writing)
    run = run_quietly(settings, tmp_path / "run", toy_task())
    (tmp_path / "run" / "checkpoints").unlink()
    check_equal(whole, run, "without checkpoints")
    assert len(reasons) == 4 and all("000" in reason for reason in reasons)


# ---- killed at any moment
@pytest.mark.parametrize("every", [7, *slow(1)])
def test_killed_whenever_something_reaches_the_disk(
    whole: Run,
    settings: Config,
    again: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
) -> None:
    """Before, in and after each part of a checkpoint, and in the middle of a line."""
    folder = tmp_path / "run"
    killed: list[Path] = []

    def snapshot() -> None:
        killed.append(tmp_path / f"killed-{len(killed)}")
        shutil.copytree(folder, killed[-1])

    def before(name: str, function: Callable[..., Any]) -> None:
        def noting(*args: Any, **options: Any) -> Any:
            if (folder / "checkpoints" / "000001").exists():  # until it is removed
                snapshot()
            return function(*args, **options)

        monkeypatch.setattr(name, noting)

    before("fedhet.runs.checkpoint.sync", storage.sync)
    before("fedhet.data.storage.sync", storage.sync)
    before("fedhet.runs.checkpoint.shutil.rmtree", shutil.rmtree)
    before("fedhet.runs.record.run_folder.save_tensors", checkpoints.save_tensors)
    run_quietly(settings, folder, toy_task())
    monkeypatch.undo()
    assert len(killed) > 15
    for i, one in list(enumerate(killed))[::every]:
        with (one / "rounds.jsonl").open("a") as file:
            file.write('{"phase": "tra')
        check_equal(whole, run_quietly(again, one, toy_task()), f"killed at moment {i}")
        assert not list(one.rglob(".*"))
