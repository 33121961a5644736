"""The declaration of the form that the data of all sites share (conf/dataset/local.yaml)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from fedhet.core import check
from fedhet.core.check import Checked, setting
from fedhet.core.errors import ConfigError
from fedhet.core.targets import WITH_CLASSES
from fedhet.core.task import Samples
from fedhet.data.arrays import Classes, class_names
from fedhet.data.dataset import AUTO, CHOICES, REFUSE, Dataset, Statistic
from fedhet.data.encoding import Cells
from fedhet.data.frames import CsvFormat
from fedhet.data.images import COLOURS
from fedhet.data.partition import Partition, Scheme

DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "int64": torch.int64}
STATISTICS = ("mean", "std", "target_mean", "target_std")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.-]{1,100}")


@dataclass(frozen=True, kw_only=True)
class Declaration(Checked):
    """The settings `dataset.<field>` of dataset=local.

    Args:
        name: the name in the record.
        data_dir: the folder of `files` and `test`; a site's own paths are absolute.
        sites: the names of the sites; client p is sites[p].
        target: the kind of target (fedhet.core.targets).
        classes: the labels in their order, or their number C for 0 .. C-1; None for numbers.
        features: the columns of a table, in their order; None for images, texts and plain arrays.
        categories: the levels of a table's columns of categories, see
            `fedhet.data.encoding.Cells`; None: all columns are numbers.
        missing: how missing values of a table are handled, see `fedhet.data.encoding.Cells`.
        text: the column of texts of a table, instead of the features; None: there is none.
        tokenizer: the SHA-256 of the texts' tokenizer.json; each site has this file.
        label: the column, or the columns, of labels; for arrays, the names of the numbers.
        shape: the shape of one sample; None: (F,), a number for each input.
        dtype: uint8 for pixels, float32, or int64 for token numbers.
        vocabulary, padding: only for texts, see `fedhet.data.dataset.Dataset`.
        size, colours: how images in files are converted, see `fedhet.data.images.image_folder`.
        mean, std, target_mean, target_std: numbers, or "auto": measured on the training parts of
            all sites together. For a table, mean and std may be "own": each site uses the
            statistics of its own training part.
        augment: see `fedhet.data.dataset.Dataset`.
        test: a file or folder with the server's global test set; None: there is none.
        files: site -> file, for a simulation on one machine; None in a deployment.
        read: the format of `files` and `test` if they are csv, see `fedhet.data.frames.CsvFormat`.
            A site sets the format of its own files itself.
        max_samples: the largest number of samples that a part of a site may have; None: no limit.
        nodes: site -> the id of the only Flower node that may be this site.

    Raises:
        ConfigError: a setting is not allowed, or two contradict each other.
    """

    GROUP: ClassVar[str] = "dataset"

    name: str
    data_dir: str
    sites: Sequence[str]  # None is refused
    target: str = setting(allowed=CHOICES)
    classes: Classes
    features: Sequence[str] | None
    categories: Mapping[str, Sequence[Any]] | None = None
    missing: str = REFUSE
    text: str | None
    tokenizer: str | None
    label: str | Sequence[str]
    shape: Sequence[int] | None
    dtype: str = setting(allowed=tuple(DTYPES))
    vocabulary: int | None = setting(low=1)
    padding: int | None = setting(low=0)
    size: int | None = setting(low=1)
    colours: str = setting(allowed=tuple(COLOURS))
    mean: Statistic
    std: Statistic
    target_mean: Statistic
    target_std: Statistic
    augment: str
    test: str | None
    files: Mapping[str, str] | None
    read: Mapping[str, Any] | None = None
    max_samples: int | None = setting(low=1)
    nodes: Mapping[str, int] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = check.each(check.text, "dataset.sites", self.sites)
        if wrong := [name for name in names if not _NAME.fullmatch(name)]:
            raise ConfigError(
                f"dataset.sites: {wrong[0]!r}: a name consists of letters, digits and _ . -"
            )
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"dataset.sites={list(names)}: must be distinct names, at least one")
        if (self.classes is None) != (self.target == "number"):
            raise ConfigError(
                f"dataset.classes={self.classes} with dataset.target={self.target}: the classes or"
                " labels must be declared, because no machine sees the labels of all sites;"
                " numbers have none"
            )
        _ = self.form  # checks `read`
        self._check_shape()
        self._check_text()
        for key, values in (("files", self.files), ("nodes", self.nodes)):
            if unknown := sorted(set(values or {}) - set(names)):
                raise ConfigError(f"dataset.{key}: {unknown} are not among dataset.sites={names}")
        for site, node in (self.nodes or {}).items():
            check.integer(f"dataset.nodes.{site}", node, low=0)
        _ = self.dataset()  # checks the other settings

    def _check_shape(self) -> None:
        if self.features is not None:
            check.each(check.text, "dataset.features", self.features)
        if (self.features is None) == (self.shape is None):
            raise ConfigError(
                f"dataset.features={self.features} with dataset.shape={self.shape}: declare either"
                " the columns of a table, or the shape of one sample: [C,H,W], [F] or [T]"
            )
        shape = check.each(check.integer, "dataset.shape", self.shape_of_sample, low=1)
        kinds = {1: ("float32", "int64"), 3: ("float32", "uint8")}
        if self.dtype not in kinds.get(len(shape), ()):
            raise ConfigError(
                f"dataset.shape={list(shape)} with dataset.dtype={self.dtype}: a sample is an image"
                " [C,H,W] (uint8, float32), a row [F] of numbers (float32), or [T] token numbers"
                " (int64)"
            )

    def _check_text(self) -> None:
        named = self.tokenizer is not None and _SHA256.fullmatch(self.tokenizer)
        complete = named and self.tokens and self.vocabulary and self.padding is not None
        if (self.text, self.tokenizer) != (None, None) and not (self.text and complete):
            raise ConfigError(
                f"dataset.text={self.text} with dataset.tokenizer={self.tokenizer}: a column of"
                " texts needs the SHA-256 of its tokenizer.json, 64 hexadecimal digits"
                " (`sha256sum tokenizer.json`; each site has this file); dataset.shape=[T],"
                " the number of tokens of each text; dataset.dtype=int64; and the tokenizer's"
                " dataset.vocabulary and dataset.padding. `python -m fedhet data declare --text`"
                " prints them"
            )

    @property
    def shape_of_sample(self) -> tuple[int, ...]:
        """The shape of one sample: (C, H, W), (F,) or (T,)."""
        return (len(self.inputs),) if self.features is not None else tuple(self.shape or ())

    @cached_property
    def cells(self) -> Cells:
        """How the input values of a table are converted."""
        return Cells(self.categories, self.missing)

    @cached_property
    def form(self) -> CsvFormat:
        """The format of `files` and `test` if they are csv."""
        return CsvFormat.of(self.read)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that the columns of a table become; () if there are none."""
        return tuple(self.cells.inputs(self.features or ([self.text] if self.text else [])))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The names of the classes, labels or numbers."""
        if self.classes is None:
            return (self.label,) if isinstance(self.label, str) else tuple(self.label)
        return tuple(class_names(self.classes).tolist())

    @property
    def tokens(self) -> bool:
        """Whether a sample consists of token numbers."""
        return self.dtype == "int64"

    @property
    def normalised(self) -> tuple[str, ...]:
        """The names of the statistics that apply to these data."""
        inputs = () if self.tokens else STATISTICS[:2]
        return (*inputs, *(STATISTICS[2:] if self.target == "number" else ()))

    @property
    def auto(self) -> tuple[str, ...]:
        """The names of the statistics that the sites measure on their training parts."""
        return tuple(key for key in self.normalised if getattr(self, key) == AUTO)

    @property
    def measured(self) -> list[str]:
        """The arrays that sites measure: "x" (the inputs), "y" (the numbers), both, or neither."""
        return sorted({"x" if key in STATISTICS[:2] else "y" for key in self.auto})

    @property
    def columns_of(self) -> dict[str, int]:
        """The number of columns or channels of the inputs "x", and of the numbers "y"."""
        return {"x": self.shape_of_sample[0], "y": len(self.outputs)}

    @property
    def content(self) -> dict[str, Any]:
        """The requirements on the samples of a site."""
        text = {"text": self.text, "tokenizer": self.tokenizer} if self.text else {}
        cells = {"cells": self.cells.key} if self.cells.key else {}
        return {
            **text,
            **cells,
            "target": self.target,
            "outputs": list(self.outputs),
            "shape": list(self.shape_of_sample),
            "dtype": self.dtype,
            "features": None if self.features is None else list(self.features),
            "vocabulary": self.vocabulary,
            "padding": self.padding,
            "normalisation": {
                key: value if isinstance(value, str) else [float(number) for number in value]
                for key, value in ((key, getattr(self, key)) for key in self.normalised)
            },
        }

    @property
    def digest(self) -> str:
        """16 hex digits of `content`, which server and sites compare."""
        return hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def example(self) -> torch.Tensor:
        """(1, ...), an example of an input; NaN for a table, because the server knows no values."""
        shape = (1, *self.shape_of_sample)
        if len(shape) == 2 and not self.tokens:
            return torch.full(shape, torch.nan)
        return torch.zeros(shape, dtype=DTYPES[self.dtype])

    def dataset(
        self,
        samples: Samples | None = None,
        test: Samples | None = None,
        agreed: Mapping[str, list[float]] | None = None,
    ) -> Dataset:
        """Return a dataset as declared, with the given samples or without any.

        Args:
            samples: the samples; None: no samples.
            test: the global test set; None: there is none.
            agreed: the numbers that replace statistics that are "auto".

        Raises:
            DataError: the samples do not match the declaration.
            ConfigError: the declaration contradicts itself.
        """
        numbers = self.target == "number"
        if samples is None:
            y = torch.empty((0, len(self.outputs)))
            if self.target in WITH_CLASSES:
                y = torch.empty(0, dtype=torch.int64)
            samples = Samples(torch.empty((0, *self.shape_of_sample), dtype=DTYPES[self.dtype]), y)
        statistics: dict[str, Any] = {key: getattr(self, key) for key in STATISTICS}
        statistics |= agreed or {}
        return Dataset(
            self.name,
            samples.x,
            samples.y,
            test,
            () if numbers else self.outputs,
            **statistics,
            augment=self.augment,
            target=self.target,
            numbers=self.outputs if numbers else (),
            vocabulary=self.vocabulary or 0,
            padding=self.padding,
            columns=self.inputs,
            missing=self.missing,
        )

    def number_of(self, site: str) -> int:
        """Return the number of the site's client.

        Raises:
            ConfigError: the site is not declared.
        """
        if site not in self.sites:
            raise ConfigError(
                f"this SuperNode is the site {site!r}, which the run does not declare"
                f"{check.did_you_mean(site, self.sites)}; dataset.sites={list(self.sites)}"
            )
        return list(self.sites).index(site)


@dataclass(frozen=True, kw_only=True)
class Sites(Scheme):
    """Each site is a client.

    Args:
        clients: None, or the number of declared sites.
    """

    noise: float = 0.0
    clients: int | None = setting(None, low=1)

    def drawn(self, labels: np.ndarray, seed: int) -> Partition:
        """Raise ConfigError; a run with dataset=local does not call this method."""
        raise ConfigError(
            "partition=sites: each site is a client with its own data, which needs dataset=local"
        )
