"""What is shown of runs in other processes, from their folders alone."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import TaskID

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
def watch(tmp_path: Path, output: io.StringIO, request: Any) -> Iterator[live.Watch]:
    """A watch of a and b that looks when it is told to; `terminal` as parameter shows it."""
    console = Console(file=output, force_terminal=hasattr(request, "param"), width=90, height=12)
    watch = live.Watch(3, done=1, console=console)
    for name in "ab":
        watch.begins(planned(tmp_path / name))
    yield watch


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
    watch.ends(planned(b.path), "another reason")
    a.ends()
    watch.ends(planned(a.path), "")
    assert output.getvalue().splitlines() == [
        "[2/3] run b: failed: client 3 failed\\x1b[2J",
        "[3/3] acc_global 0.9556 (2.1 s): run a",
    ]
    # What has ended costs nothing more: an experiment may have thousands of runs.
    assert not watch.runs and len(watch.bar.tasks) == 1


@pytest.mark.parametrize("watch", ["terminal"], indirect=True)
def test_a_line_for_each_run_that_goes_on(
    watch: live.Watch, tmp_path: Path, output: io.StringIO
) -> None:
    a = Folder(tmp_path / "a").begins()
    a.step(1, acc_global=0.5)
    with (tmp_path / "a" / "rounds.jsonl").open("a") as file:
        file.write('{"phase": "tra')  # not yet written to its end
    watch.look()
    shown = text(watch)
    assert "run a" in shown and "round 1/4" in shown and "acc_global 0.5000" in shown
    assert "run b" not in shown
    assert "1/3" in shown
    with (tmp_path / "a" / "rounds.jsonl").open("a") as file:
        file.write('in", "step": 2, "round": 2, "acc_global": 0.75}\n')
    watch.look()
    assert "round 2/4" in text(watch) and "acc_global 0.7500" in text(watch)
    a.ends()
    watch.ends(planned(a.path), "")
    assert "run a" not in text(watch) and "2/3" in text(watch)
    assert output.getvalue() == ""  # the bar tells it


@pytest.mark.parametrize("width", [64, 80, 200])
def test_what_counts_has_room(width: int, tmp_path: Path) -> None:
    """The step and the score; a long label is what is shortened."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=12)
    watch = live.Watch(140, done=12, console=console)
    label = "trial: method=FedLEx, mean 1 partition.alpha=0.05 client.lr=0.3 seed=1001"
    run = dataclasses.replace(planned(tmp_path / "a", label), trial=True)
    watch.begins(run)
    Folder(run.folder).begins(rounds=100).step(12, acc_global=0.25, acc_val_weighted=0.5)
    watch.look()
    console.print(watch.bar)
    whole, line = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "12/140" in whole and line.startswith("trial: meth")
    assert "round 12/100" in line and "acc_val_weighted 0.5000" in line


@pytest.mark.parametrize("watch", ["terminal"], indirect=True)
def test_more_runs_than_a_screen_has_lines(watch: live.Watch, tmp_path: Path) -> None:
    """It has 12, of which 4 are kept for the bar of the whole, and for what is printed."""
    for number in range(10):
        watch.begins(planned(tmp_path / f"{number}"))
        Folder(tmp_path / f"{number}").begins().step(2, phase="finetune")
    watch.look()
    lines = text(watch).splitlines()
    assert "1/3" in lines[0] and lines[0].rstrip().endswith("and 2 more") and len(lines) == 9
    assert ["finetune 2" in line for line in lines[1:]] == [True] * 8


def test_a_summary_that_is_being_written(watch: live.Watch, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "a").begins()
    (folder.path / "summary.json").write_text('{"rounds": ')
    watch.look()
    assert watch.runs[folder.path].status == "waiting"
    folder.begins().step(1)
    watch.look()
    assert watch.runs[folder.path].status == "running"


@pytest.mark.parametrize(
    ("scores", "trial", "shown"),
    [
        ({}, False, "loss_global 0.5000"),
        ({"loss_global": None}, False, ""),
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
def test_the_score_of_a_run(
    scores: dict[str, float | None], trial: bool, shown: str, tmp_path: Path
) -> None:
    run = live.ShownRun(tmp_path, "a", TaskID(0), row={"loss_global": 0.5, **scores}, trial=trial)
    assert run.score() == shown


def test_what_lay_there_before_does_not_count(tmp_path: Path, output: io.StringIO) -> None:
    folder = Folder(tmp_path / "a").begins()
    folder.step(3, acc_global=0.1)
    folder.ends("failed", "an earlier attempt")
    watch = live.Watch(1, console=Console(file=output))
    watch.begins(planned(folder.path))
    watch.look()
    assert "round" not in text(watch)
    folder.begins().step(1, acc_global=0.2)
    watch.look()
    folder.ends()
    watch.ends(planned(folder.path), "")
    assert output.getvalue() == "[1/1] acc_global 0.2000 (2.1 s): run a\n"


def test_a_launcher_tells_what_folders_cannot(tmp_path: Path, output: io.StringIO) -> None:
    with live.Watch(3, console=Console(file=output)) as watch:
        killed = planned(Folder(tmp_path / "killed").begins().path)
        lost = planned(tmp_path / "lost")
        for run in (killed, lost):
            watch.begins(run)
        watch.ends(killed, "its process was ended by SIGKILL")
        watch.ends(lost, "no process can be started for it")
    assert output.getvalue().splitlines() == [
        "[1/3] run killed: failed: its process was ended by SIGKILL",
        "[2/3] run lost: failed: no process can be started for it",
    ]


def test_the_whole_knows_what_ended_before(watch: live.Watch, tmp_path: Path) -> None:
    """One cell ended before; a is half done, and b has not begun."""
    Folder(tmp_path / "a").begins().step(2)
    watch.look()
    whole, a, b = watch.bar.tasks
    assert (whole.completed, whole.total) == (1.5, 3)
    assert (a.completed, a.total, a.started) == (2, 4, True) and not b.started


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
