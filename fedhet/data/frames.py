"""Tables in csv and Parquet files, as data frames of pandas.

Parquet files state the types of their values, csv files do not. In a csv file, columns of names
(labels, owners, categories, texts) keep their text, and other columns are numbers.
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
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.arrays import spelled
from fedhet.data.files import check_memory, log

if TYPE_CHECKING:
    import pandas


SUFFIXES = (".csv", ".parquet")  # in lower or upper case
# Codes that look like numbers: 01 (the number 1 loses the 0), 1E5 (would become 100000).
_CODE = r"^\s*[+-]?(?:0\d|\d+[eE]\d)"


@dataclass(frozen=True, kw_only=True)
class CsvFormat(check.Checked):
    """The format of csv files (`dataset.read`), with the names of `pandas.read_csv`.

    Args:
        sep: the character between two columns; "\\\\t" stands for a tab.
        decimal, thousands: the marks in numbers; thousands=None: there is no such mark.
        encoding: the encoding of the text.
        na_values: words for a missing value, in addition to the words that pandas knows.
        quotechar: the mark around a value that contains `sep` or a line break.
        comment: the character that starts a comment; None: there are no comments.
        skiprows: the number of lines above the header.

    Raises:
        ConfigError: a setting is not allowed, or two of these characters are the same.
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
    skiprows: int = check.setting(0, low=0)

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
            raise ConfigError(f"{self.GROUP}={given}: these characters must all be different")
        try:
            "a".encode(self.encoding)
        except (LookupError, ValueError) as error:
            raise ConfigError(f"{self.GROUP}.encoding={self.encoding}: {error}") from error

    @classmethod
    def of(cls, given: object) -> CsvFormat:
        """Build the format from a mapping of settings; None: all defaults."""
        if not isinstance(given, Mapping | None):
            raise ConfigError(f'{cls.GROUP}={given}: must be a mapping, such as {{sep: ";"}}')
        for key in (given := given or {}):
            check.one_of(f"a key of {cls.GROUP}", key, [one.name for one in fields(cls)])
        return cls(**{str(key): value for key, value in given.items()})

    @property
    def given(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
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
        """Build the format from its `query`.

        Raises:
            ConfigError: the text is not a valid query.
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
    """Read a table from a file.

    Args:
        path: the file; its ending tells the format.
        names: columns of names or texts in a csv file -> their declared names (may be empty). The
            values keep the text of the file. A declared name is never a missing value.
        form: the format of a csv file.
        numbers: columns in `names` that become numbers if all their values are numbers, and none is
            a code such as 01.

    Raises:
        ConfigError: the file has another ending.
        DataError: the file is damaged, or pandas would lose rows.
    """
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise ConfigError(f"{path}: a table must be a file that ends in {' or '.join(SUFFIXES)}")
    import pandas

    try:
        if kind == ".parquet":
            from pyarrow.parquet import read_metadata

            metadata = read_metadata(path)  # a small file may hold many equal values
            check_memory(8 * metadata.num_rows * metadata.num_columns)  # as float64
            frame = pandas.read_parquet(path)
            frame.columns = frame.columns.map(str)
        else:
            frame = _read_csv(path, names or {}, form or CsvFormat(), numbers)
    # KeyError and TypeError come from damaged metadata
    except (OSError, ValueError, KeyError, TypeError, pandas.errors.ParserWarning) as error:
        raise DataError(
            f"{path} is damaged, or not a {kind[1:]} file with a header: {str(error).strip()}"
            " (for a csv file, dataset.read sets the encoding and more)"
        ) from error
    return frame


def _read_csv(
    path: Path,
    names: Mapping[str, Collection[str]],
    form: CsvFormat,
    numbers: Collection[str],
) -> pandas.DataFrame:
    import pandas

    utf_8 = codecs.lookup(form.encoding).name == "utf-8"  # skip a byte order mark
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
        # pandas would rename the second column to "<name>.1", so a second label would be a feature
        if (twice := header[header.duplicated() & (header != "")]).size:
            raise ValueError(f"it names the column {twice.iloc[0]!r} twice")
        rows = _strict_rows(path, text, form, len(header))
        # low_memory=False: pandas infers one type for a whole column, not one for each chunk
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
    """Return the values of a column of names or texts.

    Args:
        path, form: the file, and its format.
        typed: the values as pandas parses them.
        words: the values as text.
        declared: names that are never missing values.
        numeric: whether the column becomes numbers if all its values are numbers.
    """
    from pandas.api.types import is_numeric_dtype

    if numeric and is_numeric_dtype(typed) and typed.notna().any():
        present = words[typed.notna()].drop_duplicates()
        values = typed[present.index]
        same = all(spelled(word) == spelled(n) for word, n in zip(present, values, strict=True))
        fractions = typed.dtype.kind == "f" and bool((values % 1 != 0).any())
        if same or (fractions and not present.str.contains(_CODE).any()):
            return typed  # in a column of numbers, NA is a missing value and not a name
    missing = (words == "") | words.isin(form.na_values)
    if declared:
        missing = typed.isna() & ~words.map(spelled).isin(declared)
    taken = sorted({*words[typed.isna() & ~missing]}) if not declared else []
    if taken:
        log.warning(
            "%s, column %r: %s are read as names; dataset.read={na_values: [%s]} makes them missing"
            " values",
            *(path, words.name, ", ".join(map(repr, taken)), ", ".join(taken)),
        )
    return words.where(~missing)


def _strict_rows(path: Path, text: str, form: CsvFormat, columns: int) -> int | None:
    """Count the rows of a csv text by a strict parser; None if the text has no quotation mark.

    pandas appends text after a closing quotation mark to the value, and so loses rows.

    Raises:
        ValueError: a quotation mark is at a wrong place.
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
    # A value may be longer than the csv module allows by default.
    limit = csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    count, done, above = -1, 0, form.skiprows
    try:
        for _ in reader:
            count += bool("".join(of_row).strip())  # pandas skips blank lines
            if len(of_row) > 1 and all(line.count(form.sep) == columns - 1 for line in of_row):
                log.warning(
                    "%s, lines %d to %d are one row, because a value in quotation marks spans them;"
                    " if each line should be a row, a quotation mark is wrong",
                    *(path, above + done + 1, above + reader.line_num),
                )
            of_row.clear()
            done = reader.line_num
    except csv.Error as error:
        raise ValueError(
            f"lines {above + done + 1} to {above + reader.line_num}: {error}. Put a value that has"
            " a quotation mark into quotation marks, and double the inner mark;"
            " dataset.read={quotechar: ...} sets another mark"
        ) from error
    finally:
        csv.field_size_limit(limit)
    return count
