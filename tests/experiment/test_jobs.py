"""How the jobs of a batch end, and what their processes say about it."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus

from fedhet.core.errors import ConfigError, DataError, OtherCode, RunFailed
from fedhet.launchers.jobs import Jobs, as_ours, redirected, why

LOST = "its process was ended by SIGKILL"


@pytest.fixture
def jobs() -> Jobs:
    context: Any = None
    return Jobs(context, lambda cfg: None, context, [["seed=0"], ["seed=1"]], first=4)


def test_a_job_that_was_lost_is_recorded_as_failed(jobs: Jobs, tmp_path: Path) -> None:
    jobs.folders[0] = tmp_path
    assert jobs.ended(0, None, LOST) == LOST
    record = json.loads((tmp_path / "cell.json").read_text())
    assert (record["status"], record["reason"]) == ("failed", LOST)
    assert jobs.ended(1, None, LOST) == LOST  # it has no folder yet
    with pytest.raises(RunFailed, match=LOST):
        _ = jobs.returns[0].return_value


def test_a_record_that_cannot_be_written_ends_no_other_job(
    jobs: Jobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.folders[0] = tmp_path
    (tmp_path / "cell.json").write_text('{"status": ')
    with caplog.at_level(logging.WARNING, "fedhet"):
        assert jobs.ended(0, None, LOST) == LOST
    assert "cell.json" in caplog.text
    assert (tmp_path / "cell.json").read_text() == '{"status": '


def test_other_code_is_told_by_the_experiment(jobs: Jobs, tmp_path: Path) -> None:
    done = JobReturn(status=JobStatus.FAILED)
    done.return_value = OtherCode("the code has changed")
    jobs.folders[0] = tmp_path
    assert jobs.ended(0, done) is None
    assert not any(tmp_path.iterdir())


class Torn(DataError):
    """A plug-in's own."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("lr=-1"), ConfigError, "lr=-1"),
        (Torn("a.csv: line 3"), DataError, "a.csv: line 3"),
        (ZeroDivisionError("by zero"), RunFailed, "ZeroDivisionError: by zero (FEDHET_TRACEBACK"),
    ],
)
def test_errors_travel_in_classes_that_every_process_knows(
    error: Exception, kind: type[Exception], text: str
) -> None:
    told = as_ours(error)
    assert type(told) is kind and str(told).startswith(text)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (None, "its process ended with exit code None; log.txt in its folder may say why"),
        (7, "its process ended with exit code 7; log.txt in its folder may say why"),
        (-signal.SIGTERM, "its process was ended by SIGTERM"),
        (-signal.SIGKILL, f"{LOST} (as the system does where memory runs out)"),
        (-99, "its process was ended by signal 99"),
    ],
)
def test_why_a_process_has_ended(code: int | None, reason: str) -> None:
    assert why(code) == reason


def test_what_is_printed_in_a_run_folder_and_after_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.write(1, b"before\n")
    with pytest.raises(RunFailed), redirected() as redirect:
        redirect(tmp_path)
        os.write(1, b"inside\n")
        os.write(2, b"inside, too\n")
        raise RunFailed("at its end")
    os.write(2, b"after\n")
    assert (tmp_path / "log.txt").read_text() == "inside\ninside, too\n"
    assert capfd.readouterr() == ("before\n", "after\n")
