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
from experiment.finished import Finished
from experiment.mine import SMALL, run, written
from experiment.pretend import DIVERGED, Pretend

import fedhet
from fedhet.study import code, report
from fedhet.study.cells import Cell

pytestmark = pytest.mark.usefixtures("own_process")
Write = Callable[..., None]
QUICK = f"rounds: 2{SMALL}"
TWO = f"""{QUICK}
axes:
  method: {{FedAvg: method=fedavg, FedSGD: method=fedsgd}}
  seed: [0, 1]
"""


def summaries() -> dict[str, dict[str, Any]]:
    files = sorted(Path("experiments/mine/cells").glob("*/summary.json"))
    return {file.parent.name: json.loads(file.read_text()) for file in files}


def test_what_an_experiment_leaves_and_says(finished: Finished) -> None:
    assert finished.code == 0
    out = finished.out.splitlines()
    home = finished.folder
    assert "experiment mine: 6 of 6 runs are complete" in out
    assert out[-2:] == [f"report: {home / 'report' / 'index.html'}", f"run folder: {home}"]
    page = (home / "report" / "index.html").read_text()
    assert "FedAvg" in page and "FedSGD" in page
    cells = finished.record["cells"]
    assert {path.name for path in (home / "cells").iterdir()} == {
        Path(cell["folder"]).name for cell in cells
    }
    about = [(cell["kind"], cell["axes"], finished.summary(cell)) for cell in cells]
    assert [(kind, s["method"], s["seed"], s["status"]) for kind, _, s in about] == [
        (kind, method, seed, "ok")
        for kind, seed, methods in (
            ("trial", 7, ["fedavg", "fedavg", "fedsgd", "fedsgd"]),
            ("run", 0, ["fedavg", "fedsgd"]),
        )
        for method in methods
    ]
    assert all(s["method"] == axes["method"].lower() for _, axes, s in about)


def test_trials_choose_by_validation(finished: Finished) -> None:
    """The choice is recomputed here from the records of the trials."""
    cells = finished.record["cells"]
    for entry in finished.record["tuned"]:
        scores = {}
        for cell in cells:
            if cell["kind"] == "trial" and cell["axes"]["method"] == entry["axes"]["method"]:
                rows = (finished.folder / cell["folder"] / "rounds.jsonl").read_text()
                last = json.loads(rows.splitlines()[-1])
                scores[cell["tuned"]["client.lr"]] = last["acc_val_weighted"]
        assert len(scores) == 2
        assert entry["validation"] == pytest.approx(max(scores.values()))
        assert scores[entry["chosen"]["client.lr"]] == max(scores.values())
        (run,) = (
            c for c in cells if c["kind"] == "run" and c["axes"]["method"] in entry["axes"].values()
        )
        overrides = (finished.folder / run["folder"] / "overrides.yaml").read_text()
        assert f"client.lr={entry['chosen']['client.lr']}" in overrides
        assert run["tuned"] == entry["chosen"]


def test_trials_show_their_validation_score(finished: Finished) -> None:
    """Whoever watches must not choose by test data."""
    lines = [line for line in finished.err.splitlines() if line.startswith("[")]
    assert [line.partition("]")[0] for line in lines] == [f"[{n}/6" for n in range(1, 7)]
    assert all("trial" in line and "] acc_val_weighted " in line for line in lines[:4])
    assert all("] acc_global " in line and "trial" not in line for line in lines[4:])


