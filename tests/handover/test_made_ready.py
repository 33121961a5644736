"""Models whose inputs are made ready by each client's own training part: predict and export."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas
import pytest
import torch

import fedhet
from fedhet.__main__ import main
from fedhet.data.heart_disease import hospitals

SHORT = ("dataset=heart_disease", "partition=natural", "method=fedavg", "rounds=2", "figures=false")
OWN = ("dataset.mean=own", "dataset.std=own")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))


def run_of(folder: Path, *settings: str) -> fedhet.Run:
    return fedhet.run([*SHORT, *settings, f"hydra.run.dir={folder / 'run'}"])


def table(folder: Path, name: str, *, whole: bool) -> tuple[Path, pandas.DataFrame]:
    frame = hospitals()[name].drop(columns=["slope", "ca", "thal"])
    frame = frame.dropna() if whole else frame
    frame.to_csv(folder / "patients.csv", index=False)
    return folder / "patients.csv", frame


def inputs(frame: pandas.DataFrame) -> torch.Tensor:
    """(n, 13) by pandas, with NaN where a cell of categories is missing."""
    levels = {"cp": [1, 2, 3, 4], "restecg": [0, 1, 2]}
    frame = frame.drop(columns="disease").astype(
        {c: pandas.CategoricalDtype(v) for c, v in levels.items()}
    )
    x = pandas.get_dummies(frame, columns=list(levels), drop_first=True, dtype=float)
    x.loc[frame["restecg"].isna(), ["restecg_1", "restecg_2"]] = np.nan
    return torch.tensor(x.to_numpy(np.float32))


def predicted(
    capsys: pytest.CaptureFixture[str], run: fedhet.Run, *arguments: object
) -> torch.Tensor:
    capsys.readouterr()
    assert main(["predict", str(run.dir), *map(str, arguments), "--format", "csv"]) == 0
    frame = pandas.read_csv(StringIO(capsys.readouterr().out))
    return torch.tensor(frame["p(diseased)"].to_numpy(np.float32))


def by_hand(run: fedhet.Run, x: torch.Tensor, pid: int | None) -> torch.Tensor:
    """The probability that the global model gives, with what partition.json says of a client."""
    record = json.loads((run.dir / "partition.json").read_text())
    known = dict(record["normalised"])
    if pid is None:
        known["median"] = known["mean"]
    else:
        known |= record["own"][str(pid)]
    if "median" in known:
        x = torch.where(x.isnan(), torch.tensor(known["median"]), x)
    x = (x - torch.tensor(known["mean"])) / torch.tensor(known["std"])
    with torch.no_grad():
        return fedhet.load(run)(x).softmax(1)[:, 1]


@pytest.mark.parametrize(
    ("settings", "whole", "clients"),
    [(OWN, True, (0, 3)), (("dataset.missing=median",), False, (None, 2))],
)
def test_a_raw_table_is_made_ready_as_the_clients_are(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    settings: tuple[str, ...],
    whole: bool,
    clients: tuple[int | None, ...],
) -> None:
    run = run_of(tmp_path, *settings)
    file, frame = table(tmp_path, "switzerland", whole=whole)
    found = []
    for pid in clients:
        of = [] if pid is None else ["--inputs-of", pid]
        found.append(predicted(capsys, run, file, *of))
        assert torch.allclose(found[-1], by_hand(run, inputs(frame), pid), atol=1e-5)
    assert not torch.allclose(*found, atol=1e-3)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_made_ready_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = run_of(tmp_path, *OWN)
    file, frame = table(tmp_path, "va", whole=True)
    for command in (["predict", run.dir, file], ["export", run.dir]):
        assert "clients 0, 1, 2, 3 " in refused(capsys, *command)
        assert "--inputs-of" in refused(capsys, *command, "--inputs-of", 4)
    frame.assign(cp=7).to_csv(file, index=False)
    said = refused(capsys, "predict", run.dir, file, "--inputs-of", 0)
    assert "row 2 (the header is row 1), column 'cp': 7; expected one of the levels" in said
    file, _ = table(tmp_path, "va", whole=False)
    said = refused(capsys, "predict", run.dir, file, "--inputs-of", 0)
    assert "the value is missing" in said  # the run has dropped such rows
    record = json.loads((run.dir / "partition.json").read_text()) | {"own": {}}
    (run.dir / "partition.json").write_text(json.dumps(record))  # as a server has it
    assert "no client has its own in this folder" in refused(capsys, "export", run.dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [OWN, ("dataset.missing=median",), (*OWN, "dataset.missing=median")]
)
def test_an_exported_model_makes_ready_by_itself(
    tmp_path: Path, onnxruntime: ModuleType, settings: tuple[str, ...]
) -> None:
    run = run_of(tmp_path, *settings)
    assert main(["export", str(run.dir), "--inputs-of", "1"]) == 0
    median = "dataset.missing=median" in settings
    _, frame = table(tmp_path, "hungarian", whole=not median)
    session = onnxruntime.InferenceSession(run.dir / "model.onnx")
    x = inputs(frame)
    (got,) = session.run(None, {"input": x.numpy()})
    assert torch.allclose(torch.from_numpy(got)[:, 1], by_hand(run, x, 1), atol=1e-5)
