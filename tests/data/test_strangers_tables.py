"""Tables as strangers write them: what is no number, what is a name, and what must not be lost."""

from __future__ import annotations

import datetime
import logging
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from data.local_files import data_of
from data.own_data import load
from data.schemes import run_data

from fedhet import ClientData
from fedhet.core.errors import ConfigError, DataError
from fedhet.core.task import Samples
from fedhet.data.arrays import identifiers, spelled
from fedhet.data.encoding import Cells
from fedhet.data.federation import transform
from fedhet.data.files import confined, find_file
from fedhet.data.frames import CsvFormat, read_frame
from fedhet.data.moments import moments
from fedhet.data.tables import numeric_inputs
from fedhet.flower.sites import OwnData

HALF = {"test_fraction": 0.5}


def cells(values: Any, missing: str = "refuse") -> list[float]:
    return Cells(missing=missing).read(pandas.DataFrame({"a": values}), ["a"], "t")[:, 0].tolist()


# ---- types
DAY = datetime.date(2026, 1, 2)
DAYS = pandas.to_datetime(["2026-01-01", None, "2026-01-03"])


@pytest.mark.parametrize(
    "values",
    [
        DAYS,
        DAYS.tz_localize("UTC"),
        DAYS - DAYS[0],
        pandas.Series([None, None], dtype="datetime64[ms]"),
        DAYS.to_series().astype("category"),
        [DAY, None],
        [datetime.time(1), datetime.time(2)],
        [np.timedelta64(1, "s"), np.timedelta64(2, "s")],
        [b"1", b"2"],
        [[1.0], [2.0]],
        [{"a": 1}, None],
        [1 + 2j, 2],
    ],
    ids=str,
)
@pytest.mark.parametrize("missing", ["refuse", "median", "drop"])
def test_what_is_no_number_is_refused_with_advice(values: Any, missing: str) -> None:
    with pytest.raises(DataError, match=r"finite numbers; .*date .*number"):
        cells(values, missing)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([True, False], [1, 0]),
        (np.array([1, 2], np.uint8), [1, 2]),
        ([Decimal("1.5"), Decimal(2)], [1.5, 2]),
        (["1.5", "2e3"], [1.5, 2000]),
        (pandas.array([True, False], "boolean"), [1, 0]),
        (pandas.Categorical([3, 4]), [3, 4]),
    ],
)
def test_what_is_a_number(values: Any, expected: list[float]) -> None:
    assert cells(values) == expected


@pytest.mark.parametrize(
    "values",
    [
        [1.5, None],
        [Decimal("1.5"), None],
        ["1.5", None],
        pandas.array([1.5, None], "Float64"),
        pandas.array([1.5, None], "string"),
        pandas.Categorical([1.5, None]),
    ],
    ids=str,
)
def test_what_is_missing_is_missing_in_every_type(values: Any) -> None:
    with pytest.raises(DataError, match=r"row 1, column 'a': .*value .*missing"):
        cells(values)
    first, second = cells(values, "median")
    assert first == 1.5 and np.isnan(second)


@pytest.mark.parametrize("values", [DAYS, DAYS - DAYS[0], [DAY] * 3, [b"x"] * 3], ids=str)
def test_dates_and_bytes_are_no_labels_and_no_owners(tmp_path: Path, values: Any) -> None:
    for column in ("y", "who"):
        frame = pandas.DataFrame({"a": [1.5, 2.5, 4.5], "y": [0, 1, 0], "who": list("uvw")})
        frame[column] = values
        frame.dropna().to_parquet(tmp_path / "train.parquet")
        with pytest.raises(DataError, match=r"(a number|numbers) .*text"):
            load("parquet", tmp_path, label="y", owner="who", features=["a"], **HALF)


def test_dates_in_arrays_are_refused(tmp_path: Path) -> None:
    days = np.array(["2026-01-01", "2026-01-02"], "M8[D]")
    other = {"x_train": np.eye(2), "x_test": np.eye(2), "y_test": np.arange(2)}
    np.savez(tmp_path / "data.npz", y_train=days, **other)
    for target in (None, "number", "class"):
        with pytest.raises(DataError, match=r"datetime64\[D\]; .*numbers .*text"):
            load("npz", tmp_path, target=target)
    for x in (days[:, None], pandas.DataFrame({"a": days}), (days - days[0])[:, None]):
        with pytest.raises(DataError, match=r"number, .*array"):
            ClientData((x, np.arange(2))).read(0)


