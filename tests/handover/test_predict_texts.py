"""Predictions for texts and for sets of labels score what the run has measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
from handover.conftest import start
from sklearn import metrics

from fedhet.__main__ import main


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))


def test_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of any length, by the run's tokenizer; another tokenizer is refused."""
    pytest.importorskip("tokenizers", reason="texts need the package tokenizers")
    from targets.test_texts import LINES, reviews, save_tokenizer

    data = reviews(100)
    data[:80].to_parquet(tmp_path / "train.parquet")
    data[80:].to_parquet(tmp_path / "test.parquet")
    save_tokenizer(tmp_path)
    lines = [*LINES, "dataset.label=mood", "method=fedavg", "client.lr=.3", "rounds=5"]
    run = start(tmp_path / "run", tmp_path, *lines)
    out = tmp_path / "out.csv"
    files = [str(tmp_path / "test.parquet"), "--format=csv", f"--out={out}"]
    assert main(["predict", str(run.dir), *files]) == 0
    guess = pandas.read_csv(out)["prediction"].to_numpy()
    accuracy = run.summary["accuracy"]["last"]
    assert np.mean(guess == data["mood"][80:]) == pytest.approx(accuracy, abs=1e-9)
    assert accuracy > 0.5

    short = pandas.DataFrame({"sentence": ["good", "bad " * 50]})
    short.to_csv(tmp_path / "short.csv", index=False)
    assert main(["predict", str(run.dir), str(tmp_path / "short.csv")]) == 0
    other = tmp_path / "other"
    made = save_tokenizer(other)
    made.add_tokens(["new"])
    made.save(str(other / "tokenizer.json"))
    capsys.readouterr()
    assert main(["predict", str(run.dir), *files, "--tokenizer", str(other)]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_sets_of_labels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    frame = pandas.DataFrame(x, columns=["a", "b", "c"])
    frame["up"], frame["far"] = (x[:, 0] > 0).astype(int), (abs(x[:, 1]) > 0.4).astype(int)
    frame[:90].to_csv(tmp_path / "train.csv", index=False)
    frame[90:].to_csv(tmp_path / "test.csv", index=False)
    run = start(
        tmp_path / "run",
        tmp_path,
        "dataset=csv",
        "dataset.test=test.csv",
        "dataset.label=[up,far]",
        "model.hidden=[8]",
        "method=fedavg",
    )
    out = tmp_path / "out.json"
    args = [str(tmp_path / "test.csv"), "--format=json", f"--out={out}"]
    assert main(["predict", str(run.dir), *args]) == 0
    samples = json.loads(out.read_text())
    guess = [[name in sample["prediction"] for name in ("up", "far")] for sample in samples]
    f1 = metrics.f1_score(frame[["up", "far"]][90:], guess, average="micro")
    assert f1 == pytest.approx(run.summary["f1_micro"]["last"], abs=1e-9)
    p = np.array([[sample["probabilities"][name] for name in ("up", "far")] for sample in samples])
    assert ((p > 0.5) == np.array(guess)).all()
