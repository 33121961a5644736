"""What a dataset is: one array that all clients share, and a global test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedhet import check
from fedhet.errors import ConfigError, DataError
from fedhet.task import Samples


@dataclass(frozen=True)
class Dataset:
    """What the clients share, and the global test set.

    Args: x: (n, ...), all clients' samples: images (n, C, H, W), uint8 (0..255) or float32 in [0,
        1]; rows of a table (n, F), float32; or text (n, T), int16 or int64 token numbers, each one
        of the classes, since the next token is predicted. y: (n,) int64, their labels in 0 ..
        len(classes) - 1. test: the global test set, of the same kind; no client sees it. classes:
        the classes' names. mean, std: per channel (images, of pixels in [0, 1]) or per column; a
        single number stands for every one. Not for text. owners: (n,) int64, the natural owner
        (writer, speaker, source) of each sample, in 0 .. len(owner_names) - 1; None where the data
        name none. The partition `natural` reads it. owner_names: the owners' names, each of one
        sample at least. augment: what changes training batches: none, or crop_flip
        (fedhet.data.augment), for images.

    Raises: DataError: labels, tokens or owners out of range, an owner without samples, training and
        test samples of different shapes. ConfigError: `mean` or `std` does not fit the channels, a
        std is not positive, or `augment` is unknown.
    """

    name: str
    x: Tensor
    y: Tensor
    test: Samples
    classes: tuple[str, ...]
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)
    owners: np.ndarray | None = field(default=None, compare=False, repr=False)
    owner_names: tuple[str, ...] = ()
    augment: str = "none"

    def __post_init__(self) -> None:
        if self.test.x.shape[1:] != self.x.shape[1:]:
            raise DataError(
                f"{self.name}: training samples are {self.shape}, but test samples"
                f" {tuple(self.test.x.shape[1:])}"
            )
        for part, samples in (("training", Samples(self.x, self.y)), ("test", self.test)):
            wrong = ((samples.y < 0) | (samples.y >= len(self.classes))).nonzero()
            if len(wrong):
                row, last = int(wrong[0]), len(self.classes) - 1
                raise DataError(
                    f"{self.name}: {part} sample {row} has label {int(samples.y[row])}; labels go"
                    f" from 0 to {last}"
                )
            if (
                self.text
                and len(samples)
                and not 0 <= samples.x.min() <= samples.x.max() < len(self.classes)
            ):
                row, at = ((samples.x < 0) | (samples.x >= len(self.classes))).nonzero()[0].tolist()
                raise DataError(
                    f"{self.name}: {part} sample {row} has the token {int(samples.x[row, at])};"
                    f" tokens are numbers of classes, 0 to {len(self.classes) - 1}"
                )
        for key in ("mean", "std"):
            values = check.each(check.number, f"dataset.{key}", getattr(self, key))
            if len(values) not in (1, self.shape[0]):
                what = f"the {self.shape[0]} channels or columns"
                raise ConfigError(
                    f"dataset.{key}={list(values)}: give one number, or one for each of {what}"
                )
            object.__setattr__(self, key, values * (self.shape[0] // len(values)))
        if min(self.std) <= 0:
            raise ConfigError(f"dataset.std={list(self.std)}: each must be > 0")
        self._check_owners()
        check.one_of("dataset.augment", self.augment, ("none", "crop_flip"))

    def _check_owners(self) -> None:
        if self.owners is None:
            return
        if self.owners.shape != (len(self.y),):
            raise DataError(
                f"{self.name}: {len(self.owners)} owners for {len(self.y)} samples; each sample"
                " needs one"
            )
        if (
            len(self.owners) == 0
            or self.owners.min() < 0
            or self.owners.max() >= len(self.owner_names)
        ):
            raise DataError(
                f"{self.name}: the owners of samples must be numbers in 0 .."
                f" {len(self.owner_names) - 1}"
            )
        held = np.bincount(self.owners, minlength=len(self.owner_names))
        if not held.all():
            raise DataError(
                f"{self.name}: the owner {self.owner_names[int(held.argmin())]!r} has no sample"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample: (C, H, W), (F,) or (T,)."""
        return tuple(self.x.shape[1:])

    @property
    def text(self) -> bool:
        """Whether the samples are token numbers."""
        return not self.x.is_floating_point() and self.x.ndim == 2