# ---- names
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((1, "1"), (1.0, "1"), ("1.0", "1"), (-0.0, "0"), ("-0.0", "0"), (Decimal("1.00"), "1")),
        *(("01", "01"), ("None", "None"), ("NA", "NA"), (0.5, "0.5"), ("1.50", "1.50")),
        *((True, "True"), ("true", "True"), ("1e5", "1e5"), ("9" * 30 + ".0", "9" * 30)),
        (np.int8(3), "3"),
    ],
)
def test_the_spelling_of_names(value: Any, expected: str) -> None:
    assert spelled(value) == expected


def test_names_in_any_type_are_the_same_names() -> None:
    expected = ["10", "2", "1"]
    for values in ([10, 2, 1], [10.0, 2.0, 1.0], ["10", "2.0", "1"], [Decimal(10), 2, "1"]):
        found = identifiers(np.array(values, object if len({*map(type, values)}) > 1 else None))
        assert found.astype(str).tolist() == expected


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_codes_stay_codes_and_numbers_numbers(tmp_path: Path) -> None:
    rows = "01,0.1\n02,0.2\n10,0.3\n01,0.4\n"
    write(tmp_path, "train.csv", f"code,a\n{rows}")
    data = load("csv", tmp_path, label="code", **HALF)
    assert data.classes == ("01", "02", "10")
    declared = load("csv", tmp_path, label="code", classes=["10", "02", "01"], **HALF)
    assert declared.classes == ("10", "02", "01")
    write(tmp_path, "test.csv", "code,a\n10,0.3\n10,0.5\n")  # here the codes look like numbers
    assert load("csv", tmp_path, label="code", test="test.csv").test.y.tolist() == [2, 2]
    frame = read_frame(
        write(tmp_path, "n.csv", "n,m,e\n1,1.0,1E5\n2,,2E5\n"),
        dict.fromkeys("nme", ()),
        numbers="nme",
    )
    assert [kind.kind for kind in frame.dtypes] == ["i", "f", "O"]
    assert identifiers(frame["e"].to_numpy(object)).tolist() == ["1E5", "2E5"]


def test_levels_are_compared_as_text(tmp_path: Path) -> None:
    """Also where pandas makes fractions of whole numbers, because a cell is empty."""
    write(tmp_path, "train.csv", "grade,y\n1,0\n2,1\n,0\n3,1\n")
    levels = {"categories": {"grade": ["1", "2", "3"]}, "missing": "median"}
    data = load("csv", tmp_path, label="y", test="train.csv", **levels)
    expected = [[0, 0], [1, 0], [torch.nan] * 2, [0, 1]]
    torch.testing.assert_close(data.x, torch.tensor(expected).double(), equal_nan=True)


@pytest.mark.parametrize("word", ["None", "NA", "null", "n/a", "nan", "NULL"])
def test_a_declared_name_is_never_missing(tmp_path: Path, word: str) -> None:
    rows = "".join(f"{w},{w},{i / 7:.3f}\n" for i, w in enumerate([word, "x", word, "", "y"]) if w)
    write(tmp_path, "train.csv", f"c,y,a\n{rows}")
    settings = {"categories": {"c": [word, "x", "y"]}, "classes": ["x", word, "y"]}
    for missing in ("refuse", "median", "drop"):
        data = load("csv", tmp_path, label="y", missing=missing, test="train.csv", **settings)
        assert data.y.tolist() == [1, 0, 1, 2] and data.x[:, 1:].tolist()[0] == [0, 0]
    undeclared = {"categories": {"c": ["x", "y"]}, "classes": ["x", word, "y"]}
    data = load("csv", tmp_path, label="y", missing="drop", test="train.csv", **undeclared)
    assert data.y.tolist() == [0, 2]  # of a level that nobody declared, pandas' words are missing


@pytest.mark.parametrize("column", ["y", "who"])
def test_a_region_called_na(tmp_path: Path, column: str, caplog: pytest.LogCaptureFixture) -> None:
    """An undeclared name is a name, which a line says; and dataset.read makes it missing."""
    frame = pandas.DataFrame({"a": np.arange(6) / 7, "y": list("uvuvuv"), "who": list("uvuvuv")})
    frame.loc[0, column] = "NA"
    frame.to_csv(tmp_path / "train.csv", index=False)
    data = load("csv", tmp_path, label="y", owner="who", test="train.csv")
    assert "NA" in (data.classes if column == "y" else data.owner_names)
    assert f"column '{column}': 'NA' are read as names" in caplog.text
    with pytest.raises(DataError, match=r"value .*missing .*empty"):
        load("csv", tmp_path, label="y", owner="who", read={"na_values": ["NA"]}, **HALF)


