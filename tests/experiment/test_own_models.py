"""With `report.metric=personal`, each method counts with the models that its clients would use."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from experiment.mine import SMALL, run
from experiment.pretend import Pretend

from fedhet.runs.record.scores import validation_score
from fedhet.study.cells import Cell
from fedhet.study.report.compared import Study
from fedhet.study.report.plots import curve_points
from fedhet.study.report.results import results

KINDS = {"Shared": "", "Tuned locally": "finetuned_", "Own": "personal_"}


ROWS = [
    {"acc_val_weighted": 0.9, "acc_personal_val_weighted": 0.1, "acc_finetuned_val_weighted": 0.3},
    {"acc_val_weighted": 0.6, "acc_personal_val_weighted": 0.7},
    {"round": 3},
    {"acc_val_weighted": 0.5, "acc_personal_val_weighted": 0.4, "acc_finetuned_val_weighted": 0.2},
]
THREE = """
axes:
  method:
    Shared: method=fedavg
    Tuned locally: method=fedavg eval.finetune_epochs=1
    Own: method=ditto eval.finetune_epochs=1
  seed: [0]
tune: {seeds: [1000], space: {client.lr: [.3, .001]}}
report: {metric: personal}"""


@pytest.mark.parametrize(
    ("metric", "models", "score"),
    [
        ("last", ["personal", "finetuned"], 0.5),
        ("clients", [], 0.5),
        ("best_val", ["personal"], 0.9),
        ("last_k", [], 0.55),
        ("personal", [], 0.5),
        ("personal", ["finetuned"], 0.2),
        ("personal", ["finetuned", "personal"], 0.4),
        ("personal_best_val", ["personal"], 0.7),
        ("personal_best_val", ["finetuned"], 0.3),
        ("finetuned", ["personal", "finetuned"], 0.2),
        ("finetuned", ["personal"], 0.5),
    ],
)
def test_which_score_decides(metric: str, models: list[str], score: float) -> None:
    summary = {"models": models, "acc_last_k": {"evaluations": 2}}
    assert validation_score(summary, ROWS, metric) == pytest.approx(score)


def test_a_score_that_is_missing_or_not_finite_decides_nothing() -> None:
    assert validation_score({}, [{"round": 1}], "last") is None
    rows = [{"acc_val_weighted": 0.5}, {"acc_val_weighted": None}]
    assert math.isnan(validation_score({}, rows, "last") or 0)
    assert validation_score({}, rows, "best_val") == 0.5
    assert math.isnan(validation_score({}, rows[1:], "best_val") or 0)


@pytest.mark.usefixtures("own_process")
def test_trials_choose_by_the_models_that_count(
    write: Callable[..., None], pretend: Pretend
) -> None:
    """Each method by its own kind: the rate that is best for one of them is worse for others."""
    write(THREE)
    models = {"Shared": [], "Tuned locally": ["finetuned"], "Own": ["personal", "finetuned"]}
    high = {"Shared": "", "Tuned locally": "finetuned_", "Own": "personal_"}

    def rows(cell: Cell) -> list[dict[str, float]]:
        low = cell.tuned["client.lr"] == 0.3
        counts = high[str(cell.axes["method"])]
        return [
            {
                f"acc_{kind}val_weighted": 0.2 if low == (kind == counts) else 0.8
                for kind in high.values()
            }
        ]

    pretend.rows = rows
    pretend.about = lambda cell: {"models": models[str(cell.axes["method"])]}
    assert pretend.run() == 0
    tuned = pretend.record()["tuned"]
    assert [entry["chosen"] for entry in tuned] == [{"client.lr": 0.001}] * 3
    assert [entry["validation"] for entry in tuned] == [0.8] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("own_process")
def test_trials_and_runs_count_with_the_same_models(
    write: Callable[..., None],
) -> None:
    write(f"rounds: 2\n{SMALL}\n{THREE}")
    assert run() == 0
    home = Path("experiments/mine")
    record = json.loads((home / "experiment.json").read_text())
    for entry in record["tuned"]:
        method = entry["axes"]["method"]
        tried = [
            c for c in record["cells"] if c["kind"] == "trial" and c["axes"]["method"] == method
        ]
        scores = {
            cell["tuned"]["client.lr"]: last_of(home, cell)[f"acc_{KINDS[method]}val_weighted"]
            for cell in tried
        }
        assert entry["validation"] == max(scores.values())
        assert scores[entry["chosen"]["client.lr"]] == entry["validation"]
    study = Study(results(home))
    points = curve_points(study).query("number == 2").set_index("method")["mean"]
    for cell in record["cells"]:
        if cell["kind"] == "run":
            method = cell["axes"]["method"]
            score = last_of(home, cell)[f"acc_{KINDS[method] or 'clients_'}mean"]
            own = study.scores[study.scores["method"] == method]
            assert own["personal"].item() == pytest.approx(score)
            assert points[method] == pytest.approx(score)
    assert "their fine-tuned models" in study.notes[0]


def last_of(home: Path, cell: dict[str, str]) -> dict[str, float]:
    """The last line of the cell's rounds.jsonl."""
    last: dict[str, float] = json.loads(
        (home / cell["folder"] / "rounds.jsonl").read_text().splitlines()[-1]
    )
    return last
