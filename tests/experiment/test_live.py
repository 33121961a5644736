"""What is shown of runs in other processes, from their folders alone."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedhet.runs.record import schema
from fedhet.study import live
from fedhet.study.executors import PlannedRun


class Folder:
    """A run folder that grows as a run writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begins(self, rounds: int = 4) -> Folder:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "rounds.jsonl").write_text("")
        return self._summary(status="interrupted", reason="it is running", rounds=rounds)

    def step(self, round: int, **scores: Any) -> None:
        row = {"phase": "train", "step": round, "round": round + 7, "loss_global": 0.5, **scores}
        with (self.path / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def ends(self, status: str = "ok", reason: str | None = None) -> None:
        self._summary(status=status, reason=reason, rounds=4, seconds={"total": 2.14})

    def _summary(self, **content: Any) -> Folder:
        part = self.path / "part"
        part.write_text(json.dumps(content))
        part.replace(self.path / "summary.json")
        return self


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


def planned(folder: Path, label: str = "") -> PlannedRun:
    return PlannedRun(0, label or f"run {folder.name}", (), folder)


@pytest.fixture
def watch(tmp_path: Path, output: io.StringIO, request: Any) -> live.Watch:
    """A watch of a and b that looks when it is told to; `terminal` as parameter shows it."""
    console = Console(file=output, force_terminal=hasattr(request, "param"), width=90, height=12)
    watch = live.Watch(3, done=1, console=console)
    for name in "ab":
        watch.begins(planned(tmp_path / name))
    return watch


def text(watch: live.Watch) -> str:
    console = Console(file=io.StringIO(), width=90, height=12)
    console.print(watch.bar)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_line_when_a_run_ends(watch: live.Watch, tmp_path: Path, output: io.StringIO) -> None:
    a, b = Folder(tmp_path / "a").begins(), Folder(tmp_path / "b").begins()
    watch.look()
    a.step(4, acc_global=0.9556)
    b.step(1, acc_global=None, acc_clients_mean=0.5)
    watch.look()
    assert output.getvalue() == ""
    b.ends("failed", "client 3 failed\x1b[2J")
    watch.ends(planned(b.path), "client 3 failed\x1b[2J")
    a.ends()
    watch.ends(planned(a.path), "")
    assert output.getvalue().splitlines() == [
        "[2/3] run b: failed: client 3 failed\\x1b[2J",
        "[3/3] acc_global 0.9556 (2.1 s): run a",
    ]
    assert not watch.running  # what has ended costs nothing more


@pytest.mark.parametrize("watch", ["terminal"], indirect=True)
def test_on_a_terminal_the_bar_tells_what_ends_well(
    watch: live.Watch, tmp_path: Path, output: io.StringIO
) -> None:
    a = Folder(tmp_path / "a").begins()
    a.step(4, acc_global=0.5)
    a.ends()
    watch.ends(planned(a.path), "")
    assert "2/3" in text(watch) and output.getvalue() == ""
    watch.ends(planned(tmp_path / "b"), "the system cannot start a process for this run")
    line = "[3/3] run b: failed: the system cannot start a process for this run\n"
    assert "3/3" in text(watch) and output.getvalue() == line


@pytest.mark.parametrize(
    ("scores", "trial", "shown"),
    [
        ({}, False, "loss_global 0.5000"),
        ({"loss_global": None}, False, "ok"),
        ({"mae_global": 1.5}, False, "mae_global 1.5000"),
        ({"acc_val_weighted": 0.5, "acc_global": 0.25}, True, "acc_val_weighted 0.5000"),
        (
            {"acc_global": None, "acc_clients_weighted": 0.25, "acc_clients_mean": 0.5},
            False,
            "acc_clients_mean 0.5000",  # which the log of the run names
        ),
        ({"balanced_clients_weighted": 0.5}, False, "balanced_clients_weighted 0.5000"),
    ],
)
def test_the_score_of_a_run(scores: dict[str, float | None], trial: bool, shown: str) -> None:
    assert live.score({"loss_global": 0.5, **scores}, trial=trial) == shown


def test_a_trial_shows_its_validation_score(tmp_path: Path, output: io.StringIO) -> None:
    folder = Folder(tmp_path / "a").begins()
    folder.step(4, acc_global=0.25, acc_val_weighted=0.5)
    folder.ends()
    watch = live.Watch(1, console=Console(file=output))
    watch.ends(dataclasses.replace(planned(folder.path), trial=True), "")
    assert output.getvalue() == "[1/1] acc_val_weighted 0.5000 (2.1 s): run a\n"


def test_a_launcher_tells_what_folders_cannot(tmp_path: Path, output: io.StringIO) -> None:
    with live.Watch(3, console=Console(file=output)) as watch:
        killed = planned(Folder(tmp_path / "killed").begins().path)
        lost = planned(tmp_path / "lost")
        for run in (killed, lost):
            watch.begins(run)
        watch.ends(killed, "its process was ended by SIGKILL")
        watch.ends(lost, "the system cannot start a process for this run")
    assert output.getvalue().splitlines() == [
        "[1/3] run killed: failed: its process was ended by SIGKILL",
        "[2/3] run lost: failed: the system cannot start a process for this run",
    ]


def test_the_whole_knows_what_is_done(watch: live.Watch, tmp_path: Path) -> None:
    """One cell ended before; a is half done, b is in a phase before the training."""
    a, b = Folder(tmp_path / "a").begins(), Folder(tmp_path / "b").begins()
    (a.path / "summary.json").write_text('{"rounds": ')  # it is being written
    a.step(2)
    b.step(1, phase="explore")
    watch.look()
    (whole,) = watch.bar.tasks
    assert (whole.completed, whole.total) == (1, 3)
    a.begins().step(2)
    watch.look()
    assert (whole.completed, whole.total) == (1.5, 3)


def test_the_last_step_is_read_from_the_end_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "BLOCK", 800)
    path = tmp_path / "rounds.jsonl"
    assert schema.last_step(path) == {}
    written = ""
    for step, cohort in enumerate(([], [1] * 200, [2])):
        row = {"step": step, "cohort": cohort}
        written += json.dumps(row) + "\n"
        path.write_text(written + '{"step": 9, "coh')  # the next one is being written
        assert schema.last_step(path) == row