def test_a_word_for_missing_beside_numbers_is_no_class(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", "y,a\n0.5,1.5\nNA,2.5\n0.7,1.5\n")
    with pytest.raises(DataError, match=r"row 3 .*column 'y': .*value .*missing .*; "):
        load("csv", tmp_path, label="y", **HALF)


def test_owners_and_labels_agree_between_files(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"a": np.arange(4) / 7, "y": [1, 2, 1, 10], "who": [2, 10, 2, 1]})
    frame.to_csv(tmp_path / "train.csv", index=False)
    frame.astype({"y": float, "who": float}).to_parquet(tmp_path / "floats.parquet")
    frame.astype({"y": str, "who": str}).to_parquet(tmp_path / "texts.parquet")
    csv = load("csv", tmp_path, label="y", owner="who", test="train.csv")
    assert csv.owner_names == ("1", "2", "10") and csv.classes == ("1", "2", "10")
    for test in ("floats.parquet", "texts.parquet"):
        other = load("csv", tmp_path, label="y", owner="who", test=test)
        assert other.test.y.tolist() == csv.y.tolist()
        assert other.test_owners.tolist() == ["2", "10", "2", "1"]


def test_nothing_cannot_be_declared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="distinct levels"):
        Cells({"c": [None, "x"]})
    write(tmp_path, "train.csv", "y,a\nx,1.5\nx,2.5\n")
    with pytest.raises(ConfigError, match=r"list .*distinct labels"):
        load("csv", tmp_path, label="y", classes=[None, "x"], **HALF)


# ---- what nobody chose
@pytest.mark.parametrize("name", ["", " ", "Unnamed: 0", "__index_level_0__"])
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_column_without_a_name_is_no_input(tmp_path: Path, name: str, form: str) -> None:
    frame = pandas.DataFrame({name: np.arange(6), "a": np.arange(6) / 7, "y": [0, 1] * 3})
    path = tmp_path / f"train.{form}"
    frame.to_csv(path, index=False) if form == "csv" else frame.to_parquet(path)
    with pytest.raises(ConfigError, match=r"column 1 .*name .*dataset\.features=\[a\]"):
        load(form, tmp_path, label="y", **HALF)
    assert load(form, tmp_path, label="y", features=["a"], **HALF).columns == ("a",)
    chosen = "Unnamed: 0" if form == "csv" and not name else name
    assert load(form, tmp_path, label="y", features=[chosen], **HALF).columns == (chosen,)


def test_inputs_by_default_are_named_and_numbers_of_rows_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    frame = pandas.DataFrame({"id": np.arange(20), "a": np.arange(20) / 7, "y": [0, 1] * 10})
    frame.to_csv(tmp_path / "train.csv", index=False)
    load("csv", tmp_path, label="y", **HALF)
    assert "dataset.features=null, so the inputs are: id, a" in caplog.text
    for _ in range(2):  # also from the cache
        caplog.clear()
        load("csv", tmp_path, label="y", **HALF)
        assert "no two rows have the same whole number in id" in caplog.text
    caplog.clear()
    load("csv", tmp_path, label="y", features=["id", "a"], **HALF)
    assert "so the inputs are" not in caplog.text and "whole number" not in caplog.text


# ---- what must not be lost
def test_the_rows_of_each_table_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(tmp_path, "train.csv", "a,y\n1.5,0\n2.5,1\n")
    load("csv", tmp_path, label="y", **HALF)
    assert caplog.text.count("train.csv: 2 rows, 2 columns") == 1


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ('good,1\n"bad\nx,0\ny,0\n"bad, too,1\n', r"lines 3 .*6: ',' .*after '\"'"),
        ('good,1\n"bad,0\nx,1\n', r"lines 3 .*4: unexpected end .*data"),
        ('good,1\n"a" b,0\n', r"lines 3 .*3: ',' .*after '\"'"),
    ],
)
def test_a_stray_quotation_mark_is_refused_with_its_lines(
    tmp_path: Path, rows: str, lines: str
) -> None:
    path = write(tmp_path, "t.csv", f"text,y\n{rows}")
    with pytest.raises(DataError, match=lines) as caught:
        read_frame(path)
    assert "t.csv" in str(caught.value)


