"""Tables in csv and Parquet files, as data frames of pandas.

Parquet files say what their cells are. A csv file does not: there, columns of names (labels,
owners, categories, texts) keep the text of their cells, and the others are numbers.
"""

from __future__ import annotations

import codecs
import csv
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qs, urlencode

from fedhet.core import check
from fedhet.core.check import Checked, setting
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.files import check_memory

if TYPE_CHECKING:
    import pandas

log = logging.getLogger("fedhet.data")

SUFFIXES = (".csv", ".parquet")
# Text that looks like a number and is a code: 01 (a 0 would be lost), 1E5 (it would be 100000).
_CODE = r"^[+-]?(?:0\d|\d+[eE]\d)"


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
        object.__setattr__(self, "na_values", check.each(check.text, self._key("na_values"), words))
        marks = ("sep", "decimal", "thousands", "quotechar", "comment")
        given = {key: mark for key in marks if (mark := getattr(self, key)) is not None}
        for key, mark in given.items():
            if len(mark) != 1:
                raise ConfigError(f"{self._key(key)}={mark!r}: must be a single character")
        if len(set(given.values())) < len(given):
            raise ConfigError(f"{self.GROUP}={given}: these characters must be different")
        try:
            codecs.lookup(self.encoding)
        except LookupError as error:
            raise ConfigError(f"{self._key('encoding')}={self.encoding}: {error}") from error

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

    @property
    def for_pandas(self) -> dict[str, Any]:
        """Arguments of `pandas.read_csv`, but for `na_values`."""
        return {key: value for key, value in vars(self).items() if key != "na_values"}

    def _key(self, name: str) -> str:
        return f"{self.GROUP}.{name}"


