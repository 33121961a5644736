"""The user's own npz, csv and parquet: what is kept, how it is cut and standardised, and what wrong
data say."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import yaml

from fedhet.data import tables, transform
from fedhet.data.dataset import Dataset
from fedhet.errors import ConfigError, DataError

CONF = Path(__file__).parents[2] / "conf" / "dataset"


def load(name: str, folder: Path, **keys: object) -> Dataset:
    conf = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return getattr(tables, conf.pop("_target_").split(".")[-1])(
        **{**conf, "data_dir": str(folder), **keys}
    )


# ---- npz


def arrays(**other: Any) -> dict[str, np.ndarray]:
    rows = np.arange(12.0).reshape(4, 3)
    return {
        "x_train": rows,
        "y_train": np.array([2, 0, 2, 7]),
        "x_test": rows[:2] + 0.5,
        "y_test": np.array([7, 2]),
        **other,
    }


def write(folder: Path, **other: Any) -> Path:
    np.savez(folder / "data.npz", **arrays(**other))
    return folder


def test_a_table_of_numbers(tmp_path: Path) -> None:
    data = load("npz", write(tmp_path, who=np.array(["b", "a", "b", "c"])), owner="who")
    assert (data.shape, data.x.dtype, data.text) == ((3,), torch.float32, False)
    assert (
        data.x.tolist() == arrays()["x_train"].tolist()
        and data.test.x.tolist() == arrays()["x_test"].tolist()
    )
    assert (data.classes, data.y.tolist(), data.test.y.tolist()) == (
        ("0", "2", "7"),
        [1, 0, 1, 2],
        [2, 1],
    )
    assert (
        data.owner_names == ("a", "b", "c")
        and data.owners is not None
        and data.owners.tolist() == [1, 0, 1, 2]
    )
    # auto: the training rows have mean 0 and standard deviation 1 when the model sees them
    seen = transform(data)(data.x)
    assert seen.mean(0).tolist() == pytest.approx([0, 0, 0], abs=1e-6) and seen.std(
        0, correction=0
    ).tolist() == pytest.approx([1, 1, 1])


def test_names_of_arrays_and_an_absolute_path(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "mine.npz",
        a=np.eye(2),
        b=np.array(["yes", "no"]),
        c=np.eye(2)[:1],
        d=np.array(["no"]),
    )
    names = {"x_train": "a", "y_train": "b", "x_test": "c", "y_test": "d"}
    data = load("npz", tmp_path / "elsewhere", file=str(tmp_path / "mine.npz"), **names)
    assert (data.classes, data.y.tolist(), data.test.y.tolist()) == (("no", "yes"), [1, 0], [0])
    assert load(
        "npz", tmp_path, file="mine.npz", classes=["yes", "no", "?"], **names
    ).y.tolist() == [0, 1]


def test_images(tmp_path: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (4, 5, 6), dtype=np.uint8)
    data = load("npz", write(tmp_path, x_train=grey, x_test=grey[:2]))
    assert (data.shape, data.x.dtype) == ((1, 5, 6), torch.uint8) and np.array_equal(
        data.x[:, 0].numpy(), grey
    )
    assert (data.mean[0], data.std[0]) == pytest.approx((grey.mean() / 255, grey.std() / 255))
    coloured = np.random.default_rng(1).random((4, 3, 5, 6))
    data = load(
        "npz", write(tmp_path, x_train=coloured, x_test=coloured[:2]), mean=[0.5], std="auto"
    )
    assert (data.shape, data.x.dtype, data.mean) == ((3, 5, 6), torch.float32, (0.5, 0.5, 0.5))
    assert data.std == pytest.approx(coloured.std((0, 2, 3)))


def test_tokens(tmp_path: Path) -> None:
    tokens = np.array([[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]])
    write(
        tmp_path,
        x_train=tokens,
        y_train=np.array([3, 0, 1, 2]),
        x_test=tokens[:2],
        y_test=np.array([3, 0]),
    )
    data = load("npz", tmp_path, text=True, classes=4)
    assert (data.text, data.shape, data.x.tolist()) == (True, (3,), tokens.tolist()) and transform(
        data
    ) is None
    with pytest.raises(
        DataError, match="training sample 1 has the token 3; tokens are numbers of classes, 0 to 2"
    ):
        write(
            tmp_path,
            x_train=tokens,
            y_train=np.array([0, 0, 1, 2]),
            x_test=tokens[:2],
            y_test=np.array([1, 0]),
        )
        load("npz", tmp_path, text=True, classes=3)
    assert not load("npz", tmp_path, classes=3).text


def test_what_the_export_of_a_client_writes(tmp_path: Path) -> None:
    """It may lack classes, and is normalised as the federation is."""
    about = {
        "classes": np.array(["a", "b", "c"]),
        "mean": np.array([1.0, 2.0, 3.0]),
        "std": np.array([4.0, 5.0, 6.0]),
    }
    data = load(
        "npz", write(tmp_path, y_train=np.array([2, 0, 2, 2]), y_test=np.array([0, 2]), **about)
    )
    assert (data.classes, data.y.tolist(), data.mean, data.std) == (
        ("a", "b", "c"),
        [2, 0, 2, 2],
        (1, 2, 3),
        (4, 5, 6),
    )
    with pytest.raises(
        DataError, match=r"row 3: label 7; expected one of the classes \['0', '1', '2'\]"
    ):
        load("npz", write(tmp_path, **about))


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"x_train": np.array([[1, 2], [3, np.inf], [0, 0], [0, 0]])},
        {},
        r"array 'x_train', row 1: inf at \[1\]; expected finite",
    ),
    ({"x_train": np.array([[1, 2], [3, 4], [1e39, 0], [0, 0]])}, {}, r"row 2: 1e\+39 at \[0\]"),
    ({"x_train": np.zeros((4, 0))}, {}, r"float64 \(4, 0\); expected numbers"),
    (
        {"x_train": np.full((4, 2, 2), 1.5)},
        {},
        r"array 'x_train', row 0: 1.5 at \[0, 0, 0\]; expected pixels in \[0, 1\]",
    ),
    ({"x_test": np.full((2, 1, 2, 2), -0.5)}, {}, r"array 'x_test', row 0: -0.5"),
    (
        {"y_train": np.array([0, 1, np.inf, 0])},
        {},
        r"array 'y_train', row 2: label inf; expected a class",
    ),
    (
        {"y_train": np.array([0, 1e30, 0, 0])},
        {"classes": 2},
        r"row 1: label 1e\+30; expected a class",
    ),
    ({"classes": np.array("a")}, {}, r"array 'classes' is a; expected different names \(C,\)"),
    ({"classes": np.array(["a", "a"])}, {}, r"array 'classes' is .*; expected different names"),
    ({"mean": np.array(0.5)}, {}, r"array 'mean' is 0.5; expected a finite number for each"),
    ({"mean": np.array([np.nan] * 3)}, {}, r"array 'mean' is \[nan"),
    ({"std": np.array([1, 0, 1])}, {}, r"array 'std' is .*, > 0"),
    ({"who": np.array([0, np.nan, 1, 1])}, {"owner": "who"}, r"row 1: its owner is nan"),
    ({"x_test": np.full((2, 1, 2, 2), np.nan)}, {}, r"array 'x_test', row 0: nan at \[0, 0, 0\]"),
    (
        {"x_train": np.array([["a"] * 3] * 4)},
        {},
        r"array 'x_train' is <U1 \(4, 3\); expected numbers \(n, F\)",
    ),
    ({"x_train": np.zeros(4)}, {}, r"float64 \(4,\); expected numbers"),
    ({"x_train": np.zeros((4, 5, 5, 3))}, {}, r"channels come first"),
    ({"x_train": np.zeros((4, 5, 5), np.int64)}, {}, r"images as int64; expected uint8"),
    ({"x_train": np.zeros((0, 3)), "y_train": np.zeros(0, int)}, {}, "has no sample"),
    ({"y_train": np.array([0, 1])}, {}, r"labels have shape \(2,\); expected \(4,\)"),
    (
        {"y_train": np.array([0, 1.5, 0, 0])},
        {},
        r"array 'y_train', row 1: label 1.5; expected a class",
    ),
    (
        {"y_test": np.array([7, 3])},
        {},
        r"array 'y_test', row 1: label 3; expected one of the classes \['0', '2', '7'\]",
    ),
    (
        {},
        {"classes": 7},
        r"array 'y_train', row 3: label 7; expected one of the classes \['0', '1', .*'6'\]",
    ),
    ({"who": np.arange(3)}, {"owner": "who"}, r"owners have shape \(3,\); expected \(4,\)"),
    (
        {},
        {"owner": "who"},
        r"^[^:]*has no array 'who' \(dataset.owner\); it has x_train, y_train, x_test, y_test",
    ),
    ({}, {"text": True}, r"is float64 \(4, 3\); dataset.text=true expects token numbers \(n, T\)"),
    ({"x_test": np.zeros((2, 4))}, {}, r"training samples are \(3,\), but test samples \(4,\)"),
    (
        {"y_train": np.array([None] * 4)},
        {},
        r"data.npz is damaged, or no npz file of numbers and text: Object arrays",
    ),
]


@pytest.mark.parametrize(("content", "keys", "said"), WRONG)
def test_wrong_arrays_are_named(
    tmp_path: Path, content: dict[str, Any], keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        load("npz", write(tmp_path, **content), **keys)


def test_damaged_npz(tmp_path: Path) -> None:
    whole = (write(tmp_path) / "data.npz").read_bytes()
    for content in (whole[:-40], whole[:200], b"", b"PK\x03\x04", b"no npz"):
        (tmp_path / "data.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"data\.npz is damaged, or no npz"):
            load("npz", tmp_path)
    np.savez_compressed(tmp_path / "data.npz", **arrays())
    whole = (tmp_path / "data.npz").read_bytes()
    for position in range(30, 300, 3):  # of a deflated array's header and bytes
        (tmp_path / "data.npz").write_bytes(whole[:position] + b"\xff\xff" + whole[position + 2 :])
        with contextlib.suppress(DataError):  # some bytes do not matter; nothing else may be raised
            load("npz", tmp_path)
    np.save((tmp_path / "data.npz").open("wb"), np.zeros(3))
    with pytest.raises(DataError, match=r"data\.npz is damaged, or no npz"):
        load("npz", tmp_path)
    with pytest.raises(DataError, match=r"(?s)not found.*with other\.npz\n.*dataset\.file"):
        load("npz", tmp_path, file="other.npz")


def test_wrong_settings(tmp_path: Path) -> None:
    write(tmp_path)
    for keys in (
        {"text": 1},
        {"file": None},
        {"classes": 0},
        {"classes": True},
        {"classes": "a"},
        {"classes": ["a", "a"]},
        {"classes": []},
        {"mean": "mean"},
        {"std": 1.0},
        {"std": ["a"]},
    ):
        with pytest.raises(ConfigError, match=rf"dataset\.{next(iter(keys))}(\[0\])?="):
            load("npz", tmp_path, **keys)


# ---- csv and parquet


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
    data.to_csv(path, index=False) if path.suffix == ".csv" else data.to_parquet(path, index=False)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_table_and_its_fixed_cut(tmp_path: Path, form: str) -> None:
    save(frame(), tmp_path / f"train.{form}")
    data = load(form, tmp_path, label="kind", owner="town")
    assert (data.shape, data.x.dtype, data.classes, len(data.x), len(data.test)) == (
        (3,),
        torch.float32,
        ("a", "b"),
        16,
        4,
    )
    rows = [data.x[:, 0].long(), data.test.x[:, 0].long()]
    # each row once: rows keep their order within a part
    assert sorted(torch.cat(rows).tolist()) == list(range(20))
    assert all(part.tolist() == sorted(part.tolist()) for part in rows)
    for part, y in zip(rows, (data.y, data.test.y), strict=True):
        assert y.tolist() == [int(i % 3 == 0) for i in part.tolist()]
    assert data.x[:, 1:].tolist() == [
        [float(i % 2 == 0), np.float32(0.1)] for i in rows[0].tolist()
    ]
    assert data.owners is not None and [data.owner_names[k] for k in data.owners] == [
        f"t{i % 4}" for i in rows[0].tolist()
    ]
    # a constant column
    assert data.mean == pytest.approx(data.x.double().mean(0).tolist()) and data.std[2] == 1.0
    assert len(load(form, tmp_path, label="kind", features=["age"], test_fraction=0.5).test) == 10


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_test_file(tmp_path: Path, form: str) -> None:
    save(frame(), tmp_path / f"train.{form}")
    save(
        frame(6).drop(columns="town")[["same", "kind", "up", "age"]], tmp_path / f"test.{form}"
    )  # other columns, another order
    data = load(
        form, tmp_path, label="kind", owner="town", test=f"test.{form}", features=["age", "up"]
    )
    assert data.x[:, 0].tolist() == (np.arange(20) + 0.5).tolist() and data.test.x.tolist() == [
        [i + 0.5, i % 2 == 0] for i in range(6)
    ]


def test_labels_are_sorted_as_numbers(tmp_path: Path) -> None:
    save(
        pandas.DataFrame({"a": range(6), "label": [10, 9, 10, 100, 9, 100]}), tmp_path / "train.csv"
    )
    data = load("csv", tmp_path, test="train.csv")
    assert (data.classes, data.y.tolist()) == (("9", "10", "100"), [1, 0, 1, 2, 0, 2])


CELLS = [
    ("age", "x", r"train\.csv, row 3, column 'age': 'x'; expected finite numbers"),
    ("age", "", r"row 3, column 'age': nan; expected finite numbers"),
    ("age", "inf", r"row 3, column 'age': inf"),
    ("kind", "", r"row 3, column 'kind': nothing is there"),
    ("town", "", r"row 3, column 'town': nothing is there"),
]


@pytest.mark.parametrize(("column", "value", "said"), CELLS)
def test_wrong_cells_are_named(tmp_path: Path, column: str, value: str, said: str) -> None:
    data = frame().astype(object)
    data.loc[3, column] = value
    save(data, tmp_path / "train.csv")
    with pytest.raises(DataError, match=said):
        load("csv", tmp_path, label="kind", owner="town")


def test_a_column_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    """Else the second label, which pandas renames, would be a feature."""
    (tmp_path / "train.csv").write_text("a,label,label\n1,0,0\n2,1,1\n3,0,0\n")
    with pytest.raises(DataError, match=r"train\.csv is damaged.*names the column 'label' twice"):
        load("csv", tmp_path, train="train.csv", label="label", test_fraction=0.34)


def test_wrong_columns_and_files_are_named(tmp_path: Path) -> None:
    for form in ("parquet", "csv"):
        save(frame(), tmp_path / f"train.{form}")
        for keys in (
            {"label": "kin"},
            {"label": "kind", "owner": "kin"},
            {"label": "kind", "features": ["age", "kin"]},
        ):
            with pytest.raises(
                DataError,
                match=rf"train\.{form} has no column 'kin'; it has age, kind, town, up, same",
            ):
                load(form, tmp_path, **keys)
        with pytest.raises(DataError, match=r"column 'town': 't0'; expected finite numbers"):
            load(form, tmp_path, label="kind")
        save(frame(5).assign(kind="c"), tmp_path / f"test.{form}")
        with pytest.raises(
            DataError,
            match=(
                rf"test\.{form}, column 'kind', row 0: label 'c'; expected one of the classes"
                r" \['a', 'b'\]"
            ),
        ):
            load(form, tmp_path, label="kind", owner="town", test=f"test.{form}")
        for features in ([], ["age", "kind"], "age"):
            with pytest.raises(ConfigError, match=r"dataset\.features="):
                load(form, tmp_path, label="kind", features=features)
        for content in (b"", b"PAR1", (tmp_path / "train.parquet").read_bytes()[:-20]):
            (tmp_path / f"test.{form}").write_bytes(content)
            with pytest.raises(DataError, match=rf"test\.{form}"):
                load(form, tmp_path, label="kind", owner="town", test=f"test.{form}")
    for content in ("a,label\n1,2\n1,2,3\n", "a,label\n1,2,3\n4,5,6\n"):
        (tmp_path / "train.csv").write_text(content)
        with pytest.raises(
            DataError,
            match=(
                r"train\.csv is damaged, or no csv file.*(2 fields in line 3, saw 3|Length of"
                r" header)"
            ),
        ):
            load("csv", tmp_path)
    pandas.DataFrame({"a": [1.0, 2.0], "label": [[1], [2]]}).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"row 0, column 'label': \[1\]; expected a number or text"):
        load("parquet", tmp_path)
    (tmp_path / "train.csv").write_text("a,label\n1,x\n")
    with pytest.raises(DataError, match=r"test_fraction=0.2 of its 1 samples are 0"):
        load("csv", tmp_path)
    with pytest.raises(ConfigError, match=r"a table is a file that ends in \.csv or \.parquet"):
        (tmp_path / "train.tsv").write_text("")
        load("csv", tmp_path, train="train.tsv")
    for fraction in (0, 1, "a"):
        with pytest.raises(ConfigError, match=r"dataset\.test_fraction="):
            load("csv", tmp_path, test_fraction=fraction)
