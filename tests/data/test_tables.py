"""The user's own csv and Parquet files: what is kept, the held-out rows, and wrong data."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from data.own_data import load

from fedhet.core.errors import ConfigError, DataError

FORMATS = pytest.mark.parametrize("form", ["csv", "parquet"])


def frame(n: int = 20) -> pandas.DataFrame:
    i = np.arange(n)
    return pandas.DataFrame(
        {
            "age": i + 0.5,
            "kind": np.where(i % 3 == 0, "b", "a"),
            "town": [f"t{k % 4}" for k in i],
            "up": i % 2 == 0,
            "same": 0.1,
        }
    )


def save(data: pandas.DataFrame, path: Path) -> None:
    if path.suffix == ".csv":
        data.to_csv(path, index=False)
    else:
        data.to_parquet(path, index=False)


@FORMATS
def test_a_table_and_its_held_out_rows(tmp_path: Path, form: str) -> None:
    save(frame(), tmp_path / f"train.{form}")
    data = load(form, tmp_path, label="kind", owner="town")
    assert (data.shape, data.x.dtype, data.classes) == ((3,), torch.float64, ("a", "b"))
    assert (len(data.x), len(data.test)) == (16, 4)
    rows = [data.x[:, 0].long(), data.test.x[:, 0].long()]
    # each row once: rows keep their order within a part
    assert sorted(torch.cat(rows).tolist()) == list(range(20))
    for part, y in zip(rows, (data.y, data.test.y), strict=True):
        assert part.tolist() == sorted(part.tolist())
        assert y.tolist() == [int(i % 3 == 0) for i in part.tolist()]
    train = rows[0].tolist()
    assert data.x[:, 1:].tolist() == [[float(i % 2 == 0), np.float32(0.1)] for i in train]
    assert data.owners is not None
    assert [data.owner_names[k] for k in data.owners] == [f"t{i % 4}" for i in train]
    assert len(load(form, tmp_path, label="kind", features=["age"], test_fraction=0.5).test) == 10


@FORMATS
def test_a_test_file(tmp_path: Path, form: str) -> None:
    save(frame(), tmp_path / f"train.{form}")
    # other columns, in another order
    test = frame(6).drop(columns="town")[["same", "kind", "up", "age"]]
    save(test, tmp_path / f"test.{form}")
    keys = {"label": "kind", "owner": "town", "features": ["age", "up"]}
    data = load(form, tmp_path, test=f"test.{form}", **keys)
    assert data.x[:, 0].tolist() == (np.arange(20) + 0.5).tolist()
    assert data.test.x.tolist() == [[i + 0.5, i % 2 == 0] for i in range(6)]


def test_labels_are_sorted_as_numbers(tmp_path: Path) -> None:
    labels = [10, 9, 10, 100, 9, 100]
    save(pandas.DataFrame({"a": range(6), "label": labels}), tmp_path / "train.csv")
    data = load("csv", tmp_path, test="train.csv")
    assert (data.classes, data.y.tolist()) == (("9", "10", "100"), [1, 0, 1, 2, 0, 2])


# ---- wrong data

CELLS = [
    (
        "age",
        "x",
        r"csv, row 5 \(the header .*row 1\), column 'age': 'x'; .*finite",
    ),
    (
        "age",
        "",
        r"row 5 .*, column 'age': .*value .*missing .*; fill .*leave .*out ",
    ),
    ("age", "inf", r"row 5 .*, column 'age': inf"),
    ("kind", "", r"row 5 .*, column 'kind': .*value .*missing"),
    ("town", "", r"row 5 .*, column 'town': .*value .*missing"),
]


@pytest.mark.parametrize(("column", "value", "message"), CELLS)
def test_wrong_cells_are_named(tmp_path: Path, column: str, value: str, message: str) -> None:
    data = frame().astype(object)
    data.loc[3, column] = value
    save(data, tmp_path / "train.csv")
    with pytest.raises(DataError, match=message):
        load("csv", tmp_path, label="kind", owner="town")


def test_another_separator_is_seen_in_the_columns(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a;b;y\n1;2;0\n3;4;1\n")
    with pytest.raises(DataError, match=r"train\.csv .*column 'y'; .*a;b;y"):
        load("csv", tmp_path, label="y")


def test_a_single_class_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(frame().assign(kind="a"), tmp_path / "train.csv")
    for _ in range(2):  # also from the cache
        caplog.clear()
        load("csv", tmp_path, label="kind", owner="town")
        assert "all samples have the class 'a'" in caplog.text
    caplog.clear()
    save(frame(), tmp_path / "train.csv")
    load("csv", tmp_path, label="kind", owner="town")
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_column_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    """Otherwise the second label, which pandas renames, would be a feature."""
    (tmp_path / "train.csv").write_text("a,label,label\n1,0,0\n2,1,1\n3,0,0\n")
    with pytest.raises(DataError, match=r"train\.csv .*damaged.*names .*column 'label' twice"):
        load("csv", tmp_path, train="train.csv", label="label", test_fraction=0.34)


@FORMATS
def test_wrong_columns_are_named(tmp_path: Path, form: str) -> None:
    save(frame(), tmp_path / f"train.{form}")
    message = rf"train\.{form} .*column 'kin'; .*age, kind, town, up, same"
    for keys in (
        {"label": "kin"},
        {"label": "kind", "owner": "kin"},
        {"label": "kind", "features": ["age", "kin"]},
    ):
        with pytest.raises(DataError, match=message):
            load(form, tmp_path, **keys)
    with pytest.raises(DataError, match=r"column 'town': 't0'; .*finite numbers"):
        load(form, tmp_path, label="kind")
    for features in ([], ["age", "kind"], "age"):
        with pytest.raises(ConfigError, match=r"dataset\.features="):
            load(form, tmp_path, label="kind", features=features)


@FORMATS
def test_wrong_test_files_are_named(tmp_path: Path, form: str) -> None:
    save(frame(), tmp_path / f"train.{form}")
    save(frame(), tmp_path / "whole.parquet")
    truncated = (tmp_path / "whole.parquet").read_bytes()[:-20]
    keys = {"label": "kind", "owner": "town", "test": f"test.{form}"}
    save(frame(5).assign(kind="c"), tmp_path / f"test.{form}")
    message = rf"test\.{form}, column 'kind', row \d.*: label 'c'; .*classes \['a', 'b'\]"
    with pytest.raises(DataError, match=message):
        load(form, tmp_path, **keys)
    for content in (b"", b"PAR1", truncated):
        (tmp_path / f"test.{form}").write_bytes(content)
        with pytest.raises(DataError, match=rf"test\.{form}"):
            load(form, tmp_path, **keys)


def test_other_wrong_files_are_named(tmp_path: Path) -> None:
    message = (
        r"train\.csv .*damaged, .*csv file.*"
        r"(2 fields .*line 3, saw 3|Length .*header)"
    )
    for content in ("a,label\n1,2\n1,2,3\n", "a,label\n1,2,3\n4,5,6\n"):
        (tmp_path / "train.csv").write_text(content)
        with pytest.raises(DataError, match=message):
            load("csv", tmp_path)
    lists = pandas.DataFrame({"a": [1.0, 2.0], "label": [0, 1], "who": [[1], [2]]})
    lists.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"row 0, column 'who': \[1\]; .*number .*text"):
        load("parquet", tmp_path, owner="who")
    (tmp_path / "train.csv").write_text("a,label\n1,x\n")
    with pytest.raises(DataError, match=r"test_fraction=0.2 .*0 .*1 samples"):
        load("csv", tmp_path)
    (tmp_path / "train.tsv").write_text("")
    message = r"table .*file .*ends .*\.csv .*\.parquet"
    with pytest.raises(ConfigError, match=message):
        load("csv", tmp_path, train="train.tsv")
    for folder in (".", "/"):
        with pytest.raises(ConfigError, match=rf"dataset\.train={folder}: .*folder, .*file"):
            load("csv", tmp_path, train=folder)
    with pytest.raises(DataError, match=rf"looked .*{tmp_path}/nowhere\. "):
        load("csv", tmp_path / "nowhere", train=".")
    for fraction in (0, 1, "a"):
        with pytest.raises(ConfigError, match=r"dataset\.test_fraction="):
            load("csv", tmp_path, test_fraction=fraction)
