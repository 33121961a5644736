"""Converting the contents of a file into the arrays of a dataset.

Labels become classes, numbers, or sets of labels. Owners become numbers. If there is no test set,
one is held out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError
from fedhet.core.streams import generator
from fedhet.core.task import Samples
from fedhet.data.array_cache import Arrays, cached_arrays, identity
from fedhet.data.dataset import AUTO, CHOICES, Dataset
from fedhet.data.files import log

# `dataset.classes`: the number of classes, their labels, or None for the labels in the data.
Classes = int | Sequence[str] | None
# Whole numbers that are stored as floats are probably not classes if there are more than
# _MOST_CLASSES of them, with fewer than _FEWEST_SAMPLES samples each on average.
_MOST_CLASSES = 20
_FEWEST_SAMPLES = 5
_MOST_NAMES = 1_000_000  # the largest number of classes that dataset.classes may give
# A whole number; some files write it with a fraction of zeros.
_WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))(?:\.0*)?")
# Numbers and texts: numpy's kinds of dtypes, and the types of Python objects.
_PLAIN_KINDS = "biufU"
_PLAIN = (str, bool, int, float, Decimal, np.bool_, np.number)


def first_row(source: str) -> int:
    """Return the number of a source's first row: 2 in a csv file (the header is row 1), else 0."""
    return 2 if re.search(r"\.csv($|, column)", source) else 0


