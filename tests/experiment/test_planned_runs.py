"""How a planned run ends, and what its process and its folder say about it."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedhet.core.errors import ConfigError, RunFailed
from fedhet.runs.config import compose, composition
from fedhet.runs.config.composition import Bases
from fedhet.study import executors
from fedhet.study.executors import Elsewhere, PlannedRun, Processes, _logged, carry_out
from fedhet.study.live import Watch

LOST = "its process was ended by SIGKILL"


@pytest.fixture
def run(tmp_path: Path) -> PlannedRun:
    return PlannedRun(0, "seed=0", ("seed=0",), tmp_path)


def test_a_run_that_was_lost_is_recorded_as_failed(run: PlannedRun) -> None:
    assert run.failure(LOST) == LOST
    record = json.loads((run.folder / "cell.json").read_text())
    assert (record["status"], record["reason"]) == ("failed", LOST)
    assert run.failure("") == LOST
    run.prepare()  # a new attempt
    (run.folder / "summary.json").write_text('{"status": "ok", "seconds": {}}')
    assert run.failure("") == ""


@pytest.mark.parametrize("any_code", [None, True])
@pytest.mark.parametrize("written", [None, {"status": "interrupted"}])
def test_a_process_that_ends_with_0_before_its_run(
    tmp_path: Path, written: object, any_code: bool | None
) -> None:
    """By os._exit(0)."""
    run = PlannedRun(0, "", (), tmp_path, any_code)
    if written:
        (run.folder / "summary.json").write_text(json.dumps(written))
    if any_code:
        (run.folder / "cell.json").write_text(
            f'{{"status": "{"running" if written else "waiting"}"}}'
        )
    assert run.failure("") == executors.SILENT
    record = json.loads((run.folder / "cell.json").read_text())
    assert record["status"] == "failed"


class Fragile(Elsewhere):
    """Makes runs as one, in a process that dies of one of them, once others have ended.

    Attributes:
        bad: the number of the one.
        made: the numbers of the runs that were made together, each time.
    """

    def __init__(self, bad: int) -> None:
        self.bad = bad
        self.made: list[list[int]] = []

    def together(self, runs: Sequence[PlannedRun], bases: Bases) -> list[list[PlannedRun]]:
        return [[*runs]]

    def start(self, calls: Sequence[Callable[[], None]]) -> list[Any]:
        return [self._make([run for run, _ in call.args[0]]) for call in calls]  # type: ignore[attr-defined]

    def _make(self, runs: Sequence[PlannedRun]) -> tuple[int, str]:
        self.made.append([run.number for run in runs])
        dies = self.bad in self.made[-1]
        for run in runs:
            about: dict[str, Any] = {"status": "interrupted", "seconds": {"total": 1}, "reason": ""}
            if run.number != self.bad and (not dies or run.number == 0):
                about = {"status": "ok", "seconds": {"total": 1}, "reason": None}
            (run.folder / "summary.json").write_text(json.dumps(about))
        return len(self.made), LOST if dies else ""

    def wait(self, handles: Sequence[Any]) -> None: ...

    def ended(self, handle: Any) -> str:
        return str(handle[1])

    def interrupt(self, handle: Any) -> None: ...


class InOrder(Fragile):
    """Executes one run at a time, and writes down what happens."""

    places = 1

    def __init__(self) -> None:
        super().__init__(bad=-1)
        self.events: list[str] = []

    def together(self, runs: Sequence[PlannedRun], bases: Bases) -> list[list[PlannedRun]]:
        return [[run] for run in runs]

    def start(self, calls: Sequence[Callable[[], None]]) -> list[Any]:
        self.events.append("start")
        return super().start(calls)

    def wait(self, handles: Sequence[Any]) -> None:
        self.events.append("wait")


def test_the_next_run_is_composed_while_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = InOrder()
    monkeypatch.setattr(
        PlannedRun, "composed", lambda run, bases: launcher.events.append(f"{run.number}")
    )
    runs = [PlannedRun(i, f"run {i}", (), tmp_path / str(i)) for i in range(3)]
    assert launcher.launch(runs, Watch(3)) == {}
    assert " ".join(launcher.events) == "0 start 1 wait start 2 wait start wait"


def test_the_runs_of_a_process_that_has_died_are_made_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PlannedRun, "composed", lambda run, bases: None)
    runs = [PlannedRun(i, f"run {i}", (), tmp_path / str(i)) for i in range(4)]
    launcher = Fragile(bad=2)
    watch = Watch(4)
    assert launcher.launch(runs, watch) == {runs[2]: LOST}
    assert launcher.made == [[0, 1, 2, 3], [1], [2], [3]]
    assert watch.done == 4
    err = capsys.readouterr().err
    assert (
        f"3 runs are repeated, each in its own process: {LOST}\n" in err
        and "run 1: interrupted" not in err
    )


def test_a_plain_run_that_is_made_again_goes_on(
    run: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "make", lambda settings: settings)
    settings = run.composed(composition.of_sweep())
    (run.folder / "summary.json").touch()
    again: Any = replace(run, alone=True)
    assert run.make(settings) is settings and (run.folder / "summary.json").exists()
    assert not again.make(settings).resumes  # its process has died before its folder was whole
    assert not (run.folder / "summary.json").exists()
    (run.folder / "rounds.jsonl").touch()
    assert again.make(settings).resumes


def test_a_record_that_cannot_be_written_ends_no_other_run(
    run: PlannedRun, caplog: pytest.LogCaptureFixture
) -> None:
    (run.folder / "cell.json").write_text('{"status": ')
    with caplog.at_level(logging.WARNING, "fedhet"):
        assert run.failure(LOST) == LOST
    assert "cell.json" in caplog.text
    assert (run.folder / "cell.json").read_text() == '{"status": '


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = PlannedRun(0, "", (), tmp_path / "file" / "0")
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.dir: .*folder .*created"):
        run.prepare()


def test_the_process_of_a_run_leaves_its_reason(
    run: PlannedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(settings: Any) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(executors, "make", fails)
    monkeypatch.chdir(tmp_path)
    carry_out([(run, compose([]))], str(tmp_path))
    reason = "ZeroDivisionError: by zero (FEDHET_TRACEBACK=1 shows where)"
    assert run.failure("") == reason
    with pytest.raises(ConfigError, match=r"nodes .*under .*same path"):
        carry_out([(run, compose([]))], str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (None, None),
        (0, ""),
        (7, "its process ended with exit code 7; log.txt in its folder may say why"),
        (-signal.SIGTERM, "its process was ended by SIGTERM"),
        (-signal.SIGKILL, f"{LOST} (the system does so if memory runs out)"),
        (-99, "its process was ended by signal 99"),
    ],
)
def test_why_a_process_has_ended(code: int | None, reason: str | None) -> None:
    process: Any = SimpleNamespace(pid=1, exitcode=code)
    assert Processes.ended(Processes(1), process) == reason


def test_a_run_for_which_there_is_no_process(
    run: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        pid = None

        def __init__(self, **arguments: Any) -> None: ...

        def start(self) -> None:
            raise BlockingIOError

    launcher = Processes(1)
    monkeypatch.setattr(
        executors.multiprocessing, "get_context", lambda how: SimpleNamespace(Process=Full)
    )
    monkeypatch.setattr(PlannedRun, "composed", lambda run, bases: None)
    assert launcher.launch([run], Watch(1)) == {
        run: "the system cannot start a process for this run"
    }


def test_what_is_printed_in_a_run_folder_and_after_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.write(1, b"before\n")
    with pytest.raises(RunFailed), _logged(tmp_path):
        os.write(1, b"inside\n")
        os.write(2, b"inside, too\n")
        raise RunFailed("at its end")
    os.write(2, b"after\n")
    assert (tmp_path / "log.txt").read_text() == "inside\ninside, too\n"
    assert capfd.readouterr() == ("before\n", "after\n")