def test_quotation_marks_that_are_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = "x" * 200_000  # more than Python's own module takes by default
    text = f'text,y\n"a ""b"", c",1\n5" pipe,0\n\n"two\nlines",1\n{long},0\n'
    frame = read_frame(write(tmp_path, "t.csv", text))
    assert frame["text"].tolist() == ['a "b", c', '5" pipe', "two\nlines", long]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    # well-formed, and yet three rows are probably one
    read_frame(write(tmp_path, "t.csv", 'text,y\ngood,1\n"bad,0\nx,1\ny",1\n'))
    assert "lines 3 to 5 are one row" in caplog.text


def test_samples_and_classes_that_are_at_no_client_are_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    few = ["partition=pathological", "partition.clients=2", "partition.classes=1"]
    data = run_data(*few)
    assigned = sum(map(len, data.partition.indices))
    held = {int(c) for rows in data.partition.indices for c in data.dataset.y[rows].unique()}
    missing = ", ".join(str(c) for c in range(10) if c not in held)
    told = f"gives {1437 - assigned} of 1437 samples to no client, and no client has the classes"
    assert caplog.text.count(f"{told} {missing}; the global test set has them") == 1
    caplog.clear()
    run_data("partition=iid", "partition.clients=3")
    assert "to no client" not in caplog.text


# ---- precision, and pixels
def test_tables_keep_their_precision_until_they_are_normalised(tmp_path: Path) -> None:
    """Seconds of a day in 2026 differ by less than float32 resolves at 1.77e9."""
    seconds = 1_770_000_000 + np.arange(8)
    frame = pandas.DataFrame({"t": seconds, "y": [0, 1] * 4})
    frame.to_csv(tmp_path / "train.csv", index=False)
    np.savez(
        tmp_path / "data.npz",
        **{"x_train": seconds[:, None], "y_train": frame["y"]},
        **{"x_test": seconds[:, None], "y_test": frame["y"]},
    )
    expected = (seconds - seconds.mean()) / seconds.std()
    for overrides in (
        ["dataset=csv", "dataset.train=train.csv", "dataset.test=train.csv", "dataset.label=y"],
        ["dataset=npz"],
    ):
        data = run_data(
            *overrides,
            f"data_dir={tmp_path}",
            "partition=iid",
            "partition.clients=1",
            "partition.split=[1,0,0]",
        )
        normalize = transform(data.dataset)
        assert normalize is not None
        got = normalize(data.dataset.x)[:, 0].numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-12)
    x = ClientData((seconds[:, None].astype(float), frame["y"].to_numpy())).train.x
    assert x[:, 0].tolist() == seconds.tolist()


@pytest.mark.parametrize(
    ("shape", "pixels"), [((4, 3), False), ((4, 3, 3), True), ((4, 1, 3, 3), True)]
)
def test_what_is_a_pixel_is_one_decision(shape: tuple[int, ...], pixels: bool) -> None:
    """In files, as objects, and in statistics."""
    values = np.full(shape, 51, np.uint8)
    given = ClientData((values, np.zeros(4, int))).train.x
    read = numeric_inputs(values, "x")
    assert (given.dtype == torch.uint8) == (read.dtype == np.uint8) == pixels
    assert moments([read]).mean.tolist()[0] == pytest.approx(51 / 255 if pixels else 51)
    assert moments([given.numpy()]).mean.tolist() == pytest.approx(
        [51 / 255 if pixels else 51] * shape[1]
    )
    assert Samples(torch.from_numpy(values), torch.zeros(4)).x.unique().item() == 51


