"""With `report.metric=personal`, each method counts with the models that its clients would use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mine import SMALL, run

from fedhet.report.curves import curve_points
from fedhet.report.results import results
from fedhet.report.study import Study

KINDS = {"Shared": "", "Tuned locally": "finetuned_", "Own": "personal_"}


@pytest.mark.usefixtures("own_process")
def test_trials_and_runs_count_with_the_same_models(
    write: Callable[..., None],
) -> None:
    write(f"""rounds: 2
{SMALL}
axes:
  method:
    Shared: method=fedavg
    Tuned locally: method=fedavg eval.finetune_epochs=1
    Own: method=ditto eval.finetune_epochs=1
  seed: [0]
tune: {{space: {{client.lr: [.3, .001]}}}}
report: {{metric: personal}}""")
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
