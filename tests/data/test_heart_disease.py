"""The four hospitals of dataset=heart_disease: counts, recipe, and the same as the sites' files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest
from composing import composed
from composing import data_main as main
from sklearn.model_selection import train_test_split

from fedhet.data.arrays import RawSamples
from fedhet.data.heart_disease import CLASSES, held_out, hospitals
from fedhet.runs.run_data import RunData
from fedhet.testing import sha256

NAMES = ("cleveland", "hungarian", "switzerland", "va")
FEATURES = [
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"),
]
NATURAL = ("dataset=heart_disease", "partition=natural", "partition.split=[1,0,0]")
OWN = ("dataset.mean=own", "dataset.std=own")


def run_data(*lines: str) -> RunData:
    return RunData.of(composed(*NATURAL, *lines).cfg)


def complete() -> pandas.DataFrame:
    """All hospitals' patients without missing cells."""
    tables = [table.assign(hospital=name) for name, table in hospitals().items()]
    return pandas.concat(tables, ignore_index=True).dropna(subset=FEATURES)


def test_the_counts_are_those_of_the_published_files() -> None:
    tables = hospitals()
    assert {name: len(table) for name, table in tables.items()} == dict(
        zip(NAMES, (303, 294, 123, 200), strict=True)
    )
    groups = complete().groupby("hospital")["disease"]
    assert groups.size().tolist() == [303, 261, 46, 130]
    diseased = groups.agg(lambda labels: (labels == "diseased").mean()).round(3)
    assert diseased.tolist() == [0.459, 0.375, 0.978, 0.777]


def test_inputs_and_test_set_are_flambys() -> None:
    """Dummies as pandas makes them, and for each hospital the split of FLamby's loader."""
    data = run_data().dataset
    inputs = complete()
    raw = pandas.get_dummies(
        inputs[FEATURES].astype({"cp": int, "restecg": int}),
        columns=["cp", "restecg"],
        drop_first=True,
    )
    assert data.columns == tuple(raw.columns) and len(data.columns) == 13
    train, test = [], []
    for name in NAMES:
        rows = np.flatnonzero(inputs["hospital"] == name)
        labels = inputs["disease"].to_numpy()[rows]
        few = min(labels.tolist().count(label) for label in CLASSES) <= 2
        kept, held = train_test_split(
            rows, test_size=0.34, random_state=43, stratify=None if few else labels
        )
        train += sorted(kept)
        test += sorted(held)
    x = raw.to_numpy(np.float64)
    assert (data.x.numpy() == x[train]).all()
    assert data.test is not None and (data.test.x.numpy() == x[test]).all()
    y = (inputs["disease"] == "diseased").to_numpy(int)
    assert data.classes == ("healthy", "diseased")
    assert (data.y.numpy() == y[train]).all() and (data.test.y.numpy() == y[test]).all()


def test_other_columns_may_be_chosen() -> None:
    few = ["dataset.features=[age,cp,ca]", "dataset.categories.cp=null", "dataset.missing=median"]
    data = run_data(*few, "dataset.categories.restecg=null").dataset
    assert data.columns == ("age", "cp", "ca") and len(data.x) + len(data.test or ()) == 920


def test_each_hospital_is_a_client() -> None:
    data = run_data(*OWN)
    assert data.partition.owners == NAMES and data.clients.sizes == [199, 172, 30, 85]
    assert data.dataset.test is not None and data.dataset.test_owners is not None
    for pid, (name, size) in enumerate(zip(NAMES, (104, 89, 16, 45), strict=True)):
        rows = data.dataset.test_owners == name
        assert rows.sum() == size
        plain = run_data().dataset
        assert plain.test is not None
        train = plain.x[plain.owners == pid].double()
        std = train.std(0, correction=0)
        expected = (plain.test.x[rows] - train.mean(0)) / std.where(std > 0, 1)
        np.testing.assert_allclose(data.dataset.test.x[rows], expected, atol=1e-5)


def test_the_test_set_can_be_shared_out() -> None:
    pooled = run_data("partition.pool_test=true", "partition.split=[.66,0,.34]")
    assert pooled.dataset.test is None
    assert [len(own) for own in pooled.partition.indices] == [303, 261, 46, 130]
    others = run_data("partition.pool_test=true", "partition.split=[.66,0,.34]", "seed=1")
    assert not np.array_equal(others.clients[0].train.x, pooled.clients[0].train.x)


def test_the_sites_own_files_give_the_same_bytes(tmp_path: Path) -> None:
    """The training rows of each hospital in a file of its own, in the columns of the original."""
    frame = complete()
    owners, labels = frame["hospital"].to_numpy(), frame["disease"].to_numpy(str)
    test = held_out(RawSamples(frame[FEATURES].to_numpy(), labels, owners, "", ""))
    train = frame.drop(index=frame.index[test])
    for name, own in train.groupby("hospital"):
        own.drop(columns="hospital").to_csv(tmp_path / f"{name}.csv", index=False)
    declared = [
        *("dataset=local", f"dataset.sites=[{','.join(NAMES)}]", f"data_dir={tmp_path}"),
        f"dataset.files={{{','.join(f'{name}:{name}.csv' for name in NAMES)}}}",
        *(f"dataset.features=[{','.join(FEATURES)}]", "dataset.label=disease"),
        *("dataset.categories={cp:[1,2,3,4],restecg:[0,1,2]}", "dataset.missing=drop"),
        *("dataset.classes=[healthy,diseased]", "model=logistic"),
    ]
    method = ["method=scaffold", "rounds=3", "client.lr=.1", "partition.split=[.75,0,.25]", *OWN]
    assert sha256(*declared, *method) == sha256(*NATURAL, *method)


def test_an_exported_client_has_its_inputs_made_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *NATURAL, *OWN, "--client", "2", "--out", str(tmp_path)]) == 0
    found = np.load(tmp_path / "client-2.npz")
    assert (found["x_train"] == run_data(*OWN).clients[2].train.x.numpy()).all()
    assert (found["mean"].tolist(), found["std"].tolist()) == ([0.0] * 13, [1.0] * 13)