# ---- how csv files are written
def test_a_csv_file_as_another_country_writes_it(tmp_path: Path) -> None:
    text = "# a comment\nname;größe;stadt\n'a;b';1.000,5;01\n#x;1;1\nc;?;02\nd;2,5;?\n"
    path = tmp_path / "train.csv"
    path.write_text(text, encoding="latin-1")
    given = {"sep": ";", "decimal": ",", "thousands": ".", "encoding": "latin-1", "skiprows": 1}
    given |= {"na_values": ["?"], "quotechar": "'", "comment": "#"}
    form = CsvFormat.of(given)
    frame = read_frame(path, {"name": None, "stadt": ()}, form)
    assert frame["name"].tolist() == ["a;b", "c", "d"]
    assert frame["größe"].tolist()[::2] == [1000.5, 2.5] and frame["größe"].isna()[1]
    assert frame["stadt"].tolist()[:2] == ["01", "02"] and frame["stadt"].isna()[2]
    assert CsvFormat.of_query(form.query) == form and '"' not in form.query
    settings = {"label": "stadt", "features": ["größe"], "missing": "median"}
    with pytest.raises(DataError, match=r"column 'stadt': .*value .*missing .*; "):
        load("csv", tmp_path, read=given, **settings, **HALF)
    node = {"site": "a", "data": str(path), "read": form.query}
    own = OwnData.of(node)
    assert own is not None and own.files.form == form


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seperator": ";"}, r"seperator .*sep, decimal"),
        ({"engine": "python"}, r"key .*dataset\.read=engine "),
        ({"sep": "::"}, r"dataset\.read\.sep='::': .*single ASCII character"),
        ({"sep": ".", "decimal": "."}, r"dataset\.read=.*different"),
        ({"encoding": "latin-99"}, r"dataset\.read\.encoding=latin-99"),
        ({"encoding": "hex"}, r"dataset\.read\.encoding=hex"),
        ({"thousands": "\u00a0"}, "single ASCII character"),
        ({"skiprows": -1}, r"dataset\.read\.skiprows=-1"),
        ({"na_values": [""]}, r"dataset\.read\.na_values\[0\]"),
        ("sep=;", r"dataset\.read=sep=;: .*mapping"),
    ],
)
def test_wrong_formats_are_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CsvFormat.of(given)


def test_another_encoding_is_advised(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("größe,y\n1,0\n".encode("latin-1"))
    with pytest.raises(
        DataError,
        match=r"utf-8.* dataset\.read .*encoding",
    ):
        read_frame(tmp_path / "t.csv")


def test_a_file_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, "mine.csv", "a,y\n1,0\n")
    assert find_file("data", "train", "mine.csv") == file
    with pytest.raises(DataError):
        find_file("elsewhere", "train", "mine.csv")
    with confined(), pytest.raises(DataError):
        find_file("data", "train", "mine.csv")


def test_a_site_reads_its_files_as_its_own_format_says(tmp_path: Path) -> None:
    rows = "".join(f"{n},{n % 5};{n % 2}\n" for n in range(40))
    for site in "ab":
        write(tmp_path, f"{site}.csv", f"a;label\n{rows}")
    declared = ["dataset=local", "dataset.sites=[a,b]", "dataset.features=[a]", "dataset.classes=2"]
    files = f"dataset.files={{a:{tmp_path / 'a.csv'},b:{tmp_path / 'b.csv'}}}"
    data = data_of(*declared, files, 'dataset.read={sep: ";", decimal: ","}')
    assert data.clients.sizes[0] > 0 and data.clients[0].train.x.max() > 30
    assert "read" not in data.declared.content


# ---- what readers of this code have found
def test_a_missing_cell_is_no_level_that_is_called_nan() -> None:
    for values, levels in ((["nan", "x", None], ["nan", "x"]), ([True, None], ["None", "True"])):
        frame = pandas.DataFrame({"c": pandas.Series(values, dtype=object)})
        with pytest.raises(DataError, match=r"value .*missing"):
            Cells({"c": levels}).read(frame, ["c"], "t")


def test_owners_and_declared_names_are_the_text_of_their_cells(tmp_path: Path) -> None:
    words = ["1.1", "1.10", " 7", "007", "+7", "1E+5"]
    rows = "".join(f"{word},{n / 7:.3f},{n % 2}\n" for n, word in enumerate(words))
    write(tmp_path, "train.csv", f"w,a,y\n{rows}")
    data = load("csv", tmp_path, label="y", owner="w", test="train.csv")
    assert sorted(data.owner_names) == sorted(words)
    how = {"test": "train.csv", "features": ["a"]}
    assert load("csv", tmp_path, label="w", classes=words, **how).y.tolist() == [*range(6)]
    levels = {"categories": {"w": words}, "features": ["w", "a"]}
    x = load("csv", tmp_path, label="y", test="train.csv", **levels).x
    assert x[:, 1:].tolist() == torch.eye(6)[:, 1:].tolist()
    commas = {"sep": ";", "decimal": ",", "thousands": "."}
    write(tmp_path, "train.csv", "w;a;y\n1,5;1,5;0\n12.345;2;1\n")
    levels = {"categories": {"w": ["1,5", "12.345"]}, "test": "train.csv", "read": commas}
    assert load("csv", tmp_path, label="y", **levels).x.tolist() == [[1.5, 0], [2, 1]]


