"""tracker=mlflow: the store of the real package holds what rounds.jsonl holds."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from trackers.following import LINES, Steps, check, killed

import fedhet
from fedhet.__main__ import main
from fedhet.runs.trackers.mlflow import MLflow
from fedhet.runs.trackers.tracker import Tracked

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.slow


def client(home: Path) -> Any:
    return mlflow.MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")


def tracked(home: Path) -> list[Any]:
    store = client(home)
    numbers = [one.experiment_id for one in store.search_experiments()]
    return store.search_runs(numbers)


def metrics(home: Path, number: str) -> Steps:
    store = client(home)
    steps: Steps = defaultdict(dict)
    for name in store.get_run(number).data.metrics:
        for metric in store.get_metric_history(number, name):
            assert name not in steps[metric.step], f"{name} twice in step {metric.step}"
            steps[metric.step][name] = metric.value
    return dict(sorted(steps.items()))


def test_the_whole_run(tmp_path: Path) -> None:
    run = fedhet.run([*LINES, "tracker=mlflow", f"hydra.run.dir={tmp_path}/run"])
    (found,) = tracked(run.dir)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert found.info.run_id == json.loads((run.dir / "tracker.json").read_text())["id"]
    check(metrics(run.dir, found.info.run_id), run.dir)
    assert found.data.params["client.lr"] == "0.2"
    assert found.data.params["plugin.fedlex.c_exp"] == "2"
    stored = Path(found.info.artifact_uri.removeprefix("file://"))
    for name in ("model.safetensors", "config.yaml", "summary.json", "figures/accuracy.png"):
        assert (stored / name).read_bytes() == (run.dir / name).read_bytes()
    plain = fedhet.run([*LINES, f"hydra.run.dir={tmp_path}/plain"])
    assert run.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert set(run.summary) == set(plain.summary)


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed(folder, "tracker=mlflow")
    (before,) = tracked(folder)
    assert before.info.status == "RUNNING"
    run = fedhet.run([f"resume={folder}"])
    (found,) = tracked(folder)
    assert (found.info.run_id, found.info.status) == (before.info.run_id, "FINISHED")
    steps = metrics(folder, found.info.run_id)
    # The third step was taken twice, and MLflow keeps the seconds of the first time.
    for name in [name for name in steps[3] if name.startswith("seconds/")]:
        assert steps[3][name] >= 0
        steps[3][name] = run.rounds[name.replace("/", ".")][2]
    check(steps, run.dir)


def test_the_runs_of_a_sweep_share_a_store_and_a_group(tmp_path: Path) -> None:
    sweep = tmp_path / "alphas"
    lines = ["-m", *LINES[:-2], "rounds=1,2", "tracker=mlflow", f"hydra.sweep.dir={sweep}"]
    assert main(lines) == 0
    runs = tracked(sweep)
    assert len(runs) == 2
    (number,) = {run.info.experiment_id for run in runs}
    assert client(sweep).get_experiment(number).name == "alphas"
    for run in runs:
        check(metrics(sweep, run.info.run_id), sweep / run.info.run_name)


def test_what_mlflow_would_refuse(tmp_path: Path) -> None:
    tracker = MLflow(group="mine")
    settings = {f"x{i}.a[b]": "long" * 1000 for i in range(250)}
    tracker.begin(Tracked(tmp_path, None, settings, executed=0, told=0, id=None))
    tracker.step(1, {"round": 1.0, "odd[name]": math.nan, "large": math.inf})
    tracker.end("interrupted", [])
    (run,) = tracked(tmp_path)
    assert run.info.status == "KILLED"
    assert len(run.data.params) == 250
    assert math.isnan(run.data.metrics["odd_name_"])
    assert run.data.metrics["large"] > 1e300


def test_a_server_that_does_not_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nobody = ["tracker=mlflow", "tracker.uri='http://127.0.0.1:9'"]
    run = fedhet.run([*LINES, *nobody, f"hydra.run.dir={tmp_path}/run"])
    assert run.summary["status"] == "ok"
    assert not (tmp_path / "run" / "tracker.json").exists()
    assert caplog.text.count("tracker=mlflow failed") == 1