def read_frame(
    path: Path,
    names: Mapping[str, Collection[str] | None] | None = None,
    form: CsvFormat | None = None,
) -> pandas.DataFrame:
    """The table in a file.

    Args:
        path: the file; its ending says what it is.
        names: in a csv file, the columns of which the cells are names or texts, each with those
            that are declared, which are never missing values; () where none is. Such a column is
            made of numbers if all of its cells are numbers and none is a code, such as 01. With
            None it always is text.
        form: how a csv file is written.

    Raises:
        ConfigError: the file has another ending.
        DataError: the file is damaged, or rows of it would be lost.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: a table must be a file that ends in {' or '.join(SUFFIXES)}")
    import pandas

    try:
        if path.suffix == ".parquet":
            from pyarrow.parquet import read_metadata

            about = read_metadata(path)  # runs of equal values take no room in the file
            check_memory(8 * about.num_rows * about.num_columns)  # as float64
            frame = pandas.read_parquet(path)
        else:
            frame = _read_csv(path, names or {}, form or CsvFormat())
    # KeyError and TypeError come from damaged metadata
    except (OSError, ValueError, KeyError, TypeError, pandas.errors.ParserWarning) as error:
        advice = ""
        if isinstance(error, UnicodeError):
            advice = "; another encoding is given as dataset.read={encoding: latin-1}"
        raise DataError(
            f"{path} is damaged, or not a {path.suffix[1:]} file with a header:"
            f" {str(error).strip()}{advice}"
        ) from error
    log.info("%s: %d rows, %d columns", path, *frame.shape)
    return frame


def _read_csv(
    path: Path, names: Mapping[str, Collection[str] | None], form: CsvFormat
) -> pandas.DataFrame:
    import pandas

    how: dict[str, Any] = {**form.for_pandas, "index_col": False}
    as_text: dict[str, Any] = {**how, "dtype": str, "keep_default_na": False}
    with warnings.catch_warnings():
        # pandas only warns about rows with more fields than the header
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        header = pandas.read_csv(path, header=None, nrows=1, **as_text).iloc[0]
        # pandas would rename the second column to "<name>.1": the label would become a feature
        other = next((mark for mark in ",;\t|" if len(header) == 1 and mark in header[0]), None)
        if other:
            raise ValueError(
                f"its columns are separated by {other!r}; {form.sep!r} is expected, write"
                f" dataset.read={{sep: {other!r}}}"
            )
        if (twice := header[header.duplicated() & (header != "")]).size:
            raise ValueError(f"it names the column {twice.iloc[0]!r} twice")
        rows = _strict_rows(path, form, len(header))
        # low_memory=False: a column has one type, whatever its chunks look like
        frame = pandas.read_csv(path, low_memory=False, na_values=list(form.na_values), **how)
        columns = [column for column in names if column in frame]
        words = pandas.read_csv(path, usecols=columns, **as_text)
    if rows not in (None, len(frame)):
        raise ValueError(f"it has {rows} rows, but pandas reads {len(frame)}")
    for column in columns:
        frame[column] = _named(path, frame[column], words[column], names[column], form)
    return frame


def _named(
    path: Path,
    typed: pandas.Series,
    words: pandas.Series,
    declared: Collection[str] | None,
    form: CsvFormat,
) -> pandas.Series:
    """The cells of a column of names or texts.

    Args:
        path, form: the file, and how it is written.
        typed: the cells as pandas understands them.
        words: the cells as they are.
        declared: see `read_frame`.
    """
    from pandas.api.types import is_numeric_dtype

    empty = (words == "") | words.isin(form.na_values)
    numbers = declared is not None and is_numeric_dtype(typed) and bool(typed.notna().any())
    missing = typed.isna() & ~words.isin(declared) if declared else empty
    if numbers and not declared:
        missing = typed.isna()  # beside numbers, NA is no name
    codes = words.str.contains(_CODE).any()
    if numbers and not codes and bool((typed.isna() == missing).all()):
        return typed
    taken = sorted({*words[typed.isna() & ~missing]}) if declared == () else []
    if taken:
        log.warning(
            "%s, column %r: %s are names like any other; dataset.read={na_values: [%s]} makes them"
            " missing values",
            *(path, words.name, ", ".join(map(repr, taken)), ", ".join(taken)),
        )
    return words.where(~missing)


def _strict_rows(path: Path, form: CsvFormat, columns: int) -> int | None:
    """The number of rows in a file with a quotation mark, by a strict reading; else None.

    pandas joins what follows a closing mark to the cell, and so it loses rows.

    Raises:
        ValueError: a mark is where none may be.
    """
    of_row: list[str] = []

    def lines() -> Iterator[str]:
        encoding = "utf-8-sig" if form.encoding == "utf-8" else form.encoding
        with path.open(encoding=encoding, newline="") as file:
            for number, line in enumerate(file):
                comment = form.comment is not None and line.startswith(form.comment)
                of_row.append("\n" if number < form.skiprows or comment else line)
                yield of_row[-1]

    if not any(form.quotechar in line for line in lines()):
        return None
    of_row.clear()
    reader = csv.reader(lines(), delimiter=form.sep, quotechar=form.quotechar, strict=True)
    # A text may be longer than what the module takes by default.
    limit = csv.field_size_limit(max(csv.field_size_limit(), path.stat().st_size))
    count, done = -1, 0
    try:
        for row in reader:
            count += bool("".join(row).strip() or len(row) > 1)  # pandas skips blank lines
            if len(of_row) > 1 and all(line.count(form.sep) == columns - 1 for line in of_row):
                log.warning(
                    "%s, lines %d to %d are one row, because a cell in quotation marks goes over"
                    " them: if each line is a row, a quotation mark is wrong",
                    *(path, done + 1, reader.line_num),
                )
            of_row.clear()
            done = reader.line_num
    except csv.Error as error:
        raise ValueError(
            f"lines {done + 1} to {reader.line_num}: {error}. A cell with a quotation mark stands"
            " in quotation marks and has that mark twice; dataset.read={quotechar: ...} names"
            " another mark"
        ) from error
    finally:
        csv.field_size_limit(limit)
    return count
