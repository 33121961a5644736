"""Cells of tables: missing ones, categories, and what a client takes of its own training part."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from composing import composed
from data.local_files import data_of
from data.own_data import load

from fedhet.core.errors import ConfigError, DataError
from fedhet.core.streams import generator
from fedhet.data.encoding import Cells
from fedhet.data.federation import split
from fedhet.runs.local_data import declaration
from fedhet.runs.run_data import RunData

OWN = ("dataset.mean=own", "dataset.std=own")
MEDIAN = "dataset.missing=median"


def patients(n: int = 60) -> pandas.DataFrame:
    """Rows of three hospitals, of which c has no pressure at all."""
    draw = np.random.default_rng(0)
    frame = pandas.DataFrame({"age": draw.normal(50, 9, n), "pressure": draw.normal(120, 15, n)})
    frame["pain"] = draw.choice([1.0, 2.0, 4.0], n)
    frame["smoker"] = draw.choice(["never", "once", "now"], n)
    frame["hospital"] = [str(name) for name in np.array(list("abc"))[np.arange(n) % 3]]
    frame["ill"] = draw.integers(0, 2, n)
    frame.loc[frame.index % 5 == 0, "age"] = np.nan
    frame.loc[frame["hospital"] == "c", "pressure"] = np.nan
    return frame


LEVELS = {"pain": [1, 2, 4], "smoker": ["never", "now", "once"]}


# ---- categories
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_categories_are_the_dummies_of_pandas(tmp_path: Path, form: str) -> None:
    frame = patients().drop(columns=["age", "pressure"]).assign(weight=np.arange(60) / 4)
    write = frame.to_csv if form == "csv" else frame.to_parquet
    write(tmp_path / f"train.{form}", index=False)
    file = f"train.{form}"
    data = load(form, tmp_path, test=file, label="ill", owner="hospital", categories=LEVELS)
    dummies = pandas.get_dummies(
        frame.astype({"pain": int}).drop(columns=["ill", "hospital"]),
        columns=["pain", "smoker"],
        drop_first=True,
    )
    assert data.columns == tuple(dummies.columns)
    assert (data.x.numpy() == dummies.to_numpy(np.float32)).all()
    assert Cells(LEVELS).columns(data.columns) == ["weight", "pain", "smoker"]


def test_a_level_that_is_not_declared_is_named(tmp_path: Path) -> None:
    frame = patients()[["pain", "smoker", "ill"]]
    frame.to_csv(tmp_path / "train.csv", index=False)
    row = int((frame["pain"] == 4).idxmax())
    few: dict[str, Any] = {**LEVELS, "pain": [1, 2]}
    message = rf"row {row + 2} \(the header .*row 1\), column 'pain': 4\.0; .*levels \[1, 2\]"
    with pytest.raises(DataError, match=message):
        load("csv", tmp_path, label="ill", categories=few)
    with pytest.raises(DataError, match=r"column 'smoker': 'n.*'; .*finite numbers"):
        load("csv", tmp_path, label="ill", categories={"pain": [1, 2, 4]})


@pytest.mark.parametrize(
    ("categories", "message"),
    [
        ({"age": [1]}, r"categories\.age=\[1\]: .*list .*distinct levels, .*least two"),
        ({"age": [1, 1]}, "distinct levels"),
        ({"age": "ab"}, "distinct levels"),
        ({"nothing": [1, 2]}, "'nothing' .*among .*inputs"),
        ({"ill": [0, 1]}, "'ill' .*among .*inputs"),
    ],
)
def test_categories_that_are_none(tmp_path: Path, categories: dict[str, Any], message: str) -> None:
    patients()[["age", "ill"]].to_csv(tmp_path / "train.csv", index=False)
    with pytest.raises(ConfigError, match=message):
        load("csv", tmp_path, label="ill", missing="drop", categories=categories)


# ---- missing cells
def test_rows_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frame = patients()[["age", "smoker", "ill"]]
    frame.loc[[3, 5], "smoker"] = None
    frame.to_csv(tmp_path / "train.csv", index=False)
    keys: dict[str, Any] = {"label": "ill", "categories": {"smoker": LEVELS["smoker"]}}
    with pytest.raises(DataError, match=r"row 2 .*value .*missing.*dataset\.missing=drop "):
        load("csv", tmp_path, **keys)
    caplog.set_level(logging.INFO)
    data = load("csv", tmp_path, missing="drop", test="train.csv", **keys)
    assert caplog.text.count("without 13 samples that miss a value: these are left out") == 2
    whole = frame.dropna()
    assert len(whole) == 47 and data.y.tolist() == whole["ill"].tolist()
    assert data.x[:, 0].tolist() == whole["age"].tolist()
    frame["age"] = np.nan
    frame.to_csv(tmp_path / "train.csv", index=False)
    with pytest.raises(DataError, match=r"60 samples misses .*value"):
        load("csv", tmp_path, missing="drop", **keys)


@pytest.fixture
def table(tmp_path: Path) -> list[str]:
    """The settings of a run whose clients are the hospitals."""
    patients().to_csv(tmp_path / "train.csv", index=False)
    return [
        *("dataset=csv", f"data_dir={tmp_path}", "dataset.label=ill", "dataset.owner=hospital"),
        *("dataset.features=[age,pressure]", "partition=natural"),
    ]


def run_data(*lines: str) -> RunData:
    return RunData.of(composed(*lines).cfg)


def by_hand(raw: RunData, pid: int) -> tuple[np.ndarray, ...]:
    """The parts of a client, with NaN: those of the dataset at the split's positions."""
    own = raw.partition.indices[pid]
    return tuple(
        raw.dataset.x.numpy()[own[rows]] for rows in split(len(own), (0.8, 0.1, 0.1), 0, pid)
    )


