"""Runs that Hydra's own sweepers, launchers, callbacks and logging drive."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from fedhet.__main__ import main
from fedhet.study import by_hydra

SMALL = ("rounds=1", "partition.clients=3", "figures=false")


def installed(plugin: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(
        f"hydra_plugins.{plugin}"
    )
    package = plugin.replace("_", "-")
    return pytest.mark.skipif(not there, reason=f"{package} is not installed (pip install it)")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@installed("hydra_optuna_sweeper")
def test_a_sweeper_looks_for_the_best_validation_score() -> None:
    optuna = ("hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_jobs=1")
    optuna += ("hydra.sweeper.sampler.seed=0",)
    trials = ("hydra.sweeper.n_trials=3", "hydra.sweep.dir=sweep", "client.lr=interval(.001,.5)")
    assert main(["-m", *optuna, *trials, *SMALL]) == 0
    summaries = [json.loads(file.read_text()) for file in Path("sweep").glob("*/summary.json")]
    best = max(summaries, key=lambda summary: summary["validation"])
    found = yaml.safe_load(Path("sweep/optimization_results.yaml").read_text())
    assert len(summaries) == 3 and found["best_value"] == best["validation"]
    overrides = yaml.safe_load((Path(best["run_dir"]) / "overrides.yaml").read_text())
    assert f"client.lr={found['best_params']['client.lr']}" in overrides


@pytest.mark.slow
@installed("hydra_joblib_launcher")
def test_a_launcher_makes_the_runs_that_a_sweep_makes() -> None:
    from joblib.externals.loky import get_reusable_executor

    joblib = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    for folder, launcher in (("one", joblib), ("other", ())):
        assert main(["-m", *launcher, f"hydra.sweep.dir={folder}", "seed=0,1", *SMALL]) == 0
    get_reusable_executor().shutdown()  # else its processes live on in the tests that follow
    digests = [
        {json.loads(file.read_text())["weights_sha256"] for file in Path(sweep).glob("*/summary*")}
        for sweep in ("one", "other")
    ]
    assert len(digests[0]) == 2 and digests[0] == digests[1]


@pytest.mark.slow
def test_callbacks_and_logging_are_those_of_hydra() -> None:
    callback = "hydra.experimental.callbacks.LogJobReturnCallback"
    hydras = [f"+hydra.callbacks.log._target_={callback}", "hydra/job_logging=default"]
    assert main([*hydras, "hydra.run.dir=run", "hydra.output_subdir=.hydra", *SMALL]) == 0
    score = json.loads(Path("run/summary.json").read_text())["validation"]
    assert f"return value: {score}" in Path("run/fedhet.log").read_text()
    assert "rounds: 1" in Path("run/.hydra/config.yaml").read_text()


@pytest.mark.slow
def test_a_file_has_hydra_call_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line may name what Hydra calls; a file of somebody else's may not."""
    file = Path("conf/experiment/evil.yaml").absolute()
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("FEDHET_CONF", str(file.parents[1]))
    call = "{x: {_target_: pathlib.Path.touch, self: {_target_: pathlib.Path, _args_: [called]}}}"
    inner = f"{{callbacks: {call}}}"
    texts = (
        inner,
        "{sweeper: {_target_: os.system}}",
        "{job: {name: ../x}}",
        "{overrides: {hydra: [hydra.launcher.n_jobs=9]}}",
        "{overrides: {task: [hydra.launcher.n_jobs=9]}}",
    )
    for text in texts:
        file.write_text(f"# @package _global_\nhydra: {text}\n")
        for more in ([], ["-m", "seed=0,1"]):
            words = [*more, "experiment=evil", "hydra/job_logging=default", *SMALL]
            assert main(words) == 2, text
    assert not [path for path in Path().rglob("*") if path.name in ("called", "summary.json")]


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("hydra/sweeper=optuna", True),
        ("hydra/launcher=joblib", True),
        ("+hydra.callbacks.x._target_=y", True),
        ("hydra.launcher._target_=y", True),
        ("hydra/launcher=processes", False),
        ("hydra.launcher.workers=2", False),
        ("hydra.run.dir=x", False),
        ("method=fedavg", False),
    ],
)
def test_hydra_drives_what_names_more_of_it_than_fedhet_reads(line: str, asked: bool) -> None:
    assert by_hydra.is_asked([line]) is asked


@pytest.mark.parametrize("line", ["experiment=first_look", "hydra/launcher=processes"])
def test_what_is_not_for_hydra_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hydra/job_logging=default", line]) == 2
    assert line in capsys.readouterr().err
