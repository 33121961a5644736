"""The columns of a dataset in Hugging Face's formats: as a table, or as images."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.core.errors import ConfigError, DataError
from fedhet.data.image_files import read_images
from fedhet.data.raw_samples import RawSamples
from fedhet.data.tables.data_frames import check_columns, known_owner, raw_samples

if TYPE_CHECKING:
    import datasets
    import pandas


def class_names(
    columns: datasets.Features, label: str | Sequence[str]
) -> tuple[list[str] | None, bool]:
    """The names that the dataset gives the classes, and whether a sample has a list of them."""
    kind = columns.get(label) if isinstance(label, str) else None
    several = getattr(kind, "feature", None)  # of a list
    names = getattr(several or kind, "names", None)
    return (list(names) if names else None), bool(names and several)


def frame_of(part: datasets.Dataset, label: str | Sequence[str]) -> pandas.DataFrame:
    """The table; lists of class numbers become lists of the classes' names.

    As numbers they could be taken for zeros and ones.
    """
    frame = part.to_pandas()
    names, several = class_names(part.features, label)
    if names and several:
        frame[label] = [
            None if numbers is None else [names[number] for number in numbers]
            for numbers in frame[label]
        ]
    return frame


def image_column(
    features: str | Sequence[str] | None, columns: datasets.Features, source: str
) -> str | None:
    """The column of images that `dataset.features` means; None: it means columns of numbers."""
    import datasets

    if isinstance(features, str):
        return features
    if features is not None:
        return None
    images = [column for column, kind in columns.items() if isinstance(kind, datasets.Image)]
    if len(images) > 1:
        raise ConfigError(
            f"dataset.features=null: {source} has several columns of images, choose from:"
            f" {', '.join(images)}"
        )
    return images[0] if images else None


def raw_images(
    source: str,
    part: datasets.Dataset,
    image: str,
    label: str | Sequence[str],
    owner: str | None,
    size: int | None,
    test: bool,
) -> RawSamples:
    import datasets

    labels = [label] if isinstance(label, str) else label
    needed = [image, *labels] if owner is None or test else [image, *labels, owner]
    check_columns(source, part.features, needed)
    if not isinstance(part.features[image], datasets.Image):
        raise DataError(
            f"{source}, column {image!r} holds {part.features[image]}, not images; a list of"
            f" columns is a table: [{image}]; dataset.text names a column of texts"
        )
    cells = part.cast_column(image, datasets.Image(decode=False))[image]
    files = [(f"{source}, row {row}", _image_file(cell)) for row, cell in enumerate(cells)]
    frame = frame_of(part.remove_columns(image), label)
    if test:
        owner = known_owner(frame, owner)
    return raw_samples(read_images(files, size), frame, source, label, owner)


def _image_file(cell: dict[str, Any] | None) -> Path | BytesIO:
    """The file of an image, on disk or in the cell; a missing image is an empty file."""
    if cell is None:
        return BytesIO()
    return Path(cell["path"]) if cell["bytes"] is None else BytesIO(cell["bytes"])