def listed(names: Sequence[object], most: int = 20) -> str:
    """Return the first `most` names, separated by commas, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def check_rows(
    source: str, good: ArrayLike, describe: Callable[[int], str], column: str = ""
) -> None:
    """Refuse samples if one of them is not good.

    The message counts the rows of a csv file as editors do.

    Args:
        source: the file of the samples, and optionally the array or column.
        good: (n,), whether each sample is good.
        describe: returns, for a row, its value and the expected value, for the message.
        column: the column, if the message shall name it after the row.

    Raises:
        DataError: a sample is not good; the message names the first one.
    """
    if len(wrong := np.flatnonzero(~np.asarray(good, bool))):
        row = int(wrong[0])
        first = first_row(source)
        where = f"row {row + first}{' (the header is row 1)' * (first > 0)}"
        where += f", column {column!r}" * bool(column)
        raise DataError(f"{source}, {where}: {describe(row)}")


def spelled(value: Any) -> str:
    """Return a label, owner or level in a spelling that does not depend on its file or setting.

    1, 1.0 and the text 1.0 become "1", and true becomes "True". Other texts, such as 01, are
    unchanged.
    """
    if isinstance(value, str):
        if whole := _WHOLE.fullmatch(value):
            return "0" if whole[1] == "-0" else whole[1]
        return value.title() if value.lower() in ("true", "false") else value
    if isinstance(value, float | Decimal) and math.isfinite(value):
        if value % 1 == 0:
            value = int(value)
        elif isinstance(value, Decimal):
            value = value.normalize()
    return str(value)


def identifiers(values: np.ndarray) -> np.ndarray:
    """Return labels or owners (n,): int64 if all are whole numbers, else text (see `spelled`)."""
    if values.dtype.kind == "i":
        return values.astype(np.int64)
    if values.dtype == np.float32:
        values = values.astype(np.str_)  # .1 instead of .10000000149
    found = np.array([spelled(value) for value in values.tolist()], np.str_)
    whole = all(
        len(name) < 19 and (match := _WHOLE.fullmatch(name)) and match[0] == match[1]
        for name in np.unique(found).tolist()
    )
    return found.astype(np.int64) if whole else found


def plain(values: np.ndarray) -> np.ndarray:
    """Return (n,): whether each value is a number or text (no date, duration, list or bytes)."""
    if values.dtype != object:
        return np.full(len(values), values.dtype.kind in _PLAIN_KINDS)
    return np.array(
        [isinstance(value, _PLAIN) and not isinstance(value, np.timedelta64) for value in values],
        bool,
    )


@dataclass(frozen=True)
class RawSamples:
    """Samples as a file contains them.

    Args:
        x: (n, ...), the inputs.
        y: (n,) or (n, K), the targets: labels, numbers, or lists of labels (dtype object).
        owners: (n,), the samples' owners, or None.
        x_source: the origin of `x`, for messages.
        y_source: the origin of `y`, for messages.
        y_names: the names of the columns of `y`; empty if they have none.

    Raises:
        DataError: there are no samples, or labels or owners are missing.
    """

    x: np.ndarray
    y: np.ndarray
    owners: np.ndarray | None
    x_source: str
    y_source: str
    y_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, values, most in (("labels", self.y, 2), ("owners", self.owners, 1)):
            if values is None:
                continue
            fits = values.shape[:1] == (len(self.x),) and values.ndim <= most
            if not fits or 0 in values.shape[1:] or values.dtype.kind not in f"{_PLAIN_KINDS}O":
                raise DataError(
                    f"{self.x_source}: the {what} have shape {values.shape} and type"
                    f" {values.dtype}; expected numbers or text, of shape ({len(self.x)},)"
                )
        if self.owners is not None and self.owners.dtype.kind == "f":
            known = ~np.isnan(self.owners)
            message = "its owner is nan; each sample needs an owner"
            check_rows(self.x_source, known, lambda row: message)
        if not len(self.x):
            raise DataError(f"{self.x_source} contains no samples")

    def rows(self, chosen: np.ndarray) -> RawSamples:
        """Return the samples that `chosen` selects, by indices or booleans."""
        owners = None if self.owners is None else self.owners[chosen]
        return replace(self, x=self.x[chosen], y=self.y[chosen], owners=owners)

    def without(self, missing: np.ndarray) -> RawSamples:
        """Return the samples that miss no value.

        Args:
            missing: (n,) booleans, whether a sample misses a value.

        Raises:
            DataError: every sample misses a value.
        """
        count = int(missing.sum())
        if count == len(missing):
            raise DataError(f"{self.x_source}: each of its {count} samples misses a value")
        where = f"{self.y_source}, without {check.counted(count, 'sample')} that miss a value"
        log.info("%s: these are left out (dataset.missing=drop)", where)
        return replace(self.rows(~missing), y_source=where)

    @property
    def lists(self) -> bool:
        """Whether `y` consists of lists of labels."""
        objects = self.y.dtype == object and self.y.ndim == 1
        return objects and isinstance(self.y[0], list | np.ndarray)


def dataset_arrays(
    train: RawSamples,
    test: RawSamples | None,
    classes: Classes,
    test_fraction: float = 0.0,
    target: str | None = None,
) -> Arrays:
    """Return the arrays from which `assemble` builds a dataset.

    Args:
        train: the training samples.
        test: the test samples; None: `test_fraction` of the training samples, independent of the
            run's seed; no test samples if `test_fraction` is 0.
        classes: None: the labels in the training samples, sorted; a number C: the labels are
            0 .. C-1; a list: the labels in this order.
        test_fraction: the fraction, < 1, that is held out if `test` is None.
        target: the kind of target, see `encoded`.

    Raises:
        DataError: a label is missing or not among the classes (the message names the file and the
            row), or the training or test set would be empty.
    """
    ys, arrays = encoded(train, test, target, classes)
    if test is None and test_fraction:
        n, n_test = len(train.x), math.floor(len(train.x) * test_fraction + 0.5)
        if not 0 < n_test < n:
            raise DataError(
                f"{train.x_source}: dataset.test_fraction={test_fraction} holds out {n_test} of {n}"
                f" samples; the training set and the test set need at least one sample each"
            )
        order = generator(0, "test_fraction").permutation(n)
        kept, held_out = np.sort(order[n_test:]), np.sort(order[:n_test])
        ys = [ys[0][kept], ys[0][held_out]]
        train, test = train.rows(kept), train.rows(held_out)
    arrays |= {"x": train.x, "y": ys[0]}
    if test is not None:
        arrays |= {"test_x": test.x, "test_y": ys[1]}
    if train.owners is not None:
        # Owners are numbered in the order of their names.
        names, numbers = np.unique(identifiers(train.owners), return_inverse=True)
        arrays |= {"owners": numbers.astype(np.int64), "owner_names": names.astype(np.str_)}
        if test is not None and test.owners is not None:
            arrays["test_owners"] = identifiers(test.owners).astype(np.str_)
    return arrays


def assemble(
    name: str, key: Mapping[str, Any], make: Callable[[], Arrays], **fields: Any
) -> Dataset:
    """Build a dataset from the arrays x, y, test_x, test_y and classes.

    These arrays are optional: target, numbers, vocabulary, padding, columns and unrepeated (see
    `fedhet.data.tables.Columns.read`), owners with owner_names, and test_owners. If mean, std,
    target_mean or target_std is "auto", and there is an array of this name, the array is used.

    Args:
        name: the dataset's name.
        key: everything that determines the arrays, see `cached_arrays`.
        make: decodes the data into these arrays; called only if they are not in the cache.
        fields: mean, std, target_mean, target_std, missing and augment, see `Dataset`.
    """
    arrays = cached_arrays(name, key, make)
    x, y, test_x, test_y = (
        torch.from_numpy(arrays[part]) for part in ("x", "y", "test_x", "test_y")
    )
    for statistic in ("mean", "std", "target_mean", "target_std"):
        if fields.get(statistic) == AUTO and statistic in arrays:
            fields[statistic] = arrays[statistic].tolist()
            log.info("%s: %s %s, from the data file", name, statistic, fields[statistic])
    if "unrepeated" in arrays:
        log.warning(
            "%s: no two rows have the same whole number in %s; if it only numbers the rows, name"
            " the inputs in dataset.features",
            *(name, listed(arrays["unrepeated"].tolist())),
        )
    target, reason = arrays["target"].tolist() if "target" in arrays else ("class", "")
    if reason:
        log.info("%s: dataset.target=%s: %s", name, target, reason)
    if target == "class" and len(arrays["classes"]) == 1:
        log.warning(
            "%s: all samples have the class %r, so every model is right; the label is probably"
            " wrong",
            name,
            arrays["classes"].tolist()[0],
        )
    names = ("classes", "owner_names", "numbers", "columns")
    fields |= {key: tuple(arrays[key].tolist()) for key in names if key in arrays}
    fields |= {key: int(arrays[key]) for key in ("vocabulary", "padding") if key in arrays}
    fields |= {key: arrays[key] for key in ("owners", "test_owners") if key in arrays}
    test = Samples(test_x, test_y)
    return Dataset(name, x, y, test, **fields, source=identity(name, key), target=target)


def labels_from_zero(path: Path, labels: np.ndarray, classes: int, first: int = 0) -> np.ndarray:
    """Convert labels in `first` .. `first` + classes - 1 into int64 in 0 .. classes - 1.

    Raises:
        DataError: a label is out of range; the message names the file and the first such row.
    """
    if labels.dtype.kind not in "iu":
        raise DataError(f"{path}: its labels are {labels.dtype}; expected whole numbers")
    last = first + classes - 1
    good = (labels >= first) & (labels <= last)
    expected = f"expected a whole number from {first} to {last}"
    check_rows(str(path), good, lambda row: f"label {labels[row]}; {expected}")
    return labels.astype(np.int64) - first


# ---- targets


def encoded(
    train: RawSamples, test: RawSamples | None, target: str | None, classes: Classes
) -> tuple[list[np.ndarray], Arrays]:
    """Return the targets of the training and test samples, and the arrays that describe them.

    Args:
        train: the training samples.
        test: the test samples, or None.
        target: "class", "number", "labels" or "next_char". None: inferred from the training labels.
            Text and few whole numbers become classes, fractions become numbers, and lists or
            several columns of zeros and ones become sets of labels.
        classes: see `dataset_arrays`; with target="labels", the names of the labels.

    Returns:
        The targets of the training samples and, if given, of the test samples: (n,) int64 classes
        or (n, K) float32. And the arrays `target` (the kind, and the reason if it was inferred),
        `classes` and, for target="number", `numbers` (their names).

    Raises:
        ConfigError: `target` is unknown, cannot be inferred, or does not fit `classes`.
        DataError: a label does not fit `target`; the message names the file and the row.
    """
    reason = ""
    if target is None:
        target, reason = _inferred(train, classes)
    check.one_of("dataset.target", target, CHOICES)
    parts = [train] if test is None else [train, test]
    described = {"target": np.array([target, reason])}
    if target == "number":
        if classes is not None:
            raise ConfigError(f"dataset.classes={classes}: dataset.target=number has no classes")
        ys = [_numbers(part) for part in parts]
        names = _column_names(train, ys[0].shape[1])
        described |= {"classes": np.empty(0, np.str_), "numbers": names}
    elif target == "labels":
        sets = [_label_sets(part) for part in parts]
        names = _label_names(train, sets[0], classes)
        ys = [_zeros_and_ones(each, names, part) for each, part in zip(sets, parts, strict=True)]
        described["classes"] = names
    else:
        labels = [_plain_labels(part, declared=classes is not None) for part in parts]
        names = np.unique(labels[0]).astype(np.str_) if classes is None else class_names(classes)
        ys = [
            _class_numbers(each, names, part.y_source)
            for each, part in zip(labels, parts, strict=True)
        ]
        described["classes"] = names
    return ys, described


def _inferred(train: RawSamples, classes: Classes) -> tuple[str, str]:
    """Return the kind of target that the labels suggest, and the reason."""
    y = _column(train.y)
    values = np.concatenate([*map(np.ravel, y)]) if train.lists else y.ravel()
    different = len(np.unique(values.astype(np.str_)))
    reason = f"there are {different} different labels in {check.counted(len(y), 'sample')}"
    fractions = values.dtype.kind == "f" and bool((values[np.isfinite(values)] % 1 != 0).any())
    if fractions and (train.lists or classes is None):
        return "number", reason
    if train.lists or (y.ndim == 2 and values.dtype.kind in "biuf" and _binary(y)):
        return "labels", reason
    # Many whole numbers that are stored as floats are ambiguous.
    many = different > _MOST_CLASSES and different * _FEWEST_SAMPLES > len(y)
    if y.ndim == 2 or (classes is None and many and values.dtype.kind == "f"):
        raise ConfigError(
            f"{train.y_source}: {reason}, in an array of {y.dtype} {y.shape}; set"
            " dataset.target=number to predict their values, or dataset.target=class if each label"
            " is a class"
        )
    return "class", reason


def _column(y: np.ndarray) -> np.ndarray:
    """Return an array (n, 1) as (n,); other arrays are unchanged."""
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def _column_names(samples: RawSamples, count: int) -> np.ndarray:
    """Return the names of the columns of y, or their positions if they have no names."""
    named = len(samples.y_names) == count
    return np.array(samples.y_names if named else [*map(str, range(count))])


# ---- numbers
def _numbers(samples: RawSamples) -> np.ndarray:
    """Return the numbers to predict, (n, K) float32."""
    y = samples.y
    try:
        if samples.lists:
            y = np.stack([np.asarray(each, np.float64).ravel() for each in y])
        y = np.asarray(y, np.float64).reshape(len(y), -1)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{samples.y_source}: dataset.target=number expects the same number of numbers for"
            f" each sample ({error})"
        ) from error
    with np.errstate(over="ignore"):  # overflow gives inf, which is refused below
        numbers = y.astype(np.float32)
    expected = "dataset.target=number expects finite numbers"
    finite = np.isfinite(numbers).all(1)
    check_rows(samples.y_source, finite, lambda row: f"{y[row].tolist()}; {expected}")
    return numbers


# ---- sets of labels
def _label_sets(samples: RawSamples) -> np.ndarray | list[list[str]]:
    """Return columns of zeros and ones (n, L), or the list of each sample's labels."""
    y = samples.y
    if samples.lists:
        lists = [np.asarray(each).ravel() for each in y]
        lengths = {len(each) for each in lists}
        numeric = all(each.dtype.kind in "biuf" for each in lists)
        if not (len(lengths) == 1 and 0 not in lengths and numeric and _binary(np.stack(lists))):
            sets = [each.tolist() for each in lists]
            known = [None not in each and all(label == label for label in each) for each in sets]
            expected = "a label in the list is missing; expected numbers or text"
            check_rows(samples.y_source, known, lambda row: f"{sets[row]}; {expected}")
            return [[spelled(label) for label in each] for each in sets]
        y = np.stack(lists)
    if y.dtype.kind not in "biuf":
        raise DataError(
            f"{samples.y_source}: dataset.target=labels expects lists of labels, or columns of"
            " zeros and ones (dataset.label=[a,b])"
        )
    y = y.reshape(len(y), -1)
    expected = "dataset.target=labels expects zeros and ones, or lists of labels"
    good = np.isin(y, (0, 1)).all(1)
    check_rows(samples.y_source, good, lambda row: f"{y[row].tolist()}; {expected}")
    return y.astype(np.float32)


