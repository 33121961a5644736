"""Measures of diverged runs, of runs without a global score, and of traffic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report.made_runs import change, make_experiment
from safetensors.numpy import save_file

from fedhet.study.report.results import results
from papers.measures import value
from papers.runs import ReproducedRun, runs_of

SCORES = {"good": 0.9, "bad": 0.5, "lost": 0.95}
NAN = "weights, tensor 'body.1.weight': holds NaN or infinite values"


def make(folder: Path) -> dict[str, Path]:
    """Runs of four rounds with one seed; method -> folder."""
    axes = {"method": list(SCORES), "seed": [0]}
    home = make_experiment(folder, axes, lambda place: SCORES[place["method"]])
    cells = json.loads((home / "experiment.json").read_text())["cells"]
    return {cell["axes"]["method"]: home / cell["folder"] for cell in cells}


def read(runs: dict[str, Path]) -> dict[str, ReproducedRun]:
    home = runs["good"].parent.parent
    return {str(run.cell.axes["method"]): run for run in runs_of(results(home), "method")}


def rewrite(run: Path, *, keep: int = 4, **entries: Any) -> None:
    rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({**row, **entries}) + "\n" for row in rows[:keep])
    (run / "rounds.jsonl").write_text(text)


def test_a_run_that_diverges_gains_nothing_by_its_early_end(tmp_path: Path) -> None:
    folders = make(tmp_path / "made")
    lost = folders["lost"]
    rewrite(lost, keep=1)  # its best score is from the first round
    change(lost / "cell.json", status="failed", reason=NAN)
    change(
        lost / "summary.json",
        status="failed",
        reason=NAN,
        accuracy={"last": None, "best_val": None, "best_test": None},
        acc_clients_mean=None,
        loss=None,
    )
    runs = read(folders)
    assert {name: value("rank", run) for name, run in runs.items()} == {
        "good": 1,
        "bad": 2,
        "lost": 3,
    }
    assert value("clients", runs["lost"]) == 0
    assert value("rounds@.8", runs["lost"]) == value("rounds@.8", runs["bad"]) == 5
    assert value("rounds@.4", runs["lost"]) == 1  # it has reached that
    assert value("effective_rounds", runs["lost"]) == 5
    assert value("effective_rounds", runs["bad"]) == 4
    assert math.isnan(value("loss", runs["lost"]))
    assert math.isnan(value("loss@2", runs["lost"]))
    assert value("loss@1", runs["lost"]) == 1.0


def test_the_loss_is_that_on_the_global_test_set_where_there_is_one(tmp_path: Path) -> None:
    folders = make(tmp_path / "made")
    rewrite(folders["bad"], loss_global=None)
    runs = read(folders)
    assert value("loss@1", runs["good"]) == 1.0
    assert value("loss@1", runs["bad"]) == 1.5


def test_what_depends_on_all_methods_has_no_value_while_one_of_them_is_missing(
    tmp_path: Path,
) -> None:
    folders = make(tmp_path / "made")
    with (folders["good"] / "rounds.jsonl").open("a") as file:
        file.write(json.dumps({"phase": "feddisk.density", "step": 1, "seconds": {}}) + "\n")
    assert value("classifier_rounds", read(folders)["good"]) == 5  # .95 is above its own .9
    (folders["lost"] / "summary.json").unlink()
    runs = read(folders)
    for measure in ("rank", "effective_rounds", "classifier_rounds"):
        assert math.isnan(value(measure, runs["good"]))
    assert math.isnan(value("rank", runs["bad"]))
    assert value("effective_rounds", runs["bad"]) == 4  # its own best score


def test_the_training_loss_is_that_of_the_last_evaluation_that_has_one(tmp_path: Path) -> None:
    folders = make(tmp_path / "made")
    rewrite(folders["good"], loss_train_weighted=0.25)
    runs = read(folders)
    assert value("train_loss", runs["good"]) == value("train_loss@2", runs["good"]) == 0.25
    assert math.isnan(value("train_loss", runs["bad"]))


def test_a_run_that_diverges_late_keeps_its_score(tmp_path: Path) -> None:
    folders = make(tmp_path / "made")
    for name in ("summary", "cell"):
        change(folders["lost"] / f"{name}.json", status="failed", reason=NAN)
    assert value("last", read(folders)["lost"]) == SCORES["lost"]


def test_scores_over_all_samples_are_averaged_over_the_last_evaluations(tmp_path: Path) -> None:
    folders = make(tmp_path / "made")
    path = folders["good"] / "rounds.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    weighted = (0.1, 0.5, 0.7, 0.8)
    for row, score in zip(rows, weighted, strict=True):
        row["acc_clients_weighted"] = score
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    change(folders["good"] / "summary.json", acc_last_k={"mean": 0.9, "evaluations": 3})
    runs = read(folders)
    assert value("last_k_weighted", runs["good"]) == pytest.approx(2 / 3)
    assert math.isnan(value("last_k_weighted", runs["bad"]))


def test_personal_scores_are_those_over_all_samples_after_the_last_round(tmp_path: Path) -> None:
    folders = make(tmp_path / "made")
    rewrite(folders["good"], acc_personal_mean=0.6, acc_personal_weighted=0.7)
    runs = read(folders)
    assert value("personal_weighted", runs["good"]) == 0.7
    assert math.isnan(value("personal_weighted", runs["bad"]))


def test_the_first_round_is_not_timed(tmp_path: Path) -> None:
    folders = make(tmp_path / "made")
    path = folders["good"] / "rounds.jsonl"
    first, *others = path.read_text().splitlines()
    slow = {**json.loads(first), "seconds": {"train": 60.0}}
    path.write_text("\n".join([json.dumps(slow), *others]))
    rewrite(folders["bad"], keep=1, seconds={"train": 60.0, "evaluate": 5.0})
    runs = read(folders)
    assert value("minutes_per_round", runs["good"]) == pytest.approx(0.1 / 60)
    assert value("minutes_per_round", runs["bad"]) == 1


def test_the_spread_is_that_of_the_clients(tmp_path: Path) -> None:
    """The scores are .8, .88, .96, 1.04 and 1.12 times .5, whichever kind of models comes first."""
    folders = make(tmp_path / "made")
    spread = 0.5 * 0.08 * math.sqrt(2)
    assert value("client_spread", read(folders)["bad"]) == pytest.approx(spread)
    change(folders["bad"] / "summary.json", models=["personal"])
    assert math.isnan(value("client_spread", read(folders)["bad"]))


def test_a_gain_is_that_over_the_host_with_the_same_seed(tmp_path: Path) -> None:
    home = make(tmp_path / "made")["good"].parent.parent
    runs = runs_of(results(home), "method", {"good": "bad", "lost": "missing"})
    gains = {str(run.cell.axes["method"]): value("gain_clients", run) for run in runs}
    assert gains["good"] == pytest.approx(0.4)
    assert math.isnan(gains["bad"]) and math.isnan(gains["lost"])


def test_effective_rounds_compare_what_all_methods_have(tmp_path: Path) -> None:
    """One method has no global model, and the global test set is easier than the clients' own."""
    folders = make(tmp_path / "made")
    rewrite(folders["bad"], acc_global=None)
    disk = folders["lost"]
    rewrite(disk, acc_global=0.99)
    with (disk / "rounds.jsonl").open("a") as file:
        file.write(json.dumps({"phase": "feddisk.density", "step": 1, "seconds": {}}) + "\n")
    runs = read(folders)
    # The clients' scores of the three end at .9, .5 and .95, and are .8313 in the third round.
    assert value("classifier_rounds", runs["lost"]) == 4
    assert value("effective_rounds", runs["lost"]) == 5
    assert value("effective_rounds", runs["bad"]) == 4