def test_medians_are_those_of_the_own_training_part(table: list[str]) -> None:
    data = run_data(*table, MEDIAN)
    means = []
    for pid, client in enumerate(data.clients):
        parts = by_hand(data, pid)
        assert np.isnan(parts[0][:, 0]).any()
        median = np.nanmedian(parts[0][:, 0])
        for raw, ready in zip(parts, (client.train, client.val, client.test), strict=True):
            expected = np.where(np.isnan(raw[:, 0]), median, raw[:, 0])
            assert ready is not None and ready.x[:, 0].tolist() == expected.tolist()
        means.append(client.train.x.double())
    # of c no pressure is known, so it adds nothing to the mean, which it has in all rows
    both = torch.cat([x[:, 1] for x in means[:2]])
    assert data.dataset.mean[1] == pytest.approx(both.mean().item(), rel=1e-12)
    assert data.dataset.std[1] == pytest.approx(both.std(correction=0).item(), rel=1e-12)
    assert set(means[2][:, 1].tolist()) == {data.dataset.mean[1]}
    assert data.dataset.test is not None and data.dataset.test_owners is not None
    raw = run_data(*table, MEDIAN, "partition=iid")  # where nobody owns the test samples
    assert raw.dataset.test is not None
    for row, owner in enumerate(data.dataset.test_owners):
        filled = data.dataset.test.x[row].tolist()
        cells = _cell(row)
        expected = torch.tensor(
            data.clients.own("abc".index(owner)).record["median"], dtype=torch.float64
        )
        assert filled == torch.where(cells.isnan(), expected, cells).tolist()
        unowned = torch.where(
            cells.isnan(), torch.tensor(raw.dataset.mean, dtype=torch.float64), cells
        )
        assert raw.dataset.test.x[row].tolist() == unowned.tolist()


def _cell(row: int) -> torch.Tensor:
    """A row of the held-out fifth, of which only the order is taken from the package."""
    order = np.sort(generator(0, "test_fraction").permutation(60)[:12])
    return torch.tensor(patients()[["age", "pressure"]].to_numpy(np.float64)[order[row]])