def _binary(y: np.ndarray) -> bool:
    return bool(np.isin(y, (0, 1)).all())


def _label_names(
    train: RawSamples, sets: np.ndarray | list[list[str]], classes: Classes
) -> np.ndarray:
    """Return the names of the labels, in the order of the columns of y."""
    if classes is not None:
        return class_names(classes)
    if isinstance(sets, np.ndarray):
        return _column_names(train, sets.shape[1])
    found = {label for each in sets for label in each}
    if not found:
        raise DataError(f"{train.y_source}: no sample has a label")
    numbers = all(label.removeprefix("-").isdigit() for label in found)
    return np.array(sorted(found, key=int if numbers else str))


def _zeros_and_ones(
    sets: np.ndarray | list[list[str]], names: np.ndarray, samples: RawSamples
) -> np.ndarray:
    """Return (n, L) float32: 1 for each label of a sample, else 0."""
    if isinstance(sets, np.ndarray):
        if sets.shape[1] != len(names):
            raise DataError(
                f"{samples.y_source}: {sets.shape[1]} columns of labels; expected {len(names)}:"
                f" {listed(names.tolist())}"
            )
        return sets
    import pandas

    rows = np.repeat(np.arange(len(sets)), [len(each) for each in sets])
    columns = pandas.Index(names).get_indexer([label for each in sets for label in each])
    good = ~np.isin(np.arange(len(sets)), rows[columns < 0])
    expected = f"expected classes among {names[:10].tolist()}"
    check_rows(samples.y_source, good, lambda row: f"labels {sets[row]}; {expected}")
    y = np.zeros((len(sets), len(names)), np.float32)
    y[rows, columns] = 1
    return y


