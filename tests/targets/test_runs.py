"""Regression, sets of labels and texts by configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from sklearn import datasets as published
from sklearn import metrics

import fedhet


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))


def test_a_regression_by_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its R2, MAE and RMSE are those of the predictions of the model that `load` returns."""
    data = published.load_diabetes(as_frame=True, scaled=False).frame
    data[:350].to_csv(tmp_path / "train.csv", index=False)
    data[350:].to_csv(tmp_path / "test.csv", index=False)
    run = fedhet.run(
        [
            "dataset=csv",
            f"data_dir={tmp_path}",
            "dataset.test=test.csv",
            "dataset.label=target",
            "dataset.target=number",
            "partition=iid",
            "partition.clients=3",
            "method=fedavg",
            "client.lr=.05",
            "rounds=6",
            "model.hidden=[16]",
            "eval.thresholds=[.3,.99]",
            f"hydra.run.dir={tmp_path}/run",
        ]
    )
    summary = run.summary
    assert (summary["target"], summary["score"]) == ("number", "r2")
    partition = json.loads((run.dir / "partition.json").read_text())
    features, y = data[350:].drop(columns="target"), data[350:].target
    x = torch.tensor(features.to_numpy(), dtype=torch.float32)
    normalised, scale = partition["normalised"], partition["target_scale"]
    x = (x - torch.tensor(normalised["mean"])) / torch.tensor(normalised["std"])

    def predicted(weights: str) -> Any:
        with torch.no_grad():
            output = fedhet.load(run.dir, weights)(x.float()).double().numpy()
        return output[:, 0] * scale["std"][0] + scale["mean"][0]

    guess = predicted("model")
    assert summary["r2"]["last"] == pytest.approx(metrics.r2_score(y, guess), rel=1e-4)
    assert summary["r2"]["last"] > 0.35
    assert summary["mae"] == pytest.approx(metrics.mean_absolute_error(y, guess), rel=1e-4)
    assert summary["rmse"] == pytest.approx(metrics.root_mean_squared_error(y, guess), rel=1e-4)
    assert [reached["r2"] for reached in summary["thresholds"]] == [0.3, 0.99]
    assert summary["thresholds"][0]["rounds"] and summary["thresholds"][1]["rounds"] is None
    assert "accuracy" not in summary and "acc_last_k" not in summary
    rows = [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
    best = max(rows, key=lambda row: row["r2_val_weighted"])
    assert summary["r2"]["best_val"] == best["r2_global"]
    assert summary["validation"] == best["r2_val_weighted"]
    chosen = metrics.r2_score(y, predicted("best_val"))
    assert chosen == pytest.approx(best["r2_global"], rel=1e-4)
    assert {path.name for path in (run.dir / "figures").iterdir()} == {"r2.png", "r2.pdf"}
    shown = capsys.readouterr()
    assert "r2_global" in shown.out and "accuracy" not in shown.out + shown.err
    scores = pandas.read_parquet(run.dir / "clients")
    assert set(scores.metric) == {"loss", "n", "r2", "mae", "rmse"}


def test_sets_of_labels_by_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A column of lists in a Parquet file; the scores are those of the model's predictions."""
    x, y = published.make_multilabel_classification(
        n_samples=300, n_features=8, n_classes=4, random_state=0
    )
    data = pandas.DataFrame(x, columns=[f"x{k}" for k in range(8)])
    data["topics"] = [[f"t{k}" for k in row.nonzero()[0]] for row in y]
    data[:200].to_parquet(tmp_path / "train.parquet")
    data[200:].to_parquet(tmp_path / "test.parquet")
    run = fedhet.run(
        [
            "dataset=parquet",
            f"data_dir={tmp_path}",
            "dataset.test=test.parquet",
            "dataset.label=topics",
            "partition=iid",
            "partition.clients=3",
            "method=ditto",
            "client.lr=.5",
            "rounds=4",
            "model.hidden=[16]",
            "engine.workers=2",
            f"hydra.run.dir={tmp_path}/run",
        ]
    )
    partition = json.loads((run.dir / "partition.json").read_text())
    assert (partition["target"], partition["classes"]) == ("labels", ["t0", "t1", "t2", "t3"])
    held = torch.from_numpy(y[:200])
    counts = [held_by(indices, held) for indices in partition["indices"]]
    assert partition["counts"] == counts
    normalised = partition["normalised"]
    test = (torch.tensor(x[200:]) - torch.tensor(normalised["mean"]).double()) / torch.tensor(
        normalised["std"]
    ).double()
    with torch.no_grad():
        guess = fedhet.load(run.dir)(test.float()) > 0
    summary = run.summary
    f1 = metrics.f1_score(y[200:], guess, average="micro")
    assert summary["f1_micro"]["last"] == pytest.approx(f1) and f1 > 0.6
    macro = metrics.f1_score(y[200:], guess, average="macro")
    assert summary["f1_macro"] == pytest.approx(macro)
    exact = metrics.accuracy_score(y[200:], guess)
    assert summary["subset_accuracy"] == pytest.approx(exact)
    assert summary["personal"]["last"] is not None
    rows = [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
    assert summary["personal"]["last"] == rows[-1]["f1_micro_personal_weighted"]
    drawn = {f"{figure}.{kind}" for figure in ("f1_micro", "labels") for kind in ("png", "pdf")}
    assert {path.name for path in (run.dir / "figures").iterdir()} == drawn
    assert "f1_micro_personal_weighted" in capsys.readouterr().out


def held_by(indices: list[int], y: torch.Tensor) -> list[int]:
    """How many of a client's samples have each label."""
    return y[torch.tensor(indices)].sum(0).tolist()
