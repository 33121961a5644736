"""A dataset: one array that all clients share, and a global test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError
from fedhet.core.targets import WITH_CLASSES
from fedhet.core.task import Samples
from fedhet.data.array_cache import Arrays, cached_arrays

AUTO: Final = "auto"
OWN: Final = "own"
REFUSE, DROP, MEDIAN = MISSING = ("refuse", "drop", "median")  # of `dataset.missing`
CHOICES = ("class", "number", "labels", "next_char")  # of `dataset.target`
# `dataset.mean` or `dataset.std`: a number for each column or channel, one number for all of them,
# "auto", or "own".
Statistic = Sequence[float] | Literal["auto", "own"]


@dataclass(frozen=True)
class Dataset:
    """The samples that the clients share, and the global test set.

    Args:
        name: the dataset's name, for the record and for messages.
        x: (n, ...), all clients' samples: images (n, C, H, W) as uint8 (0..255) or float32 in
            [0, 1]; rows of a table (n, F) as float32; or text (n, T) as int16 or int64 token
            numbers in 0 .. vocabulary - 1.
        y: the targets, in the form that `target` requires: (n,) int64 labels in 0 ..
            len(classes)-1; (n, K) float32 numbers; or (n, len(classes)) float32 of zeros and ones.
        test: the global test set, in the same form. No client sees it. None: there is none.
        classes: the names of the classes or labels; empty for numbers.
        mean, std: per channel (of pixels in [0, 1]) or per column; a single number applies to all
            of them. "auto": the run still has to measure them on the clients' training samples, for
            which it needs a partition (`fedhet.runs.run_data.RunData`). "own": each client
            normalises its table by the statistics of its own training part. Not used for text.
        owners: (n,) int64, each sample's natural owner (writer, speaker, source) in 0 ..
            len(owner_names)-1; None if the data do not name owners. The partition `natural` reads
            them.
        owner_names: the names of the owners. Each owner has at least one sample.
        test_owners: (m,), the names of the test samples' owners, which need not be in
            `owner_names`. None if the data do not name all of them. Only `pooled` uses them.
        augment: the augmentation of training batches, for images: none or crop_flip
            (fedhet.data.federation).
        source: identifies the samples on disk, so that results computed from them can be cached;
            empty: results are not cached.
        target: the kind of target: "class", "number", "labels" or "next_char"
            (fedhet.core.targets).
        numbers: the names of the numbers that are predicted.
        target_mean, target_std: per predicted number, or one for all; "auto" as for `mean`. The
            model predicts (y - mean) / std.
        vocabulary: the number of different tokens of a text; 0: the classes are the tokens.
        padding: the token that fills up short texts; None: there is none.
        columns: the names of a table's columns, or the name of the column of texts; empty if they
            have no names.
        missing: how a table's missing values were handled. With "median" they are NaN in `x`, and
            each client fills them (`fedhet.data.moments.Own`).
        detailed: whether `eval.scores=auto` is `all`.

    Raises:
        DataError: labels, tokens or owners are out of range, an owner has no samples, or training
            and test samples differ in shape.
        ConfigError: `mean` or `std` does not match the channels, a std is not positive, or
            `augment` or `target` is unknown.
    """

    name: str
    x: Tensor
    y: Tensor
    test: Samples | None
    classes: tuple[str, ...]
    mean: Statistic = (0.0,)
    std: Statistic = (1.0,)
    owners: np.ndarray | None = field(default=None, compare=False, repr=False)
    owner_names: tuple[str, ...] = ()
    test_owners: np.ndarray | None = field(default=None, compare=False, repr=False)
    augment: str = "none"
    source: str = field(default="", compare=False, repr=False)
    target: str = "class"
    numbers: tuple[str, ...] = ()
    target_mean: Statistic = AUTO
    target_std: Statistic = AUTO
    vocabulary: int = 0
    padding: int | None = None
    columns: tuple[str, ...] = ()
    missing: str = REFUSE
    detailed: bool = False

    def __post_init__(self) -> None:
        check.one_of("dataset.target", self.target, CHOICES)
        check.one_of("dataset.missing", self.missing, MISSING)
        if self.text:  # tokens are not normalised
            object.__setattr__(self, "mean", (0.0,))
            object.__setattr__(self, "std", (1.0,))
            object.__setattr__(self, "vocabulary", self.vocabulary or len(self.classes))
        self._check_samples("training", Samples(self.x, self.y))
        if self.test is not None:
            if self.test.x.shape[1:] != self.x.shape[1:]:
                raise DataError(
                    f"{self.name}: training samples have shape {self.shape}, but test samples"
                    f" {tuple(self.test.x.shape[1:])}"
                )
            self._check_samples("test", self.test)
        if OWN in (self.mean, self.std) and self.mean != self.std:
            raise ConfigError(
                f"dataset.mean={self.mean} with dataset.std={self.std}: either both are own, or"
                " neither"
            )
        if (self.missing != REFUSE or self.by_client) and (self.text or self.x.ndim != 2):
            raise ConfigError(
                f"dataset.missing={self.missing} with dataset.mean={self.mean}: drop, median and"
                f" own need a table of numbers; samples of {self.name} have shape {self.shape}"
            )
        for key in ("mean", "std"):
            self._expand(key, self.shape[0], "channels or columns")
        if self.target == "number":
            for key in ("target_mean", "target_std"):
                self._expand(key, len(self.numbers), "numbers to predict")
        self._check_owners()
        check.one_of("dataset.augment", self.augment, ("none", "crop_flip"))

    def _check_samples(self, part: str, samples: Samples) -> None:
        where = f"{self.name}, {part}"
        check_targets(where, samples.y, self.target, len(self.classes))
        if self.target == "number" and samples.y.shape[1:] != (len(self.numbers),):
            raise DataError(
                f"{where}: the targets have shape {tuple(samples.y.shape)}; expected"
                f" (n, {len(self.numbers)})"
            )
        last = self.vocabulary - 1
        if self.text and len(samples) and not 0 <= samples.x.min() <= samples.x.max() <= last:
            row, column = ((samples.x < 0) | (samples.x > last)).nonzero()[0].tolist()
            what = "class numbers" if self.target == "next_char" else "numbers"
            raise DataError(
                f"{self.name}: {part} sample {row} has the token {int(samples.x[row, column])};"
                f" tokens are {what}, 0 to {last}"
            )

    def _expand(self, key: str, count: int, what: str) -> None:
        """Check a mean or std, and repeat a single number for each of the `count` columns."""
        if getattr(self, key) in (AUTO, OWN):
            return
        values = check.each(check.number, f"dataset.{key}", getattr(self, key))
        if len(values) not in (1, count):
            raise ConfigError(
                f"dataset.{key}={list(values)}: give one number, or one for each of the {count}"
                f" {what}"
            )
        if key.endswith("std") and min(values) <= 0:
            raise ConfigError(f"dataset.{key}={list(values)}: each must be > 0")
        object.__setattr__(self, key, values * (count // len(values)))

    def _check_owners(self) -> None:
        if self.owners is None:
            return
        tested = None if self.test_owners is None else self.test_owners.shape
        fits = self.owners.shape == (len(self.y),) and tested in (None, (len(self.test or ()),))
        if not fits or {*self.owners.tolist()} != {*range(len(self.owner_names))}:
            raise DataError(
                f"{self.name}: {len(self.y)} samples have owners of shape {self.owners.shape}, and"
                f" {len(self.test or ())} test samples have owners of shape {tested}; each"
                f" training sample needs an owner from 0 to {len(self.owner_names) - 1}, and each"
                " of these owners a training sample"
            )

    def pooled(self) -> Dataset:
        """Return this dataset with the test samples appended to `x` and `y`, and no test set.

        Owners remain known if `test_owners` names the owners of the test samples. Owners without a
        training sample come last.

        Raises:
            DataError: training and test samples have different dtypes.
        """
        if self.test is None:
            return self
        train, test = self.x, self.test.x
        if train.dtype != test.dtype:
            raise DataError(
                f"{self.name}: training samples are {train.dtype} and test samples {test.dtype};"
                " partition.pool_test=true needs one type"
            )

        def join() -> Arrays:
            return {"x": np.concatenate([train.numpy(), test.numpy()])}

        # The cached array is memory-mapped, so processes share it, as they share the separate
        # arrays.
        source = f"pooled {self.source}" if self.source else ""
        arrays = cached_arrays(self.name, {"source": source}, join) if source else join()
        owners = None
        names: tuple[str, ...] = ()
        if self.owners is not None and self.test_owners is not None:
            names = tuple(dict.fromkeys([*self.owner_names, *self.test_owners.tolist()]))
            numbers = {name: number for number, name in enumerate(names)}
            theirs = np.array([numbers[name] for name in self.test_owners.tolist()], dtype=np.int64)
            owners = np.concatenate([self.owners, theirs])
        return replace(
            self,
            x=torch.from_numpy(arrays["x"]),
            y=torch.cat([self.y, self.test.y]),
            test=None,
            owners=owners,
            owner_names=names,
            test_owners=None,
            source=source,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample: (C, H, W), (F,) or (T,)."""
        return tuple(self.x.shape[1:])

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of a model's outputs: classes, labels or numbers."""
        return self.numbers if self.target == "number" else self.classes

    @property
    def by_client(self) -> bool:
        """Whether each client prepares its samples with statistics of its own training part."""
        return self.missing == MEDIAN or self.mean == OWN

    @property
    def text(self) -> bool:
        """Whether the samples are token numbers."""
        return not self.x.is_floating_point() and self.x.ndim == 2


