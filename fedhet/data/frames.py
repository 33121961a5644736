"""Tables in csv and Parquet files, as data frames of pandas.

Parquet files say what their cells are. A csv file does not: there, columns of names (labels,
owners, categories, texts) keep the text of their cells, and the others are numbers.
"""

from __future__ import annotations

import codecs
import csv
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qs, urlencode

from fedhet.core import check
from fedhet.core.check import Checked, setting
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.arrays import spelled
from fedhet.data.files import check_memory, log

if TYPE_CHECKING:
    import pandas


SUFFIXES = (".csv", ".parquet")  # in any case of letters
# Text that looks like a number and is a code: 01 (a 0 would be lost), 1E5 (it would be 100000).
_CODE = r"^\s*[+-]?(?:0\d|\d+[eE]\d)"


@dataclass(frozen=True, kw_only=True)
class CsvFormat(Checked):
    """How csv files are written (`dataset.read`); the names are those of `pandas.read_csv`.

    Args:
        sep: the character between two columns; "\\\\t" stands for a tab.
        decimal, thousands: the marks in numbers; thousands=None: there is none.
        encoding: the encoding of the text.
        na_values: what a cell says that has no value, beside what pandas knows.
        quotechar: the mark around a cell that contains `sep` or a line break.
        comment: the character behind which the rest of a line is not read; None: there is none.
        skiprows: the number of lines above the header.

    Raises:
        ConfigError: a value is not allowed, or two of the characters are the same.
    """

    GROUP: ClassVar[str] = "dataset.read"
    MARKS: ClassVar[tuple[str, ...]] = ("sep", "decimal", "thousands", "quotechar", "comment")

    sep: str = ","
    decimal: str = "."
    thousands: str | None = None
    encoding: str = "utf-8"
    na_values: Sequence[str] = ()
    quotechar: str = '"'
    comment: str | None = None
    skiprows: int = setting(0, low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sep == "\\t":
            object.__setattr__(self, "sep", "\t")
        words = [self.na_values] if isinstance(self.na_values, str) else self.na_values
        words = tuple(map(str, words)) if isinstance(words, Sequence) else words
        object.__setattr__(
            self, "na_values", check.each(check.text, f"{self.GROUP}.na_values", words)
        )
        given = {key: mark for key in self.MARKS if (mark := getattr(self, key)) is not None}
        for key, mark in given.items():
            if len(mark) != 1 or not mark.isascii() or mark in "\r\n":
                raise ConfigError(f"{self.GROUP}.{key}={mark!r}: must be a single ASCII character")
        if len(set(given.values())) < len(given):
            raise ConfigError(f"{self.GROUP}={given}: these characters must be different")
        try:
            "a".encode(self.encoding)
        except (LookupError, ValueError) as error:
            raise ConfigError(f"{self.GROUP}.encoding={self.encoding}: {error}") from error

    @classmethod
    def of(cls, given: object) -> CsvFormat:
        """The format that a mapping of such settings gives; None: all are the defaults."""
        if not isinstance(given, Mapping | None):
            raise ConfigError(f'{cls.GROUP}={given}: must be a mapping, such as {{sep: ";"}}')
        for key in (given := given or {}):
            check.one_of(f"a key of {cls.GROUP}", key, [one.name for one in fields(cls)])
        return cls(**{str(key): value for key, value in given.items()})

    @property
    def given(self) -> dict[str, Any]:
        """Those settings that differ from their defaults; {} where none does."""
        return {
            one.name: value
            for one in fields(self)
            if (value := getattr(self, one.name)) != one.default
        }

    @property
    def query(self) -> str:
        """`given` as a text without quotation marks, as Flower's node config needs it."""
        return urlencode(self.given, doseq=True)

    @classmethod
    def of_query(cls, text: str) -> CsvFormat:
        """The format of which this is the `query`.

        Raises:
            ConfigError: it is no such text.
        """
        try:
            found: dict[str, Any] = parse_qs(text, strict_parsing=bool(text))
        except ValueError as error:
            raise ConfigError(f"read={text!r}: expected key=value&key=value ({error})") from error
        alone = {key: values[0] for key, values in found.items() if key != "na_values"}
        if (lines := alone.get("skiprows", "")).isdigit():
            alone["skiprows"] = int(lines)
        return cls.of(found | alone)


def read_frame(
    path: Path,
    names: Mapping[str, Collection[str]] | None = None,
    form: CsvFormat | None = None,
    numbers: Collection[str] = (),
) -> pandas.DataFrame:
    """The table in a file.

    Args:
        path: the file; its ending says what it is.
        names: in a csv file, the columns of which the cells are names or texts, each with those
            that are declared, which are never missing values; () where none is. Their cells are
            text as it stands in the file.
        form: how a csv file is written.
        numbers: those of `names` that are numbers if all of their cells are numbers, and none is a
            code, such as 01.

    Raises:
        ConfigError: the file has another ending.
        DataError: the file is damaged, or rows of it would be lost.
    """
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise ConfigError(f"{path}: a table must be a file that ends in {' or '.join(SUFFIXES)}")
    import pandas

    try:
        if kind == ".parquet":
            from pyarrow.parquet import read_metadata

            about = read_metadata(path)  # runs of equal values take no room in the file
            check_memory(8 * about.num_rows * about.num_columns)  # as float64
            frame = pandas.read_parquet(path)
            frame.columns = frame.columns.map(str)
        else:
            frame = _read_csv(path, names or {}, form or CsvFormat(), numbers)
    # KeyError and TypeError come from damaged metadata
    except (OSError, ValueError, KeyError, TypeError, pandas.errors.ParserWarning) as error:
        raise DataError(
            f"{path} is damaged, or not a {kind[1:]} file with a header: {str(error).strip()}"
            " (of a csv file, dataset.read gives the encoding and more)"
        ) from error
    return frame


def _read_csv(
    path: Path,
    names: Mapping[str, Collection[str]],
    form: CsvFormat,
    numbers: Collection[str],
) -> pandas.DataFrame:
    import pandas

    utf_8 = codecs.lookup(form.encoding).name == "utf-8"  # a mark of the byte order is no text
    with path.open(encoding="utf-8-sig" if utf_8 else form.encoding, newline="") as file:
        for _ in range(form.skiprows):
            file.readline()
        text = file.read()
    how: dict[str, Any] = {key: getattr(form, key) for key in form.MARKS}
    how["index_col"] = False
    as_text: dict[str, Any] = {**how, "dtype": str, "keep_default_na": False}
    with warnings.catch_warnings():
        # pandas only warns about rows with more fields than the header
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        header = pandas.read_csv(StringIO(text), header=None, nrows=1, **as_text).iloc[0]
        # pandas would rename the second column to "<name>.1": the label would become a feature
        if (twice := header[header.duplicated() & (header != "")]).size:
            raise ValueError(f"it names the column {twice.iloc[0]!r} twice")
        rows = _strict_rows(path, text, form, len(header))
        # low_memory=False: a column has one type, whatever its chunks look like
        frame = pandas.read_csv(
            StringIO(text), low_memory=False, na_values=list(form.na_values), **how
        )
        columns = [column for column in names if column in frame]
        words = pandas.read_csv(StringIO(text), usecols=columns, **as_text)
    if rows not in (None, len(frame)):
        raise ValueError(f"it has {rows} rows, but pandas reads {len(frame)}")
    for column in columns:
        frame[column] = _named(
            path, frame[column], words[column], names[column], form, numeric=column in numbers
        )
    return frame


def _named(
    path: Path,
    typed: pandas.Series,
    words: pandas.Series,
    declared: Collection[str],
    form: CsvFormat,
    *,
    numeric: bool,
) -> pandas.Series:
    """The cells of a column of names or texts.

    Args:
        path, form: the file, and how it is written.
        typed: the cells as pandas understands them.
        words: the cells as they are.
        declared: the names that are no missing values.
        numeric: whether the column is of numbers if all cells are.
    """
    from pandas.api.types import is_numeric_dtype

    if numeric and is_numeric_dtype(typed) and typed.notna().any():
        present = words[typed.notna()].drop_duplicates()
        values = typed[present.index]
        same = all(spelled(word) == spelled(n) for word, n in zip(present, values, strict=True))
        fractions = typed.dtype.kind == "f" and bool((values % 1 != 0).any())
        if same or (fractions and not present.str.contains(_CODE).any()):
            return typed  # and NA, beside numbers, is no name
    missing = (words == "") | words.isin(form.na_values)
    if declared:
        missing = typed.isna() & ~words.map(spelled).isin(declared)
    taken = sorted({*words[typed.isna() & ~missing]}) if not declared else []
    if taken:
        log.warning(
            "%s, column %r: %s are names like any other; dataset.read={na_values: [%s]} makes them"
            " missing values",
            *(path, words.name, ", ".join(map(repr, taken)), ", ".join(taken)),
        )
    return words.where(~missing)


def _strict_rows(path: Path, text: str, form: CsvFormat, columns: int) -> int | None:
    """The number of rows in a text with a quotation mark, by a strict reading; else None.

    pandas joins what follows a closing mark to the cell, and so it loses rows.

    Raises:
        ValueError: a mark is where none may be.
    """
    of_row: list[str] = []

    def lines() -> Iterator[str]:
        for line in StringIO(text, newline=""):
            comment = form.comment is not None and line.startswith(form.comment)
            of_row.append("\n" if comment else line)
            yield of_row[-1]

    if form.quotechar not in text:
        return None
    reader = csv.reader(lines(), delimiter=form.sep, quotechar=form.quotechar, strict=True)
    # A text may be longer than what the module takes by default.
    limit = csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    count, done, above = -1, 0, form.skiprows
    try:
        for _ in reader:
            count += bool("".join(of_row).strip())  # pandas skips blank lines
            if len(of_row) > 1 and all(line.count(form.sep) == columns - 1 for line in of_row):
                log.warning(
                    "%s, lines %d to %d are one row, because a cell in quotation marks goes over"
                    " them: if each line is a row, a quotation mark is wrong",
                    *(path, above + done + 1, above + reader.line_num),
                )
            of_row.clear()
            done = reader.line_num
    except csv.Error as error:
        raise ValueError(
            f"lines {above + done + 1} to {above + reader.line_num}: {error}. A cell with a"
            " quotation mark stands in quotation marks and has that mark twice;"
            " dataset.read={quotechar: ...} names another mark"
        ) from error
    finally:
        csv.field_size_limit(limit)
    return count