def test_each_client_normalises_by_its_own_training_part(table: list[str]) -> None:
    data = run_data(*table, *OWN, MEDIAN)
    for pid, client in enumerate(data.clients):
        train, val, test = by_hand(data, pid)
        ages = np.where(np.isnan(train[:, 0]), np.nanmedian(train[:, 0]), train[:, 0])
        ages = ages.astype(np.float64)
        for raw, ready in ((train, client.train), (val, client.val), (test, client.test)):
            filled = np.where(np.isnan(raw[:, 0]), np.nanmedian(train[:, 0]), raw[:, 0])
            expected = (filled - ages.mean()) / ages.std()
            np.testing.assert_allclose(ready.x[:, 0], expected, atol=1e-5)
    assert not data.clients[2].train.x[:, 1].any()  # what is not known at all is the mean, 0
    assert data.partition_record()["normalised"] == {"mean": "own", "std": "own"}
    known = data.partition_record()["own"]
    assert list(known) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["partition=iid"], "belong to no client"),
        (["partition.clients=2"], "belong to no client"),
        (["dataset.std=auto"], "either both are own, or neither"),
        (["dataset.std=1"], "either both are own, or neither"),
    ],
)
def test_own_that_cannot_be(table: list[str], change: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_data(*table, *OWN, MEDIAN, *change)


def test_clients_without_owners_have_their_own_test_parts(table: list[str]) -> None:
    data = run_data(*table, *OWN, MEDIAN, "partition=iid", "partition.pool_test=true")
    means = [client.train.x.mean(0) for client in data.clients]
    assert data.dataset.test is None and torch.stack(means).abs().max() < 1e-5


@pytest.mark.parametrize("settings", [[MEDIAN], [MEDIAN, *OWN]])
def test_no_training_input_depends_on_other_rows(
    table: list[str], settings: list[str], tmp_path: Path
) -> None:
    """Other values in all validation and test rows change no training row, missing ones either."""
    before = run_data(*table, *settings, "partition.split=[.6,.2,.2]")
    train = torch.cat([client.train.x for client in before.clients])
    kept = _kept_rows(before)
    frame = patients()
    for n, row in enumerate(set(frame.index) - kept):
        frame.loc[row, ["age", "pressure"]] = [np.nan, 1e6] if n % 2 else [-1e6, 3.0]
    frame.to_csv(tmp_path / "train.csv", index=False)
    after = run_data(*table, *settings, "partition.split=[.6,.2,.2]")
    assert torch.equal(torch.cat([client.train.x for client in after.clients]), train)
    assert not torch.equal(after.dataset.x, before.dataset.x)


def _kept_rows(data: RunData) -> set[int]:
    """The rows of the file that are in a training part."""
    shared = np.sort(generator(0, "test_fraction").permutation(60)[12:])
    found: set[int] = set()
    for pid, own in enumerate(data.partition.indices):
        rows = split(len(own), (0.6, 0.2, 0.2), 0, pid)[0]
        found |= set(shared[own[rows]].tolist())
    return found


# ---- arrays
def test_arrays_may_miss_values(tmp_path: Path) -> None:
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    x[3, 1] = np.nan
    y = np.arange(20) % 2
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x[5:9], y_test=y[5:9])
    with pytest.raises(DataError, match="row 3: nan "):
        load("npz", tmp_path)
    assert len(load("npz", tmp_path, missing="drop").x) == 19
    assert load("npz", tmp_path, missing="median").x.isnan().sum() == 1
    images = np.zeros((4, 1, 2, 2), np.float32)
    labels = np.arange(4) % 2
    np.savez(tmp_path / "data.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    for keys in ({"missing": "drop"}, {"mean": "own", "std": "own"}):
        with pytest.raises(ConfigError, match=r"dataset\.m.* table .*\(1, 2, 2\)"):
            load("npz", tmp_path, **keys)


# ---- sites
@pytest.fixture
def sites(tmp_path: Path) -> list[str]:
    """The declaration of three sites, each with the table of a hospital."""
    for site, frame in patients().groupby("hospital"):
        frame.drop(columns="hospital").to_csv(tmp_path / f"{site}.csv", index=False)
    return [
        *("dataset=local", f"data_dir={tmp_path}", "dataset.sites=[a,b,c]"),
        *("dataset.features=[age,pressure,smoker]", "dataset.label=ill", "dataset.classes=2"),
        *("dataset.categories={smoker:[never,now,once]}", MEDIAN),
        "dataset.files={a:a.csv,b:b.csv,c:c.csv}",
    ]


def test_sites_fill_and_normalise_by_themselves(sites: list[str]) -> None:
    data = data_of(*sites, *OWN)
    assert data.dataset.columns == ("age", "pressure", "smoker_now", "smoker_once")
    assert data.agreed is not None and data.agreed.statistics == {}
    assert all(one is not None and one.moments == {} for one in data.agreed.descriptions)
    for client in data.clients:
        x = client.train.x
        assert x.mean(0).abs().max() < 1e-5 and not x.isnan().any()
    assert list(data.partition_record()["own"]) == ["0", "1", "2"]


def test_a_site_tells_nothing_of_a_column_that_it_does_not_have(sites: list[str]) -> None:
    for least in (0, 5):
        data = data_of(*sites, f"privacy.min_count={least}")
        assert data.agreed is not None
        told = [one.moments["x"] for one in data.agreed.descriptions if one is not None]
        assert [one["mean"][1] is None for one in told] == [False, False, True]
        assert [one["count"] for one in told] == data.clients.sizes
    pressure = data.clients[2].train.x[:, 1]
    assert set(pressure.tolist()) == {data.dataset.mean[1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["dataset.features=null", "dataset.shape=[3]"], "'smoker' .*among .*inputs"),
        (["dataset.features=null", "dataset.shape=[1,2,2]"], "'smoker' .*among .*inputs"),
        (["dataset.missing=mean"], "dataset.missing"),
    ],
)
def test_declarations_that_cannot_be(sites: list[str], change: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declaration(composed(*sites, *change).cfg)


def test_what_is_declared_of_cells_is_compared(sites: list[str]) -> None:
    changes = [
        *([], ["dataset.missing=drop"], ["dataset.categories={smoker:[now,never,once]}"], OWN),
    ]
    digests = {declaration(composed(*sites, *change).cfg)[0].digest for change in changes}
    assert len(digests) == len(changes)


def test_the_servers_test_set_is_filled_by_the_mean(sites: list[str]) -> None:
    data = data_of(*sites, "dataset.test=c.csv")
    assert data.dataset.test is not None
    pressure = data.dataset.test.x[:, 1]
    assert set(pressure.tolist()) == {data.dataset.mean[1]}
    with pytest.raises(ConfigError, match=r"mean .*normalises "):
        data_of(*sites, "dataset.test=c.csv", *OWN)
