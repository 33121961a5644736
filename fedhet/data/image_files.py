"""Image files in folders by class, and how they become arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedhet.core.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg")
PATTERNS = " or ".join(f"*{suffix}" for suffix in SUFFIXES)  # for messages

COLOURS = {"any": None, "grey": "L", "rgb": "RGB"}  # `dataset.colours` -> PIL's mode
# PIL's mode of an image -> the mode that it is read in.
_MODES = {
    "L": "L",
    "1": "L",
    "LA": "L",
    "RGB": "RGB",
    "RGBA": "RGB",
    "P": "RGB",
    "CMYK": "RGB",
}


@dataclass(frozen=True)
class Listing:
    """Image files and their labels, which are positions in `classes`."""

    paths: list[Path]
    labels: list[int]
    classes: tuple[str, ...]


def list_images(folder: Path, classes: Sequence[str] | None = None) -> Listing:
    """The images in `<folder>/<class>` and below; classes and images are in alphabetical order.

    Args:
        folder: the folder of the class folders.
        classes: the classes that are allowed; None: those that have a folder.

    Raises:
        DataError: there are other class folders, or none with images.
    """
    from torchvision.datasets.folder import make_dataset

    def visible_image(path: str) -> bool:
        hidden = any(part.startswith(".") for part in Path(path).relative_to(folder).parts)
        return path.lower().endswith(SUFFIXES) and not hidden

    present = sorted(e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith("."))
    names = tuple(present if classes is None else classes)
    if unknown := sorted({*present} - {*names}):
        raise DataError(
            f"{folder} has the class folders {unknown}, which the training images do not have;"
            f" their classes are {list(names)}"
        )
    numbers = {name: number for number, name in enumerate(names)}
    found: list[tuple[str, int]] = []
    if present:
        found = make_dataset(folder, numbers, is_valid_file=visible_image, allow_empty=True)
    labels = [label for _, label in found]
    occurring = {*labels}
    if classes is None and (empty := [name for name in names if numbers[name] not in occurring]):
        raise DataError(
            f"{folder / empty[0]} contains no images; expected {PATTERNS}, because each folder is a"
            " class"
        )
    if not found:
        raise DataError(f"{folder} contains no images; expected {folder}/<class>/{PATTERNS}")
    return Listing([Path(path) for path, _ in found], labels, names)


def read_images(
    images: Sequence[tuple[str, Path | BytesIO]], size: int | None = None, mode: str | None = None
) -> np.ndarray:
    """Decode images into uint8 (n, C, H, W), where C is 1 for grey images and 3 for colour.

    Args:
        images: for each image its name in messages, and the file.
        size: resizes each image to (size, size); None: images keep their size.
        mode: "L" converts all images to grey, "RGB" to colour; None: images keep theirs.

    Raises:
        DataError: a file is damaged, of an unknown kind, or of another shape than the first; the
            message names the file.
    """
    from PIL import Image

    array = np.empty(0, np.uint8)
    for i, (name, file) in enumerate(images):
        image = _open(name, file, mode)
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        pixels = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
        if i == 0:
            array = np.empty((len(images), *pixels.shape), np.uint8)
        if pixels.shape != array.shape[1:]:
            raise DataError(
                f"{name} has (C, H, W) = {pixels.shape}, but {images[0][0]} has"
                f" {array.shape[1:]}; all images must have the same shape (for"
                " dataset=image_folder, dataset.size and dataset.colours convert them)"
            )
        array[i] = pixels
    return array


def _open(name: str, file: Path | BytesIO, mode: str | None) -> Image.Image:
    """The image in PIL's `mode`; None: in 8-bit grey or colour, whichever it is."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            if image.mode not in _MODES:
                raise DataError(
                    f"{name} is of PIL's mode {image.mode!r}; allowed are 8-bit grey and colour:"
                    f" {', '.join(_MODES)}"
                )
            return image.convert(mode or _MODES[image.mode])
    except UnidentifiedImageError as error:
        raise DataError(
            f"{name} is not a readable image: it is damaged or of an unknown format"
        ) from error
    # PIL raises SyntaxError for a broken PNG chunk
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{name} is not a readable image: {error}") from error


def decoder() -> dict[str, str]:
    """The decoder's part of the cache keys: another version may decode a JPEG differently."""
    return {"pillow": version("pillow")}