def test_what_is_there_is_not_run_again(
    write: Write, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    write(TWO)
    assert pretend.run() == 0
    every = ["FedAvg seed=0", "FedAvg seed=1", "FedSGD seed=0", "FedSGD seed=1"]
    assert pretend.launched == every
    before = pretend.written()
    assert pretend.run() == 0
    assert not pretend.launched and pretend.written() == before
    assert "experiment mine: 4 of 4 runs are complete\n" in capsys.readouterr().out
    lost = next(iter(before))
    (pretend.folder / "cells" / lost / "cell.json").unlink()
    assert pretend.run() == 0
    assert pretend.launched == every[:1]


def test_more_seeds_leave_what_is_there(write: Write, pretend: Pretend) -> None:
    write(TWO)
    assert pretend.run() == 0
    before = pretend.written()
    assert pretend.run("seed=0,1,2") == 0
    assert pretend.launched == ["FedAvg seed=2", "FedSGD seed=2"]
    after = pretend.written()
    assert {name: after[name] for name in before} == before


def test_trials_choose_by_the_mean_over_their_seeds(write: Write, pretend: Pretend) -> None:
    """Not by the best run, nor by the first or the last round or trial."""
    write(f"{TWO}\ntune: {{seeds: [7, 8], space: {{client.lr: [0.001, 0.3, 0.1]}}}}")
    scores = {(0.001, 7): 0.9, (0.001, 8): 0.1, (0.3, 7): 0.6, (0.3, 8): 0.5}
    scores |= {(0.1, 7): 0.3, (0.1, 8): 0.4}

    def rows(cell: Cell) -> list[dict[str, float]]:
        score = scores.get((cell.tuned["client.lr"], cell.axes["seed"]), 0.0)
        return [{"acc_val_weighted": 1 - score}, {"acc_val_weighted": score}]

    pretend.rows = rows  # type: ignore[assignment]
    assert pretend.run("axes.method=FedAvg") == 0
    assert len(pretend.launched) == 6 + 2
    one, other = pretend.record()["tuned"]
    assert one["axes"] == {"method": "FedAvg"} and one["chosen"] == {"client.lr": 0.3}
    assert one["validation"] == pytest.approx(0.55)
    assert (one["trials"], one["at_the_edge"]) == (3, ["client.lr"])
    assert other["axes"] == {"method": "FedSGD"} and other["chosen"] is None
    runs = [cell for cell in pretend.record()["cells"] if cell["kind"] == "run"]
    assert [cell["tuned"] for cell in runs] == [{"client.lr": 0.3}] * 2 + [{}] * 2
    assert all("client.lr=0.3" in cell["overrides"] for cell in runs[:2])


@pytest.mark.slow
def test_an_experiment_is_run_once(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write(TWO)
    assert run() == 0
    out = capsys.readouterr().out.splitlines()
    home = Path("experiments/mine").resolve()
    assert "experiment mine: 4 of 4 runs are complete" in out
    assert out[-2:] == [f"report: {home / 'report' / 'index.html'}", f"run folder: {home}"]
    before = written()
    assert len(before) == 4
    assert {(s["method"], s["seed"], s["status"]) for s in summaries().values()} == {
        (method, seed, "ok") for method in ("fedavg", "fedsgd") for seed in (0, 1)
    }
    assert set(before) == {path.name for path in Path("experiments/mine/cells").iterdir()}

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


def test_a_failed_cell_does_not_end_the_others(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "write", lambda folder: report.Written(folder, []))
    write(f"{QUICK}\naxes:\n  partition.clients: [5000, 3]\n  seed: [0]")
    assert run() == 1
    printed = capsys.readouterr()
    assert "missing: clients=5000 seed=0: " in printed.err
    assert "partition.clients=5000 " in printed.err
    assert "experiment mine: 1 of 2 runs are complete" in printed.out
    (failed,) = [
        cell
        for path in Path("experiments/mine/cells").glob("*/cell.json")
        if (cell := json.loads(path.read_text()))["status"] != "finished"
    ]
    assert failed["status"] == "failed"
    assert "partition.clients=5000 " in failed["reason"]


def test_runs_without_a_trial_are_not_run(
    write: Write, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial that has diverged chooses nothing either."""
    write(f"{TWO}\ntune: {{seeds: [1000], space: {{client.lr: [.1, .2]}}}}")
    pretend.fails = lambda cell: {"trial FedSGD": "out of memory"}.get(
        cell.label.partition(" seed")[0]
    )
    assert pretend.run() == 1
    err = capsys.readouterr().err
    assert "missing: FedSGD seed=0: its settings cannot be chosen" in err
    assert err.count("out of memory") == 2 and err.count("no trial for them") == 2
    assert pretend.launched[-2:] == ["FedAvg seed=0 lr=0.1", "FedAvg seed=1 lr=0.1"]
    pretend.fails = lambda cell: DIVERGED if cell.kind == "trial" else None
    assert pretend.run() == 1
    assert pretend.launched == [f"trial FedSGD seed=1000 lr={lr}" for lr in (0.1, 0.2)]


def test_other_code_is_never_mixed_in_unseen(
    write: Write,
    pretend: Pretend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(TWO)
    assert pretend.run("seed=0") == 0
    before, record = pretend.written(), pretend.record()
    monkeypatch.setattr(code, "digest", lambda: "0123456789abcdef")
    monkeypatch.setattr(code, "_commit", lambda: "f" * 40)
    monkeypatch.setattr(code, "_version", lambda package: "0.0.9")
    assert pretend.run() == 2
    err = capsys.readouterr().err
    assert "2 of the 4 runs were made by other code" in err
    assert "fedhet 0.0.9 at commit fffffff, code 01234567" in err
    assert pretend.written() == before and pretend.record() == record
    assert pretend.run("on_other_code=keep") == 0
    assert {name: pretend.written()[name] for name in before} == before
    assert pretend.launched == ["FedAvg seed=1", "FedSGD seed=1"]
    assert pretend.run("on_other_code=rerun") == 0
    assert pretend.launched == ["FedAvg seed=0", "FedSGD seed=0"]
    assert len(pretend.written()) == 4
    assert not set(before.values()) & set(pretend.written().values())
    assert pretend.run() == 0 and not pretend.launched


def test_a_folder_holds_one_experiment(
    write: Write, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    write("axes: {seed: [0]}")
    pretend.folder.mkdir(parents=True)
    (pretend.folder / "experiment.json").write_text('{"experiment": "other"}')
    assert pretend.run() == 2
    assert "experiment other" in capsys.readouterr().err
    assert not pretend.launched


def test_nothing_is_left_where_a_setting_is_wrong(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(TWO)
    assert run("client.lr=0") == 2
    assert "client.lr=0 " in capsys.readouterr().err
    assert not Path("experiments/mine/cells").exists()


def test_an_interrupted_experiment_goes_on(
    write: Write, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    write(TWO)

    def interrupted(cell: Cell) -> str | None:
        if cell.label == "FedAvg seed=1":
            raise KeyboardInterrupt
        return None

    pretend.fails = interrupted
    assert pretend.run() == 130
    printed = capsys.readouterr()
    assert "experiment mine: stopped; 1 of 4 runs are complete" in printed.out
    assert printed.out.splitlines()[-1] == f"run folder: {pretend.folder}"
    assert printed.err.splitlines()[-1] == "interrupted"
    stopped = pretend.folder / "cells" / pretend.record()["cells"][1]["folder"].partition("/")[2]
    assert json.loads((stopped / "cell.json").read_text())["status"] == "waiting"
    pretend.fails = lambda cell: None
    assert pretend.run() == 0
    assert pretend.launched == ["FedAvg seed=1", "FedSGD seed=0", "FedSGD seed=1"]


@pytest.mark.slow
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
        *_, about, last = printed.read_text().splitlines()
        assert about == "experiment mine: stopped; 1 of 2 runs are complete"
        assert last == f"run folder: {folder}"
    else:
        assert code == -signal.SIGKILL
    first = folder / "cells" / sorted(whole)[0] / "summary.json"
    before = first.stat().st_mtime_ns
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "the run continues after round" in done.stderr
    assert first.stat().st_mtime_ns == before
    for name, sha256 in whole.items():
        summary = json.loads((folder / "cells" / name / "summary.json").read_text())
        assert summary["weights_sha256"] == sha256
    names = {path.name for path in (folder / "cells").iterdir()}
    assert names == {path.name for path in (tmp_path / "experiments/mine/cells").iterdir()}


def test_a_part_is_run_and_the_rest_later(
    write: Write, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    write(f"{TWO}\ntune: {{seeds: [1000], space: {{client.lr: [.1, .2]}}}}")
    assert pretend.run("axes.method=[*Avg]", "axes.seed=1") == 0
    out = capsys.readouterr().out
    assert "experiment mine: 3 of 3 runs are complete; 5 other runs were not requested" in out
    trials = ["trial FedAvg seed=1000 lr=0.1", "trial FedAvg seed=1000 lr=0.2"]
    assert pretend.launched == [*trials, "FedAvg seed=1 lr=0.1"]
    before = pretend.written()
    assert len(pretend.record()["cells"]) == 8
    assert pretend.run() == 0
    assert {name: pretend.written()[name] for name in before} == before
    assert len(pretend.written()) == 8 and len(pretend.launched) == 5
    assert pretend.run("axes.method=FedAvgg") == 2
    assert "(did you mean FedAvg?)" in capsys.readouterr().err
    assert pretend.run("axes.model=mlp") == 2
    assert "axes=model is not allowed" in capsys.readouterr().err


def test_a_run_that_diverges_is_a_result(write: Write, pretend: Pretend) -> None:
    """It is not run again, unlike one that fails."""
    write("axes: {client.lr: [.1, 1.0e+30], seed: [0]}")
    pretend.fails = lambda cell: DIVERGED if "1e+30" in cell.label else "out of memory"
    assert pretend.run() == 1
    assert pretend.run() == 1 and pretend.launched == ["lr=0.1 seed=0"]
    pretend.fails = lambda cell: None
    assert pretend.run() == 0 and pretend.launched == ["lr=0.1 seed=0"]


@pytest.mark.slow
def test_the_report_has_a_run_that_diverges(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write(f"{QUICK}\naxes: {{client.lr: [.1, 1.0e+30], seed: [0]}}")
    assert run("method=fedavg") == 0
    out = capsys.readouterr().out
    assert "experiment mine: 2 of 2 runs are complete" in out
    assert "Training diverged" in out
    before = written()
    assert run("method=fedavg") == 0
    assert written() == before


def test_a_degraded_run_is_told_by_the_exit_code(write: Write, pretend: Pretend) -> None:
    write("axes: {seed: [0, 1]}")
    pretend.about = lambda cell: {"degraded": cell.axes["seed"] == 1}
    assert pretend.run("axes.seed=0") == 0
    assert pretend.run() == 3


def test_two_labels_of_equal_overrides_are_two_runs(write: Write, pretend: Pretend) -> None:
    case = "method=fedavg client.lr=0.1"
    write(f"{QUICK}\naxes:\n  case: {{A: {case}, B: {case}}}\n  seed: [0]")
    assert pretend.run() == 0
    assert pretend.launched == ["case=A seed=0", "case=B seed=0"]
    for name, label in zip(pretend.written(), pretend.launched, strict=True):
        (pretend.folder / "cells" / name / "cell.json").unlink()
        assert pretend.run() == 0
        assert pretend.launched == [label]
