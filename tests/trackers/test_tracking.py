"""A tracker is told what the run folder gets, and cannot harm the run."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asking import packed_message
from flwr.common import Context, RecordDict
from trackers.following import LINES, check, killed
from trackers.listing import Listing

import fedhet
from fedhet.__main__ import main
from fedhet.core.client.client import FedClient
from fedhet.core.errors import ConfigError
from fedhet.flower.apps import client_for
from fedhet.flower.transport import settings_records
from fedhet.runs import config
from fedhet.runs.job import Job, begin
from fedhet.runs.stores import MemoryStore
from fedhet.runs.trackers import tracker as tracking
from fedhet.runs.trackers.tracker import Tracked
from fedhet.testing import check_equal

OWN = "tracker._target_=trackers.listing.Listing"


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHET_TRUST", "trackers")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(Listing, "built", 0)


def run(folder: Path, *lines: str) -> Any:
    return fedhet.run([*LINES, *lines, f"hydra.run.dir={folder}"])


@pytest.fixture
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedhet.runs.record.figures.draw", lambda *args: [])


def calls(folder: Path) -> list[tuple[str, Any]]:
    lines = (folder / "listing.jsonl").read_text().splitlines()
    return [(line["call"], line["entry"]) for line in map(json.loads, lines)]


def test_it_is_told_everything_as_it_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Any
) -> None:
    (tmp_path / "conf" / "tracker").mkdir(parents=True)
    (tmp_path / "conf" / "tracker" / "mine.yaml").write_text(
        "# Mine\n_target_: trackers.listing.Listing\nfails: ''  # where\n"
    )
    monkeypatch.setenv("FEDHET_CONF", str(tmp_path / "conf"))
    (tmp_path / "alphas").mkdir()
    (tmp_path / "alphas" / "multirun.yaml").touch()  # a sweep's
    folder = tmp_path / "alphas" / "run"
    run(folder, "tracker=mine")
    (_, begun), *steps, (end, ended) = calls(folder)
    assert begun["sweep"] == "alphas"
    assert begun["settings"]["client.lr"] == 0.2
    assert begun["settings"]["plugin.fedlex.c_exp"] == 2
    assert (begun["executed"], begun["told"], begun["id"]) == (0, 0, None)
    assert [name for name, _ in steps] == ["step 1", "step 2", "step 3", "step 4"]
    assert [entry["lines"] for _, entry in steps] == [1, 2, 3, 4]
    check({i: entry["values"] for i, (_, entry) in enumerate(steps, 1)}, folder)
    assert (end, ended["status"]) == ("end", "ok")
    assert {
        "config.yaml",
        "summary.json",
        "model_card.md",
        "model.safetensors",
        "figures/accuracy.png",
        "figures/labels.png",
    } <= set(ended["files"])
    (folder / "listing.jsonl").unlink()
    (folder / "tracker.json").unlink()
    check_equal(plain, fedhet.load_run(folder), "tracker", ignored=["config.yaml"])


@pytest.mark.usefixtures("_no_figures")
@pytest.mark.parametrize("call", ["begin", "step 2", "end"])
def test_a_failure_costs_the_tracking_alone(
    tmp_path: Path, call: str, plain: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tracked = run(tmp_path / "run", OWN, f"tracker.fails={call}")
    warnings = [line.getMessage() for line in caplog.records if "tracker" in line.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith("tracker=listing failed")
    assert "there is unreachable" in warnings[0]
    assert "secret" not in warnings[0]
    for name in ("listing.jsonl", "tracker.json"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
    check_equal(plain, tracked, call, ignored=["config.yaml"])


@pytest.mark.usefixtures("_no_figures")
def test_a_run_that_goes_on_tells_what_was_missed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, OWN, "rounds=1")
    record = json.loads((folder / "tracker.json").read_text())
    assert record == {"tracker": "listing", "id": "an id", "steps": 2}
    # As if the tracker had failed in the second step.
    (folder / "tracker.json").write_text(json.dumps({**record, "steps": 1}))
    (folder / "listing.jsonl").unlink()
    main([f"resume={folder}", "rounds=2"])
    (_, begun), *steps, _ = calls(folder)
    assert (begun["executed"], begun["told"], begun["id"]) == (2, 1, "an id")
    assert [name for name, _ in steps] == ["step 2", "step 3"]


@pytest.mark.usefixtures("_no_figures")
def test_a_step_whose_evaluation_fails_is_told_and_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any) -> Any:
        raise OSError("out of memory")

    folder = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(fedhet.RunFailed, match="out of memory"):
        patch.setattr(FedClient, "assess", failing)
        run(folder, OWN)
    told = [name for name, _ in calls(folder)]
    main([f"resume={folder}"])
    again = [name for name, _ in calls(folder)[len(told) :]]
    assert told == ["begin", "step 1", "step 2", "end"]
    assert again == ["begin", "step 2", "step 3", "step 4", "end"]


@pytest.mark.slow
def test_a_resumed_run_tells_what_was_missed_and_nothing_twice(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed(folder, OWN)
    record = json.loads((folder / "tracker.json").read_text())
    assert record == {"tracker": "listing", "id": "an id", "steps": 3}
    # As if the tracker had failed in the second step.
    (folder / "tracker.json").write_text(json.dumps({**record, "steps": 1}))
    (folder / "listing.jsonl").unlink()
    main([f"resume={folder}"])
    (_, begun), *steps, _ = calls(folder)
    assert (begun["executed"], begun["told"], begun["id"]) == (2, 1, "an id")
    assert [name for name, _ in steps] == ["step 2", "step 3", "step 4"]
    main([f"resume={folder}", "rounds=4"])
    (_, begun), *steps, _ = calls(folder)[5:]
    assert (begun["executed"], begun["told"]) == (4, 4)
    assert [name for name, _ in steps] == ["step 5"]


def test_a_run_that_diverges(tmp_path: Path) -> None:
    with pytest.raises(fedhet.RunFailed):
        run(tmp_path / "run", OWN, "client.lr=1e30")
    assert calls(tmp_path / "run")[-1][1]["status"] == "failed"
    values = tracking.numbers({"a": math.nan, "b": {"c.d": math.inf}, "e": None, "f": "x"})
    assert list(values) == ["a", "b/c/d"]
    assert math.isnan(values["a"])


@pytest.mark.parametrize(
    "name",
    [
        "tensorboard",
        pytest.param("mlflow", marks=pytest.mark.slow),
        pytest.param("wandb", marks=pytest.mark.slow),
    ],
)
def test_a_missing_package(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"{name}, .*-e '\.\[{name}\]'"):
        run(tmp_path / "run", f"tracker={name}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["tracker=wandb", "tracker.mode=onlin"], r"tracker\.mode=onlin .*mean online"),
        (["tracker=wandb", "tracker.project=null"], r"tracker\.project=null "),
        (["tracker=wandb", "tracker.group=1"], r"tracker\.group=1 "),
        (["tracker=mlflow", "tracker.uri=1"], r"tracker\.uri=1 "),
        (["tracker=tensorbord"], r"unknown tracker 'tensorbord' .*did you mean tensorboard\?\)"),
        (["tracker._target_=trackers.following.killed"], "does not fit"),
        (
            ["tracker._target_=fedhet.runs.record.start.start"],
            "tracker._target_=fedhet.runs.record.start.start: .*class",
        ),
        (
            ["tracker._target_=fedhet.core.server.merging.Mean"],
            r"server\.merging\.Mean.*Tracker",
        ),
    ],
)
def test_wrong_settings(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", *lines)
    assert not (tmp_path / "run").exists()


def test_a_password_is_neither_recorded_nor_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as error:
        run(tmp_path / "run", "tracker=mlflow", "tracker.uri='http://me:secret@there'")
    assert "secret" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_clients_build_no_tracker(tmp_path: Path) -> None:
    job = Job(config.compose([*LINES, OWN, f"hydra.run.dir={tmp_path}/run"]), engine="flwr")
    (msg, *_) = job.strategy.plan(1).messages
    arrays, header = packed_message(msg)
    node = {"partition-id": msg.pid, "num-partitions": 3}
    context = Context(0, 0, node, RecordDict(), {})
    sent: Any = SimpleNamespace(content=RecordDict(settings_records(job.config)))
    client: Any = client_for(sent, context, MemoryStore())
    _, examples, _ = client.fit(arrays, header)
    assert examples > 0
    assert Listing.built == 0
    loop = begin(job)  # the server's
    assert Listing.built == 1
    loop.end("interrupted")


@pytest.mark.slow
def test_the_runs_of_a_sweep_know_it(tmp_path: Path) -> None:
    lines = ["-m", *LINES[:-2], OWN, "rounds=1,2", f"hydra.sweep.dir={tmp_path}/alphas"]
    assert main(lines) == 0
    folders = sorted(path.parent for path in tmp_path.glob("alphas/*/summary.json"))
    assert len(folders) == 2
    for folder in folders:
        assert calls(folder)[0][1]["sweep"] == "alphas"
        assert group_of(tracking.sweep_of(folder)) == "alphas"
    assert tracking.sweep_of(tmp_path / "alone") is None


def group_of(sweep: Path | None) -> str | None:
    return Tracked(Path(), sweep, settings={}, executed=0, sent_steps=0, id=None).group


def test_the_names_of_groups(tmp_path: Path) -> None:
    sweep = tmp_path / "2026-11-22" / "10-00-00"
    sweep.mkdir(parents=True)
    assert group_of(None) is None
    assert group_of(sweep) == "2026-11-22/10-00-00"
    (sweep / "experiment.json").write_text('{"experiment": "first_look"}')
    assert group_of(tracking.sweep_of(sweep / "cells" / "one")) == "first_look"


@pytest.mark.usefixtures("_no_figures")
def test_the_example_of_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "printing_tracker.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDHET_TRUST", "printing_tracker")
    own = ["tracker._target_=printing_tracker.Printing", "tracker.every=2"]
    done = run(tmp_path / "run", *own)
    printed = capsys.readouterr().out
    assert f"{done.dir} 0.2\n" in printed
    assert f"4 {done.rounds.loss_global[3]}\n" in printed
    assert f"3 {done.rounds.loss_global[2]}\n" not in printed
    assert "ok " in printed


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["ray", "flwr"])
def test_other_engines_track_at_the_server(tmp_path: Path, engine: str) -> None:
    done = run(tmp_path / "run", OWN, f"engine={engine}")
    (_, begun), *steps, (end, _) = calls(done.dir)
    assert begun["told"] == 0
    check({i: entry["values"] for i, (_, entry) in enumerate(steps, 1)}, done.dir)
    assert end == "end"