def label_counts(y: np.ndarray, target: str, classes: int) -> np.ndarray:
    """Return (classes,) int64, the number of samples of each class, or with each label.

    Args:
        y: the targets.
        target: the kind of target (fedhet.core.targets).
        classes: the number of classes or labels; 0 for numbers.
    """
    if target in WITH_CLASSES:
        return np.bincount(y, minlength=classes)
    return y[:, :classes].sum(0).astype(np.int64)


def check_targets(where: str, y: Tensor, target: str, classes: int) -> None:
    """Refuse targets that are not valid classes or labels; numbers are not checked.

    Args:
        where: a name for the samples, for messages.
        y: the targets.
        target: the kind of target (fedhet.core.targets).
        classes: the number of classes or labels.

    Raises:
        DataError: a target has another shape or dtype, or is out of range; the message names the
            first such sample.
    """
    expected = f"with classes={classes}, targets are (n,) whole numbers from 0 to {classes - 1}"
    if target in WITH_CLASSES:
        if y.ndim != 1:
            raise DataError(f"{where}: the targets have shape {tuple(y.shape)}; {expected}")
        if y.dtype != torch.int64:
            raise DataError(
                f"{where}: the targets are {y.dtype}, the first is {y[0].item()}; {expected}; if"
                ' they are not classes, set target="number"'
            )
        wrong = (y < 0) | (y >= classes)
    elif target == "labels":
        expected = (
            f"with target=labels and classes={classes}, they are (n, {classes}) zeros and ones"
        )
        if y.shape[1:] != (classes,):
            raise DataError(f"{where}: the targets have shape {tuple(y.shape)}; {expected}")
        wrong = (y != 0) & (y != 1)
    else:
        return
    if len(found := wrong.nonzero()):
        row = int(found[0, 0])
        raise DataError(f"{where}, sample {row}: the target is {y[row].tolist()}; {expected}")
