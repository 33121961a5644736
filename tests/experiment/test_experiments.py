"""Experiments from the command line: what is run, what is kept, and what is told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from experiment.mine import SMALL, run, written

import fedhet
from fedhet.cli import main
from fedhet.experiment import code

pytestmark = pytest.mark.usefixtures("own_process")
Write = Callable[..., None]
QUICK = f"rounds: 2{SMALL}"
TWO = f"""{QUICK}
axes:
  method: {{FedAvg: method=fedavg, FedSGD: method=fedsgd}}
  seed: [0, 1]
"""


def record(folder: str = "experiments/mine") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(folder, "experiment.json").read_text())
    return content


def summaries() -> dict[str, dict[str, Any]]:
    files = sorted(Path("experiments/mine/cells").glob("*/summary.json"))
    return {file.parent.name: json.loads(file.read_text()) for file in files}


def test_an_experiment_is_run_once(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write(TWO)
    assert run() == 0
    out = capsys.readouterr().out.splitlines()
    home = Path("experiments/mine").resolve()
    assert "experiment mine: 4 of 4 runs are there" in out
    assert out[-2:] == [f"report: {home / 'report' / 'index.html'}", f"run folder: {home}"]
    before = written()
    assert len(before) == 4
    assert {(s["method"], s["seed"], s["status"]) for s in summaries().values()} == {
        (method, seed, "ok") for method in ("fedavg", "fedsgd") for seed in (0, 1)
    }
    cells = record()["cells"]
    assert {Path(cell["folder"]).name for cell in cells} == set(before)

    assert run() == 0
    assert written() == before  # nothing was run again

    assert run("seed=0,1,2") == 0
    after = written()
    assert len(after) == 6
    assert {name: after[name] for name in before} == before

    lost = next(iter(before))
    Path("experiments/mine/cells", lost, "cell.json").unlink()
    assert run() == 0
    assert [name for name in before if written()[name] != before[name]] == [lost]


def test_trials_choose_by_validation(write: Write) -> None:
    """The choice is recomputed here from the records of the trials."""
    write(f"{TWO}\ntune: {{seeds: [7, 8], space: {{client.lr: [0.001, 0.3, 0.1]}}}}")
    assert run() == 0
    cells = record()["cells"]
    for entry in record()["tuned"]:
        scores: dict[float, list[float]] = {}
        for cell in cells:
            own = {**cell["axes"], "seed": None} == {**entry["axes"], "seed": None}
            if cell["kind"] == "trial" and own:
                rows = Path("experiments/mine", cell["folder"], "rounds.jsonl").read_text()
                last = json.loads(rows.splitlines()[-1])
                scores.setdefault(cell["tuned"]["client.lr"], []).append(last["acc_val_weighted"])
        means = {lr: sum(values) / len(values) for lr, values in scores.items()}
        assert {len(values) for values in scores.values()} == {2}
        assert entry["validation"] == pytest.approx(max(means.values()))
        assert means[entry["chosen"]["client.lr"]] == max(means.values())
        runs = [
            c for c in cells if c["kind"] == "run" and c["axes"]["method"] in entry["axes"].values()
        ]
        assert len(runs) == 2
        for cell in runs:
            config = Path("experiments/mine", cell["folder"], "overrides.yaml").read_text()
            assert f"client.lr={entry['chosen']['client.lr']}" in config
            assert cell["tuned"] == entry["chosen"]


def test_a_failed_cell_does_not_end_the_others(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(f"{QUICK}\naxes:\n  partition.clients: [3, 5000]\n  seed: [0]")
    assert run() == 1
    printed = capsys.readouterr()
    assert "missing: clients=5000 seed=0: " in printed.err
    assert "more clients than samples allow" in printed.err
    assert "experiment mine: 1 of 2 runs are there" in printed.out
    (failed,) = [
        cell
        for path in Path("experiments/mine/cells").glob("*/cell.json")
        if (cell := json.loads(path.read_text()))["status"] != "finished"
    ]
    assert failed["status"] == "failed"
    assert "more clients than samples allow" in failed["reason"]


def test_runs_without_a_trial_are_not_run(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        f"{QUICK}\naxes:\n  partition.clients: [3, 5000]\n  seed: [0]\n"
        "tune: {space: {client.lr: [.1, .2]}}"
    )
    assert run() == 1
    err = capsys.readouterr().err
    assert "clients=5000 seed=0: none of the trials that would choose its settings" in err
    assert len([s for s in summaries().values() if s["seed"] == 0]) == 1


def test_other_code_is_never_mixed_in_unseen(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(TWO)
    assert run("seed=0") == 0
    before = written()
    monkeypatch.setattr(code, "digest", lambda: "0123456789abcdef")
    monkeypatch.setattr(code, "_commit", lambda: "f" * 40)
    monkeypatch.setattr(code, "_version", lambda package: "0.0.9")
    assert run() == 2
    err = capsys.readouterr().err
    assert "2 of the 4 runs were made by other code" in err
    assert "fedhet 0.0.9 at commit fffffff, code 01234567" in err
    assert written() == before
    assert run("on_other_code=keep") == 0
    assert {name: written()[name] for name in before} == before
    assert len(written()) == 4
    assert run("on_other_code=rerun") == 0
    assert len(written()) == 4
    assert not set(before.values()) & set(written().values())
    assert run() == 0


def test_a_folder_holds_one_experiment(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write(TWO)
    write(TWO, name="other")
    assert run("seed=0") == 0
    assert main.main(["experiment=other", "hydra.sweep.dir=experiments/mine"]) == 2
    assert "the folder holds the experiment mine" in capsys.readouterr().err


def test_nothing_is_left_where_a_setting_is_wrong(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(TWO)
    assert run("client.lr=0") == 2
    assert "client.lr=0 is not allowed" in capsys.readouterr().err
    assert not Path("experiments/mine/cells").exists()


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_experiment_goes_on(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_: signal.Signals
) -> None:
    """Runs that were finished stay, the one that was stopped goes on, and all bytes are equal."""
    long = TWO.replace("rounds: 2", "rounds: 40").replace("seed: [0, 1]", "seed: [0]")
    write(f"{long}\ncheckpoint: {{every: 0}}")
    assert run() == 0
    whole = {name: summary["weights_sha256"] for name, summary in summaries().items()}
    folder = tmp_path / "stopped"
    command = [sys.executable, "-m", "fedhet", "experiment=mine", "hydra/launcher=basic"]
    command.append(f"hydra.sweep.dir={folder}")
    monkeypatch.chdir(Path(fedhet.__file__).parents[1])  # this fedhet, also if it is not installed
    printed = tmp_path / "printed.txt"
    with printed.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
    second = folder / "cells" / sorted(whole)[1] / "rounds.jsonl"
    deadline = time.monotonic() + 300
    while not second.exists() or second.read_bytes().count(b"\n") < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal_)
    code = process.wait(60)
    if signal_ == signal.SIGINT:
        assert code == 130
        page = folder / "report" / "index.html"
        *_, about, last = printed.read_text().splitlines()
        assert "experiment mine: stopped; 1 of 2 runs are there" in printed.read_text()
        assert (about, last) == (f"report: {page}", f"run folder: {folder}")
        assert page.exists()
    else:
        assert code == -signal.SIGKILL
    first = folder / "cells" / sorted(whole)[0] / "summary.json"
    before = first.stat().st_mtime_ns
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "the run goes on after round" in done.stderr
    assert first.stat().st_mtime_ns == before
    for name, sha256 in whole.items():
        summary = json.loads((folder / "cells" / name / "summary.json").read_text())
        assert summary["weights_sha256"] == sha256
    names = {path.name for path in (folder / "cells").iterdir()}
    assert names == {path.name for path in (tmp_path / "experiments/mine/cells").iterdir()}


def test_a_part_is_run_and_the_rest_later(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write(f"{TWO}\ntune: {{space: {{client.lr: [.1, .2]}}}}")
    assert run("axes.method=[*Avg]", "axes.seed=1") == 0
    out = capsys.readouterr().out
    assert "experiment mine: 3 of 3 runs are there, 5 more were not asked for" in out
    before = written()
    assert {(s["method"], s["seed"]) for s in summaries().values()} == {
        ("fedavg", 1000),
        ("fedavg", 1),
    }
    assert len(record()["cells"]) == 8
    assert run() == 0
    assert {name: written()[name] for name in before} == before
    assert len(written()) == 8
    assert run("axes.method=FedAvgg") == 2
    assert "no value of this axis fits (did you mean FedAvg?)" in capsys.readouterr().err
    assert run("axes.model=mlp") == 2
    assert "this experiment has no axis model" in capsys.readouterr().err


def test_a_run_that_diverges_is_a_result(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write(f"{QUICK}\naxes: {{client.lr: [.1, 1.0e+30], seed: [0]}}")
    assert run("method=fedavg") == 0
    out = capsys.readouterr().out
    assert "experiment mine: 2 of 2 runs are there" in out
    assert "Training diverged" in out
    before = written()
    assert run("method=fedavg") == 0
    assert written() == before


def test_a_refused_command_changes_nothing(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write(f"{TWO}\ntune: {{space: {{client.lr: [.1, .2]}}}}")
    assert run() == 0
    before = record()
    assert before["tuned"]
    monkeypatch.setattr(code, "digest", lambda: "0123456789abcdef")
    assert run() == 2
    assert record() == before


def test_two_labels_of_equal_overrides_are_two_runs(write: Write) -> None:
    case = "method=fedavg client.lr=0.1"
    write(f"{QUICK}\naxes:\n  case: {{A: {case}, B: {case}}}\n  seed: [0]")
    assert run() == 0
    before = written()
    assert len(before) == 2
    for name in before:
        (Path("experiments/mine/cells") / name / "cell.json").unlink()
        last = written()
        assert run() == 0
        assert [other for other in before if written()[other] != last[other]] == [name]


def test_trials_show_their_validation_score(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever watches must not choose by test data."""
    write(f"{TWO}\ntune: {{space: {{client.lr: [.1, .2]}}}}")
    assert run("seed=0", "method=fedavg") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert [line.partition("]")[0] for line in lines] == ["[1/3", "[2/3", "[3/3"]
    assert all("trial" in line and "] validation accuracy " in line for line in lines[:2])
    assert "] accuracy " in lines[2]
