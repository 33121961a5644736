"""How the values of a table become numbers: missing values, and columns of categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhet.core import check
from fedhet.core.errors import ConfigError
from fedhet.data.arrays import RawSamples, check_rows, plain, spelled
from fedhet.data.dataset import DROP, MISSING, REFUSE

if TYPE_CHECKING:
    import pandas


_ADVICE = (
    "give a date or a duration as a number, such as the days since a fixed date, and a list as"
    " several columns; dataset.read sets the decimal mark of a csv file. dataset.features chooses"
    " the columns, dataset.categories names columns of categories, dataset.text a column of texts"
    " (--features, --category and --text of `data declare`)"
)


@dataclass(frozen=True)
class Cells:
    """How the input values of a table are converted.

    Args:
        categories: column -> its levels, all numbers or all texts. Each level except the first
            becomes an input of zeros and ones, after all columns of numbers, as in
            `pandas.get_dummies(drop_first=True)`. A column with None has numbers; None: all columns
            have numbers.
        missing: how missing values are handled. "refuse": they are an error; "drop": their rows are
            left out; "median": they become NaN, which `fedhet.data.moments.Own` fills.

    Raises:
        ConfigError: `missing` is unknown, or a column has fewer than two distinct levels.
    """

    categories: Mapping[str, Sequence[Any]] | None = None
    missing: str = REFUSE

    def __post_init__(self) -> None:
        check.one_of("dataset.missing", self.missing, MISSING)
        _ = self._levels  # checks them

    @cached_property
    def _levels(self) -> dict[str, list[Any]]:
        levels: dict[str, list[Any]] = {}
        for column, given in (self.categories or {}).items():
            if given is None:
                continue
            named = [] if isinstance(given, str) or not isinstance(given, Sequence) else list(given)
            nothing = None in named
            if not all(type(level) in (int, float) for level in named):
                named = list(map(spelled, named))
            if len(named) < 2 or len(set(named)) < len(named) or nothing:
                raise ConfigError(
                    f"dataset.categories.{column}={given}: must be a list of distinct levels, at"
                    " least two, all numbers or all texts"
                )
            levels[str(column)] = named
        return levels

    @property
    def key(self) -> list[Any]:
        """Everything that determines the inputs, for the cache and for digests; [] by default."""
        known = (list(self._levels.items()), self.missing)
        return [] if known == ([], REFUSE) else list(known)

    @property
    def names(self) -> dict[str, list[str]]:
        """The columns with texts as levels -> these levels."""
        return {key: own for key, own in self._levels.items() if isinstance(own[0], str)}

    def inputs(self, columns: Sequence[str]) -> list[str]:
        """Return the names of the inputs that the columns of a table become.

        Raises:
            ConfigError: a column of categories is not among the columns.
        """
        if unknown := [column for column in self._levels if column not in columns]:
            raise ConfigError(
                f"dataset.categories: {unknown[0]!r} is not among the inputs {list(columns)}"
            )
        made = [f"{column}_{level}" for column, own in self._levels.items() for level in own[1:]]
        names = [column for column in columns if column not in self._levels] + made
        if len(set(names)) < len(names):
            raise ConfigError(
                f"dataset.categories: two inputs have the same name; all names: {names}"
            )
        return names

    def columns(self, inputs: Sequence[str]) -> list[str]:
        """Return the columns of a table that become these inputs."""
        made = {f"{column}_{level}" for column, own in self._levels.items() for level in own[1:]}
        return [name for name in inputs if name not in made] + list(self._levels)

    def read(self, frame: pandas.DataFrame, columns: Sequence[str], source: str) -> np.ndarray:
        """Return the inputs (n, F) float64 of a table, with NaN for missing values.

        Raises:
            DataError: a value is not a finite number, not one of the levels, or missing although
                `missing` is "refuse"; the message names the file, the row and the column.
        """
        names = self.inputs(columns)
        x = np.empty((len(frame), len(names)))
        for column in columns:
            cells = frame[column]
            known = plain(cells.to_numpy())
            missing = cells.isna().to_numpy() & (cells.dtype.kind not in "mM")
            if levels := self._levels.get(column):
                matches = _matches(cells, levels)
                first = names.index(f"{column}_{levels[1]}")
                x[:, first : first + len(levels) - 1] = np.where(
                    missing[:, None], np.nan, matches[:, 1:]
                )
                good = known & matches.any(1)
                expected = f"one of the levels {levels} (dataset.categories.{column})"
            else:
                numbers = _numbers(cells)
                x[:, names.index(column)] = numbers
                good = known & (np.abs(numbers) <= np.finfo(np.float32).max)
                expected = f"finite numbers; {_ADVICE}"
            if self.missing != REFUSE:
                good |= missing
            check_rows(source, good, partial(_cell_error, cells, missing, expected), column)
        return x

    def kept(self, samples: RawSamples) -> RawSamples:
        """Return the samples of a table; with `missing=drop` only those without missing values."""
        if self.missing != DROP or samples.x.ndim != 2:
            return samples
        missing = np.isnan(samples.x).any(1)
        return samples.without(missing) if missing.any() else samples


def _matches(cells: pandas.Series, levels: list[Any]) -> np.ndarray:
    """Return (n, levels): whether a value equals a level; all False for a missing value."""
    found = _numbers(cells)
    if isinstance(levels[0], str):
        found = np.array([spelled(cell) for cell in cells.tolist()], object)
    return (found[:, None] == np.array(levels, found.dtype)) & cells.notna().to_numpy()[:, None]


def _numbers(cells: pandas.Series) -> np.ndarray:
    """Return (n,) float64, with NaN for missing values and for values that are no numbers."""
    from pandas import Series, to_numeric

    found = to_numeric(Series(cells.to_numpy()).where(plain(cells.to_numpy())), errors="coerce")
    return np.where(cells.isna(), np.nan, found.to_numpy(np.float64, na_value=np.nan))


def _cell_error(cells: pandas.Series, missing: np.ndarray, expected: str, row: int) -> str:
    if missing[row]:
        return (
            "the value is missing (empty, or a word such as NA); fill it in, leave out the row or"
            " the column, or set dataset.missing=drop or median"
        )
    return f"{cells.iloc[[row]].tolist()[0]!r:.60}; expected {expected}"
