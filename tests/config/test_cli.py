from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from fedhet.config.config import Config

from fedhet import config
from fedhet.cli import main
from fedhet.config import catalogue
from fedhet.errors import ConfigError, DataError, RunFailed

Job = Callable[[Config], Any]


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`main` owns its process: what it sets is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.delenv("FEDHET_TRACEBACK", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The jobs that were run, by an engine that does nothing; see `runs`."""
    done: list[Config] = []
    runs(monkeypatch, done, lambda settings: None)
    return done


def runs(monkeypatch: pytest.MonkeyPatch, done: list[Config], job: Job) -> None:
    """Replace the engine by `job`, called in the run folder's presence; a run's validation accuracy
    is its seed."""

    def run_job(settings: Config) -> Any:
        done.append(settings)
        folder = Path(settings.run_dir)
        job(settings)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").touch()
        return types.SimpleNamespace(
            summary={"validation": settings.cfg.seed or None, "accuracy": {"last": -1}}, dir=folder
        )

    pairs = [("fedavg", "fednorm", None), ("fednorm", "fedprox", "they quarrel")]
    for name, content in (
        ("fedhet.job", {"run_job": run_job}),
        ("fedhet.cli.compositions", {"compositions": lambda: pairs}),
    ):
        stub = types.ModuleType(name)
        stub.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, stub)


def fails(
    error: BaseException, when: Callable[[Config], bool] = lambda _: True, keep: bool = False
) -> Job:
    def job(settings: Config) -> None:
        if when(settings):
            if keep:
                Path(settings.run_dir, "rounds.jsonl").touch()
            raise error

    return job


def test_a_run(jobs: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["method=scaffold", "+plugin=[fednorm]", "client.lr=.3"]) == 0
    (job,) = jobs
    assert (job.choices["method"], job.plugins, job.cfg.client.lr) == (
        "scaffold",
        ("fednorm",),
        0.3,
    )
    assert job.overrides == ("method=scaffold", "plugin=[fednorm]", "client.lr=.3")
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"run folder: {job.run_dir}"
    assert said.err == ""
    assert Path(job.run_dir).is_absolute()
    assert [path.name for path in Path(job.run_dir).iterdir()] == [
        "summary.json"
    ]  # nothing of Hydra's


def test_a_job_has_the_configuration_that_its_overrides_compose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What client processes rely on; and composing works inside Hydra's own run."""
    done: list[Config] = []
    composed: list[Config] = []
    runs(monkeypatch, done, lambda settings: composed.append(config.compose(settings.overrides)))
    assert main.main(["-m", "method=fednorm,fedadam", "plugin=[fedprox]", "seed=3"]) == 0
    assert len(done) == 2
    for job, again in zip(done, composed, strict=True):
        assert (job.cfg, job.choices, job.plugins, job.overrides) == (
            again.cfg,
            again.choices,
            again.plugins,
            again.overrides,
        )
    assert {(job.choices["method"], job.cfg.seed, job.plugins) for job in done} == {
        ("fednorm", 3, ("fednorm", "fedprox")),
        ("fedadam", 3, ("fedprox",)),
    }
    assert len({job.run_dir for job in done}) == 2
    assert all(Path(job.run_dir).parents[2].name == "multirun" for job in done)


def test_a_job_of_a_sweep_begins_without_what_the_last_one_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[weakref.ref[Any]] = []

    def job(settings: Config) -> None:
        assert all(ref() is None for ref in left)
        model = types.ModuleType("model")  # can be referenced weakly
        model.itself = model  # type: ignore[attr-defined]
        left.append(weakref.ref(model))

    runs(monkeypatch, [], job)
    gc.disable()  # it must not depend on when Python looks for itself
    try:
        assert main.main(["-m", "seed=1,2,3"]) == 0
    finally:
        gc.enable()
    assert len(left) == 3


def test_a_named_run_folder(jobs: list[Config], tmp_path: Path) -> None:
    assert main.main(["hydra.run.dir=here"]) == 0
    assert (jobs[0].run_dir, jobs[0].run_dir_given) == (str(tmp_path / "here"), True)


def test_job_folders_of_a_sweep_are_short_and_flat(jobs: list[Config]) -> None:
    assert (
        main.main(
            [
                "-m",
                "data_dir=/a/b/c",
                "seed=0,1",
                *(
                    f"{key}=1"
                    for key in ("rounds", "fraction", "client.epochs", "client.batch_size")
                ),
            ]
        )
        == 0
    )
    names = [Path(job.run_dir).name for job in jobs]
    assert [name[0] for name in names] == ["0", "1"]
    assert max(map(len, names)) <= 80
    assert len({Path(job.run_dir).parent for job in jobs}) == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
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
def test_a_run_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    said: str,
) -> None:
    done: list[Config] = []
    runs(monkeypatch, done, fails(error))
    assert main.main([]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", said)
    assert not Path(done[0].run_dir).exists()  # nothing was recorded, so no empty folder stays


def test_a_traceback_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(monkeypatch, [], fails(ZeroDivisionError("oh")))
    monkeypatch.setenv("FEDHET_TRACEBACK", "1")
    assert main.main([]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_failed_run_that_left_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs(monkeypatch, [], fails(RunFailed("a client died", str(tmp_path))))
    assert main.main([]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"run folder: {tmp_path.resolve()}"
    assert said.err == "error: a client died\n"


@pytest.mark.parametrize(("how", "flags"), [(signal.SIGINT, []), (signal.SIGTERM, ["-m"])])
def test_an_interrupted_run_keeps_its_folder(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: signal.Signals,
    flags: list[str],
) -> None:
    done: list[Config] = []

    def job(settings: Config) -> None:
        Path(settings.run_dir, "rounds.jsonl").touch()
        os.kill(os.getpid(), how)
        raise AssertionError("still running")

    runs(monkeypatch, done, job)
    assert main.main([*flags, "seed=1"]) == 130
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"run folder: {done[0].run_dir}"
    assert said.err == "interrupted\n"


def test_a_failing_job_does_not_stop_a_sweep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[Config] = []
    runs(monkeypatch, done, fails(RunFailed("diverged"), lambda settings: settings.cfg.seed == 1))
    assert main.main(["-m", "seed=0,1,2"]) == 1
    assert [job.cfg.seed for job in done] == [0, 1, 2]
    said = capsys.readouterr()
    assert said.err == "error: diverged\nfailed: job 1: seed=1: diverged\n"
    assert [line for line in said.out.splitlines() if line.startswith("run folder: ")] == [
        f"run folder: {done[job].run_dir}" for job in (0, 2)
    ]
    assert "job 2: seed=2" in said.out


def test_in_another_process_the_exception_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher's process: its note would be lost, so Hydra must carry the exception back."""
    runs(monkeypatch, [], fails(DataError("no file"), lambda settings: settings.cfg.seed == 1))
    monkeypatch.setattr(
        main.Task, "pid", property(lambda task: -1, lambda task, value: None), raising=False
    )
    assert main.main(["-m", "seed=0,1"]) == 2
    assert capsys.readouterr().err.endswith("error: no file\n")


def test_an_optimiser_gets_the_validation_accuracy(
    monkeypatch: pytest.MonkeyPatch, jobs: list[Config]
) -> None:
    returned: list[float] = []
    call = main.Task.__call__
    monkeypatch.setattr(main.Task, "__call__", lambda task, cfg: returned.append(call(task, cfg)))
    assert main.main(["-m", "seed=4,2"]) == 0
    assert returned == [4.0, 2.0]
    main.main(["seed=0"])  # nobody validates
    runs(monkeypatch, [], fails(RunFailed("diverged")))
    main.main([])
    assert len(returned) == 4 and all(value != value for value in returned[2:])  # NaN


def test_a_wrong_sweep_runs_nothing(jobs: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["-m", "method=fedavg,fednormm"]) == 2
    assert main.main(["-m", "client.lr=.1,0"]) == 2
    assert main.main(["seed=0,1"]) == 2
    assert jobs == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("argv", [["--zzz"], ["--cfg"], ["--config-dir", "x"], ["--cfg", "zzz"]])
def test_unknown_options(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(argv) == 2
    assert capsys.readouterr().err.endswith("see python -m fedhet --help\n")


def test_hydra_prints_the_configuration_wherever_the_option_stands(
    jobs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (["--cfg", "job", "seed=3"], ["seed=3", "-c", "job"]):
        assert main.main(argv) == 0
        assert "\nseed: 3\n" in capsys.readouterr().out
    assert jobs == []


def test_list(jobs: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert catalogue.ONE_METHOD in " ".join(out.split())
    said = [line.split() for line in out.splitlines()]
    assert ["fednorm", "fedprox"] in said
    assert ["fedavg", "+", "+"] in said
    assert ["fednorm", "+", "-"] in said
    assert ["fednorm", "+", "fedprox", "they", "quarrel"] in said
    assert all(any(line[:1] == [name] for line in said) for name in catalogue.choices("method"))


def test_help_comes_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fedhet", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "fedhet.cli.main" in imported
    assert not {"torch", "flwr", "numpy", "hydra"} & imported


def test_help_names_every_choice_and_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    said = capsys.readouterr().out
    words = said.replace("*", "").split()
    for group, choices in catalogue.groups().items():
        assert {group, *choices} <= set(words)
    for key in (
        "seed=0",
        "rounds=20",
        "fraction=1.0",
        "client.lr=0.2",
        "partition.alpha=0.3",
        "engine.workers=1",
        "eval.every=1",
    ):
        assert key in words
    assert "*fednorm" in said
    assert "flwr run ." in said
    assert max(map(len, said.splitlines())) <= 130


def test_wrong_names_from_the_shell() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedhet", "method=fednormm"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown method 'fednormm' (did you mean fednorm")
    assert len(done.stderr.splitlines()) == 1


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    versions = {"fedhet": "1.2.3"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError
        return versions[name]

    monkeypatch.setattr(main, "version", version)
    assert main.main(["--version"]) == 0
    versions.clear()
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == "fedhet 1.2.3\nfedhet, not installed\n"