# ---- classes
def class_names(classes: int | Sequence[str]) -> np.ndarray:
    """Return the names of the classes that the setting `dataset.classes` gives."""
    if isinstance(classes, int):
        count = check.integer("dataset.classes", classes, low=1, high=_MOST_NAMES)
        return np.arange(count).astype(np.str_)
    names = [] if isinstance(classes, str) else list(map(spelled, classes))
    if not names or len(set(names)) < len(names) or None in classes:
        raise ConfigError(
            f"dataset.classes={classes}: must be null, a number of classes, or a list of distinct"
            " labels"
        )
    return np.array(names)


def _plain_labels(samples: RawSamples, *, declared: bool) -> np.ndarray:
    """Return the labels (n,) as whole numbers or text; fractions are allowed if `declared`."""
    labels = _column(samples.y)
    if labels.ndim > 1 or samples.lists:
        raise DataError(
            f"{samples.y_source}: several labels for each sample; dataset.target=class expects one"
        )
    if labels.dtype.kind == "f" and not declared:
        with np.errstate(invalid="ignore"):  # nan and inf become another number
            whole = labels.astype(np.int64) == labels
        expected = "expected a class: a whole number or text"
        check_rows(samples.y_source, whole, lambda row: f"label {labels[row]}; {expected}")
    return identifiers(labels)


def _class_numbers(labels: np.ndarray, names: np.ndarray, source: str) -> np.ndarray:
    """Return (n,) int64: the position of each label among the names of the classes.

    Args:
        labels: (n,), whole numbers or text.
        names: the names of the classes.
        source: the origin of the labels, for messages.
    """
    import pandas

    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    hint = "; dataset.target=number predicts their values" if labels.dtype.kind in "iu" else ""
    expected = f"expected one of the classes {names[:10].tolist()}{more}{hint}"
    numbers = pandas.Index(names).get_indexer(labels.astype(np.str_))
    check_rows(source, numbers >= 0, lambda row: f"label {labels[row].item()!r}; {expected}")
    return numbers.astype(np.int64)
