"""One run from the command line: its result, its folder, its exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_jobs import failing, install_jobs

from fedhet import __main__ as main
from fedhet.core.errors import ConfigError, DataError, RunFailed
from fedhet.runs.cli.exits import report_error
from fedhet.runs.config import Config

pytestmark = pytest.mark.usefixtures("own_process", "read_once")
ROOT = Path(__file__).parents[2]


def test_a_run(jobs: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["method=scaffold", "+plugin=[fednorm]", "client.lr=.3"]) == 0
    (job,) = jobs
    assert job.choices["method"] == "scaffold"
    assert job.plugins == ("fednorm",)
    assert job.cfg.client.lr == 0.3
    assert job.overrides == ("method=scaffold", "plugin=[fednorm]", "client.lr=.3")
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == f"run folder: {job.run_dir}"
    assert printed.err == ""
    assert Path(job.run_dir).is_absolute()
    names = [path.name for path in Path(job.run_dir).iterdir()]
    assert names == ["summary.json"]  # and nothing of Hydra's


def test_a_named_run_folder(jobs: list[Config], tmp_path: Path) -> None:
    assert main.main(["hydra.run.dir=here"]) == 0
    assert jobs[0].run_dir == str(tmp_path / "here")
    assert jobs[0].run_dir_given is True


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RunFailed("client 3 sent NaN"), 1, "error: client 3 sent NaN\n"),
        (ConfigError("these do not fit"), 2, "error: these do not fit\n"),
        (DataError("no file"), 2, "error: no file\n"),
        (
            ZeroDivisionError("oh"),
            1,
            "error: ZeroDivisionError: oh (FEDHET_TRACEBACK=1 shows where)\n",
        ),
    ],
)
def test_an_error_is_a_line_and_a_code(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int, line: str
) -> None:
    assert report_error(error) == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", line)


def test_a_run_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs: list[Config] = []
    install_jobs(monkeypatch, configs, failing(DataError("no file")))
    assert main.main([]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "error: no file\n")
    # Nothing was recorded, so no empty folder is left.
    assert not Path(configs[0].run_dir).exists()


def test_a_traceback_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_jobs(monkeypatch, [], failing(ZeroDivisionError("oh")))
    monkeypatch.setenv("FEDHET_TRACEBACK", "1")
    assert main.main([]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_failed_run_that_left_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install_jobs(monkeypatch, [], failing(RunFailed("a client died", str(tmp_path))))
    assert main.main([]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == f"run folder: {tmp_path.resolve()}"
    assert printed.err == "error: a client died\n"


@pytest.mark.parametrize(("how", "flags"), [(signal.SIGINT, []), (signal.SIGTERM, ["-m"])])
def test_an_interrupted_run_keeps_its_folder(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: signal.Signals,
    flags: list[str],
) -> None:
    configs: list[Config] = []

    def job(settings: Config) -> None:
        Path(settings.run_dir).mkdir(parents=True)
        os.kill(os.getpid(), how)
        raise AssertionError("still running")

    install_jobs(monkeypatch, configs, job)
    assert main.main([*flags, "seed=1"]) == 130
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == f"run folder: {configs[0].run_dir}"
    assert printed.err == "interrupted\n"


def test_wrong_names_from_the_shell() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "fedhet", "method=fednormm"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert re.match("error: .*method 'fednormm' .*mean fednorm", process.stderr)
    assert len(process.stderr.splitlines()) == 1


def test_missing_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names every place and is meant to be read: nothing in it is escaped."""
    assert main.main(["dataset=shakespeare", f"data_dir={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "\\n" not in line
    assert re.search(f" {tmp_path}/shakespeare .*train/.*test/", line)
    assert "github.com/TalwalkarLab/leaf" in line
