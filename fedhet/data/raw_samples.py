"""Samples as a file contains them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fedhet.core.errors import DataError


def place(source: str, row: int) -> str:
    """Where a sample is, for messages.

    Args:
        source: the file, with what chooses the column in it.
        row: counted from 0, without a header. Of a csv file it is told as editors count.
    """
    is_csv = re.search(r"\.csv($|, column)", source)
    return f"{source}, row {row + 2} (the header is row 1)" if is_csv else f"{source}, row {row}"


@dataclass(frozen=True)
class RawSamples:
    """Samples as a file contains them.

    Args:
        x: (n, ...), the inputs.
        y: (n,) or (n, K), the targets: labels, numbers, or, as objects, lists of labels.
        owners: (n,), the samples' owners, or None.
        x_source: where `x` comes from, for messages.
        y_source: where `y` comes from, for messages.
        y_names: the names of the columns of `y`; empty where they have none.

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
        for what, values in (("labels", self.y), ("owners", self.owners)):
            shape = () if values is None else values.shape
            if what == "labels" and len(shape) == 2 and shape[1]:
                shape = shape[:1]
            if values is not None and shape != (len(self.x),):
                raise DataError(
                    f"{self.x_source}: the {what} have shape {values.shape}; expected"
                    f" ({len(self.x)},), one for each sample"
                )
        if self.owners is not None and self.owners.dtype.kind == "f":
            missing = np.isnan(self.owners)
            if missing.any():
                raise DataError(
                    f"{place(self.x_source, int(missing.argmax()))}: its owner is nan; each sample"
                    " needs an owner"
                )
        if not len(self.x):
            raise DataError(f"{self.x_source} contains no samples")

    @property
    def lists(self) -> bool:
        """Whether `y` are lists of labels."""
        objects = self.y.dtype == object and self.y.ndim == 1
        return objects and isinstance(self.y[0], list | np.ndarray)