def test_names_beyond_the_whole_numbers_of_numpy() -> None:
    large = np.array([2**63 + 5, 5], np.uint64)
    assert identifiers(large).tolist() == [str(2**63 + 5), "5"]
    assert identifiers(np.array([0.1, 1], np.float32)).tolist() == ["0.1", "1"]
    assert spelled(Decimal("1.50")) == "1.5"


def test_fractions_beside_a_code_or_as_decimals_are_numbers(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"a": np.arange(30) / 7, "y": [Decimal(n) / 4 for n in range(30)]})
    frame.to_parquet(tmp_path / "train.parquet")
    assert load("parquet", tmp_path, label="y", **HALF).target == "number"
    write(tmp_path, "train.csv", "y,a\n0.50,1.5\n1e-05,2.5\n2,3.5\n")
    assert load("csv", tmp_path, label="y", **HALF).target == "number"


def test_many_texts_as_labels_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rows = "".join(f"{n / 30 if n else '?'},{n / 7:.3f}\n" for n in range(30))
    write(tmp_path, "train.csv", f"y,a\n{rows}")
    load("csv", tmp_path, label="y", test="train.csv")
    assert "there are 30 different labels in 30 samples" in caplog.text


def test_a_missing_label_in_a_list_and_an_empty_text(tmp_path: Path) -> None:
    lists = pandas.DataFrame({"a": [1.5, 2.5, 3], "y": [["u", None], ["u"], ["v"]]})
    lists.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"row 0: .*label .*list .*missing"):
        load("parquet", tmp_path, label="y", **HALF)
    lists.assign(y=["u", "", "v"]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"row 1, column 'y': .*value .*missing"):
        load("parquet", tmp_path, label="y", **HALF)


@pytest.mark.parametrize("ids", [np.arange(30.0), np.arange(30).astype(str), [*range(29), None]])
def test_numbers_of_rows_in_any_type(
    tmp_path: Path, ids: Any, caplog: pytest.LogCaptureFixture
) -> None:
    frame = pandas.DataFrame({"id": ids, "a": np.arange(30) / 7, "y": [0, 1] * 15})
    frame.to_parquet(tmp_path / "train.parquet")
    load("parquet", tmp_path, label="y", missing="median", **HALF)
    assert "no two rows have the same whole number in id" in caplog.text


def test_names_of_columns_that_are_numbers(tmp_path: Path) -> None:
    frame = pandas.DataFrame(np.array([[0.5, 0], [1.5, 1]] * 2), columns=[0, 1])
    frame.to_parquet(tmp_path / "train.parquet")
    data = load("parquet", tmp_path, label="1", features=["0"], **HALF)
    assert data.columns == ("0",)
    with pytest.raises(ConfigError, match=r"dataset\.label\[0\]=1 .*text"):
        load("parquet", tmp_path, label=1, **HALF)


def test_lists_of_numbers_as_objects_are_exact() -> None:
    rows = [[1_770_000_000.0 + n, 1.5] for n in range(3)]
    for given in (([*rows], [0, 1, 0]), [(row, 0) for row in rows]):
        assert ClientData(given).train.x.tolist() == rows


def test_lines_above_the_header_and_marks_of_the_byte_order(tmp_path: Path) -> None:
    path = write(tmp_path, "T.CSV", '"Report\n  two lines\na,y\n"x\ny",0\n')
    frame = read_frame(path, {"a": ()}, CsvFormat(skiprows=2))
    assert frame.to_numpy().tolist() == [["x\ny", 0]]
    path.write_bytes(b'\xef\xbb\xbf"a\nb",y\n1,0\n')
    assert [*read_frame(path, form=CsvFormat(encoding="UTF8")).columns] == ["a\nb", "y"]
    path = write(tmp_path, "one.csv", 'a\n"x"\n""\n"y"\n')
    assert len(read_frame(path, {"a": ()})) == 3