def test_traffic_is_counted_in_parameters(tmp_path: Path) -> None:
    folders = make(tmp_path / "made")
    tensors = {"head.weight": (5, 4), "head.bias": (5,), "body.1.running_mean": (7,)}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    save_file(arrays, folders["good"] / "model.safetensors")
    run = read(folders)["good"]
    assert value("model_size", run) == 25
    assert value("models_per_round", run) == pytest.approx(1000 / 5 / 4 / 25)  # 5 clients, floats


def test_the_cost_is_that_of_the_papers_equations(tmp_path: Path) -> None:
    """FedDisk, equations 18 and 19, with the rounds and sizes of its FEMNIST experiment."""
    folders = make(tmp_path / "made")
    classifier, density = {"model": 447_000 * 4 * 5}, {"density": 614_000 * 4 * 5}  # of 5 clients

    def rounds(phase: str, number: int, sent: dict[str, int], accuracy: float) -> list[str]:
        own = {"phase": phase, "accepted": 5, "seconds": {}, "bytes": {"up": sent}}
        scores = ((step, accuracy * step / number) for step in range(1, number + 1))
        return [json.dumps({**own, "step": step, "acc_clients_mean": s}) for step, s in scores]

    fedrod = rounds("train", 1015, classifier, 0.56)
    feddisk = rounds("feddisk.density", 15, density, 0) + rounds("train", 105, classifier, 0.56)
    for method, lines in {"good": fedrod, "lost": feddisk}.items():
        (folders[method] / "rounds.jsonl").write_text("\n".join(lines))
    runs = read(folders)
    assert value("cost", runs["good"]) == 907_410_000
    assert value("cost", runs["lost"]) == 112_290_000
    assert value("made_rounds", runs["lost"]) == 15
    assert value("made_size", runs["lost"]) == 614_000
    assert math.isnan(value("made_size", runs["good"]))


def test_classes_are_those_of_which_a_client_has_samples(tmp_path: Path) -> None:
    folders = make(tmp_path / "made")
    counts = [[3, 0, 1], [0, 0, 2]]
    change(folders["good"] / "partition.json", counts=counts)
    assert value("classes_per_client", read(folders)["good"]) == 1.5
