"""Image datasets. Each dataset has a loader of the same name.

A loader is the Hydra target `fedhet.data.images.<name>` (conf/dataset). It imports its packages
only when it is called, and downloads nothing. Files are decoded once; the arrays are cached on disk
and memory-mapped (fedhet.data.array_cache). Arguments are settings of `dataset`; `fields` are
`mean`, `std` and, if the yaml file has it, `augment`, see `fedhet.data.dataset.Dataset`.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.array_cache import Arrays, signature
from fedhet.data.arrays import assemble, check_rows, labels_from_zero, listed
from fedhet.data.dataset import Dataset
from fedhet.data.files import Layout, check_memory, download_hint, find_folder, log
from fedhet.data.frames import read_frame
from fedhet.data.tables import check_columns

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp")  # in lower or upper case
PATTERNS = "*{" + ",".join(SUFFIXES) + "}"  # for messages

COLOURS = {"any": None, "grey": "L", "rgb": "RGB"}  # `dataset.colours` -> PIL's mode
# PIL's mode of an image -> the mode to which it is converted.
_MODES = {
    "L": "L",
    "1": "L",
    "LA": "L",
    "I;16": "L",
    "I;16B": "L",
    "RGB": "RGB",
    "RGBA": "RGB",
    "P": "RGB",
    "PA": "RGB",
    "CMYK": "RGB",
    "YCbCr": "RGB",
}
_DECODER = 2  # part of cache keys: increase it if the same file is decoded to other pixels
_NAMED = 3  # the number of ignored files that the log names
_FOLDERS = ("train/", "test/")  # the contents of a folder of training and test images
_PARQUET = ("train*.parquet", "test*.parquet")


def digits(*, name: str, data_dir: str = "", **fields: Any) -> Dataset:
    """Load scikit-learn's 1,797 digits of 8x8 pixels in 17 grey levels; `data_dir` is not used.

    The global test set is a fixed stratified 20 %, independent of the run's seed. The arrays are
    cached although they come with the library: importing scikit-learn takes longer than a short
    run, and a deployment handles each message in a new process.
    """

    def read() -> Arrays:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        # sixteenths are exact in float32
        pixels = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
        x, test_x, y, test_y = train_test_split(
            pixels, labels.astype(np.int64), test_size=0.2, stratify=labels, random_state=0
        )
        arrays = {"x": x, "y": y, "test_x": test_x, "test_y": test_y}
        return {**arrays, "classes": np.array(list("0123456789"))}

    return assemble(name, {"loader": "digits", "version": version("scikit-learn")}, read, **fields)


# ---- MNIST and its relatives


def mnist(*, name: str, data_dir: str, folder: str, **fields: Any) -> Dataset:
    """Load MNIST from `<data_dir>/<folder>/raw`, where torchvision keeps the unzipped files."""
    from torchvision.datasets import MNIST

    return _idx(name, data_dir, folder, "mnist", MNIST.classes, **fields)


def fashion_mnist(*, name: str, data_dir: str, folder: str, **fields: Any) -> Dataset:
    """Load Fashion-MNIST from `<data_dir>/<folder>/raw`, in the same layout as MNIST."""
    from torchvision.datasets import FashionMNIST

    return _idx(name, data_dir, folder, "fashion_mnist", FashionMNIST.classes, **fields)


def emnist(*, name: str, data_dir: str, folder: str, split: str, **fields: Any) -> Dataset:
    """Load EMNIST from `<data_dir>/<folder>/raw`, where torchvision keeps the unzipped files.

    The images are turned upright.

    Args:
        split: one of the publisher's six splits: byclass (62 classes), bymerge (47), balanced (47),
            letters (26), digits or mnist.
    """
    from torchvision.datasets import EMNIST

    check.one_of("dataset.split", split, EMNIST.splits)
    # The labels of "letters" begin at 1; torchvision gives 0 the name "N/A".
    first = int(split == "letters")
    classes = EMNIST.classes_split_dict[split][first:]
    parts = (f"emnist-{split}-train", f"emnist-{split}-test")
    return _idx(name, data_dir, folder, "emnist", classes, parts, first, transpose=True, **fields)


def _idx(
    name: str,
    data_dir: str,
    folder: str,
    dataset: str,
    classes: Sequence[str],
    parts: tuple[str, str] = ("train", "t10k"),
    first: int = 0,
    *,
    transpose: bool = False,
    **fields: Any,
) -> Dataset:
    """Load a dataset from idx files of images and labels.

    `first` is the lowest label. `transpose` is for files that store each image column by column.
    """
    contents = ("images-idx3", "labels-idx1")
    files = [f"raw/{part}-{content}-ubyte" for part in parts for content in contents]
    place = find_folder(data_dir, [(folder, files)], download_hint(dataset, data_dir))
    paths = [place / file for file in files]
    log.info("%s: the idx files in %s", name, place / "raw")

    def read() -> Arrays:
        from torchvision.datasets.mnist import read_image_file, read_label_file

        arrays = {"classes": np.array(classes)}
        for prefix, (images, labels) in {"": paths[:2], "test_": paths[2:]}.items():
            x = _read_idx(images, read_image_file)[:, None]
            numbers = _read_idx(labels, read_label_file).numpy()
            y = labels_from_zero(labels, numbers, len(classes), first)
            if len(x) != len(y):
                raise DataError(
                    f"{images} contains {check.counted(len(x), 'image')}, but {labels} contains"
                    f" {check.counted(len(y), 'label')}; the numbers must be equal"
                )
            arrays |= {f"{prefix}x": (x.mT if transpose else x).numpy(), f"{prefix}y": y}
        return arrays

    key = {"idx": signature(paths), "classes": list(classes), "transpose": transpose}
    return assemble(name, key, read, **fields)


def _read_idx(path: Path, reader: Callable[[str], Tensor]) -> Tensor:
    try:
        return reader(str(path))
    # torchvision raises these for invalid headers and sizes
    except (OSError, ValueError, TypeError, RuntimeError, KeyError, AssertionError) as error:
        raise DataError(
            f"{path} is damaged, truncated, or not an idx file of bytes: {error!r}"
        ) from error


# ---- CIFAR


def cifar10(*, name: str, data_dir: str, folder: str | None, **fields: Any) -> Dataset:
    """Load CIFAR-10 from torchvision's batches, or else from `{train,test}/<class>/*.png`.

    Args:
        folder: the folder under `data_dir`, in either layout; None: `cifar-10-batches-py`
            (batches) or `cifar10` (images).
    """
    from torchvision.datasets import CIFAR10

    return _cifar(name, data_dir, folder, "cifar10", CIFAR10, [_FOLDERS], **fields)


def cifar100(*, name: str, data_dir: str, folder: str | None, **fields: Any) -> Dataset:
    """Load CIFAR-100 with its 100 fine labels.

    The loader takes the first layout that it finds: torchvision's batches; Parquet files as on
    Hugging Face (`train*.parquet` and `test*.parquet` with the columns `img` and `fine_label`); or
    `{train,test}/<class>/*.png`.

    Args:
        folder: the folder under `data_dir`, in any of these layouts; None: `cifar-100-python`
            (batches) or `cifar100` (the other layouts).
    """
    from torchvision.datasets import CIFAR100

    return _cifar(name, data_dir, folder, "cifar100", CIFAR100, [_PARQUET, _FOLDERS], **fields)


def _cifar(
    name: str,
    data_dir: str,
    folder: str | None,
    dataset: str,
    kind: Any,
    others: Sequence[Sequence[str]],
    **fields: Any,
) -> Dataset:
    """Load a dataset from the batches of torchvision's class `kind`, or from another layout."""
    batches = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    layouts: list[Layout] = [
        (folder or kind.base_folder, [file for file, _ in batches]),
        *((folder or dataset, other) for other in others),
    ]
    place = find_folder(data_dir, layouts, download_hint(dataset, data_dir))
    if (place / kind.meta["filename"]).exists():
        log.info("%s: torchvision's batches in %s", name, place)
        key = {"batches": signature(place / file for file, _ in batches)}
        return assemble(name, key, partial(_read_batches, place, kind, batches), **fields)
    if any(place.glob(_PARQUET[0])):
        log.info("%s: the Parquet files in %s", name, place)
        train, test = (sorted(place.glob(pattern)) for pattern in _PARQUET)
        key = {"tables": signature([*train, *test]), **decoder()}
        return assemble(name, key, partial(_read_cifar100, train, test), **fields)
    log.info("%s: the image folder %s", name, place)
    return _train_and_test(name, place, mode="RGB", **fields)


def _read_batches(place: Path, kind: Any, batches: Sequence[tuple[str, str]]) -> Arrays:
    """Read CIFAR's batches. They are pickles, so their checksums must be the published ones."""
    from torchvision.datasets.utils import check_integrity

    class Batches(kind):  # type: ignore[misc]
        base_folder = place.name

    for file, md5 in batches:
        if not check_integrity(str(place / file), md5):
            raise DataError(f"{place / file} is damaged: its md5 must be {md5}")
    train, test = (Batches(place.parent, train=part) for part in (True, False))
    return {
        "x": np.ascontiguousarray(train.data.transpose(0, 3, 1, 2)),
        "y": np.array(train.targets),
        "test_x": np.ascontiguousarray(test.data.transpose(0, 3, 1, 2)),
        "test_y": np.array(test.targets),
        "classes": np.array(train.classes),
    }


def _read_cifar100(train: Sequence[Path], test: Sequence[Path]) -> Arrays:
    """Read CIFAR-100 from Parquet files of Hugging Face, at least one per split."""
    from pyarrow import parquet

    frames = {path: read_frame(path) for path in (*train, *test)}
    images = []
    for path, frame in frames.items():
        check_columns(str(path), frame.columns, ("img", "fine_label"))
        cells = frame["img"].tolist()
        wrong = [row for row, cell in enumerate(cells) if not isinstance(cell, dict)]
        if wrong:
            raise DataError(f"{path}, row {wrong[0]}: {cells[wrong[0]]!r:.60} is not an image")
        images += [
            (f"{path}, row {row}", BytesIO(cell.get("bytes") or b""))
            for row, cell in enumerate(cells)
        ]
    x = read_images(images)
    y = np.concatenate(
        [
            labels_from_zero(path, frame["fine_label"].to_numpy(), 100)
            for path, frame in frames.items()
        ]
    )
    metadata = json.loads((parquet.read_schema(train[0]).metadata or {}).get(b"huggingface", b"{}"))
    names = metadata.get("info", {}).get("features", {}).get("fine_label", {}).get("names")
    n = sum(len(frames[path]) for path in train)
    arrays = {"x": x[:n], "y": y[:n], "test_x": x[n:], "test_y": y[n:]}
    return {**arrays, "classes": np.array(names or [str(c) for c in range(100)])}


# ---- folders of images


def cinic10(*, name: str, data_dir: str, folder: str, **fields: Any) -> Dataset:
    """Load CINIC-10 from `<data_dir>/<folder>/{train,test}/<class>/*.png`.

    Its third part, `valid`, is not used.
    """
    place = find_folder(data_dir, [(folder, _FOLDERS)], download_hint("cinic10", data_dir))
    return _train_and_test(name, place, mode="RGB", **fields)


def tiny_imagenet(*, name: str, data_dir: str, folder: str, **fields: Any) -> Dataset:
    """Load Tiny ImageNet from `<data_dir>/<folder>`, in its publisher's layout.

    The labels of its test set are not public. The global test set is therefore the validation set,
    `val/images` with `val_annotations.txt`.
    """
    contents = ("train/", "val/images/", "val/val_annotations.txt")
    place = find_folder(data_dir, [(folder, contents)], download_hint("tiny_imagenet", data_dir))
    train = list_images(place / "train")
    annotations = place / "val" / "val_annotations.txt"
    try:
        lines = annotations.read_text(encoding="utf-8").splitlines()
    except ValueError as error:
        raise DataError(f"{annotations} is damaged: {error}") from error
    if not lines:
        raise DataError(f"{annotations} is empty; expected a line for each image")
    rows = [[*line.split("\t"), ""][:2] for line in lines]
    known = [label in train.classes for _, label in rows]
    expected = (
        f"a file name, a tab, and one of the {len(train.classes)} folders of the training images"
    )
    check_rows(str(annotations), known, lambda row: f"{lines[row]!r}; expected {expected}")
    paths = [place / "val" / "images" / file for file, _ in rows]
    test = Listing(paths, [train.classes.index(label) for _, label in rows], train.classes)
    return _of_listings(name, [place], [train], [test], mode="RGB", **fields)


def chest_xray(
    *,
    name: str,
    data_dir: str,
    folder: str,
    sources: Sequence[str] | None,
    size: int,
    **fields: Any,
) -> Dataset:
    """Load chest X-rays from several sources, converted to grey.

    The files are `<data_dir>/<folder>/<source>/{train,test}/<class>/*`. An image's owner is its
    source. Without source folders, `<data_dir>/<folder>/{train,test}` is the only source.

    Args:
        sources: the source folders to use, in this order; None: all folders with a folder "train".
        size: every image is resized to (size, size).
    """
    check.integer("dataset.size", size, low=1)
    names = check.optional(partial(check.each, check.text), "dataset.sources", sources)
    if names is not None and (not names or len(set(names)) < len(names)):
        raise ConfigError(
            f"dataset.sources={list(names)}: must be null, or a list of distinct folders"
        )
    wanted = [f"{source}/{part}" for source in names or ["*"] for part in _FOLDERS]
    layouts = [(folder, wanted), *([(folder, list(_FOLDERS))] if names is None else [])]
    place = find_folder(data_dir, layouts, download_hint("chest_xray", data_dir))
    if names is not None:
        places = [place / source for source in names]
    elif (place / "train").is_dir():
        places = [place]
    else:
        places = sorted(train.parent for train in place.glob("*/train/"))
    log.info("%s: the image folders %s", name, ", ".join(map(str, places)))
    classes = list_images(places[0] / "train").classes
    train, test = ([list_images(p / part, classes) for p in places] for part in ("train", "test"))
    owners = [place.name for place in places]
    wholes = [place] if names is None else places
    return _of_listings(name, wholes, train, test, size, "L", owners, **fields)


def image_folder(
    *,
    name: str,
    data_dir: str,
    folder: str,
    size: int | None = None,
    colours: str = "any",
    **fields: Any,
) -> Dataset:
    """Load the user's own images, `<data_dir>/<folder>/{train,test}/<class>/*`.

    Files have the endings in `SUFFIXES`. Classes are in alphabetical order.

    Args:
        size: resizes each image to (size, size); None: all images must have the same size.
        colours: "grey" or "rgb" converts all images; "any": all images must be grey, or all in
            colour.
    """
    check.optional(check.integer, "dataset.size", size, low=1)
    mode = COLOURS[check.one_of("dataset.colours", colours, COLOURS)]
    hint = (
        f"Put your images there as {{train,test}}/<class>/{PATTERNS}, name the folder in"
        " dataset.folder"
    )
    place = find_folder(data_dir, [(folder, _FOLDERS)], hint)
    return _train_and_test(name, place, size, mode, **fields)


def _train_and_test(
    name: str, place: Path, size: int | None = None, mode: str | None = None, **fields: Any
) -> Dataset:
    """Load the dataset in `<place>/{train,test}/<class>/`; see `_of_listings`."""
    train = list_images(place / "train")
    test = list_images(place / "test", train.classes)
    return _of_listings(name, [place], [train], [test], size, mode, **fields)


def _of_listings(
    name: str,
    places: Sequence[Path],
    train: Sequence[Listing],
    test: Sequence[Listing],
    size: int | None = None,
    mode: str | None = None,
    owners: Sequence[str] | None = None,
    **fields: Any,
) -> Dataset:
    """Load the dataset of the listed images.

    `places` are the folders that contain the images; the log names their other files. See
    `read_images` for `size` and `mode`. `owners` has the owner of each listing in `train`.
    """
    paths = [path for listing in (*train, *test) for path in listing.paths]
    for place in places:
        log_unread(place, paths)

    def read() -> Arrays:
        x = read_images([(str(path), path) for path in paths], size, mode)
        y = np.concatenate([listing.labels for listing in (*train, *test)])
        n = sum(len(listing.paths) for listing in train)
        arrays = {"x": x[:n], "y": y[:n], "test_x": x[n:], "test_y": y[n:]}
        if owners is not None:
            arrays |= {
                "owners": np.repeat(np.arange(len(train)), [len(each.paths) for each in train]),
                "owner_names": np.array(owners),
                "test_owners": np.repeat(owners, [len(each.paths) for each in test]),
            }
        return {**arrays, "classes": np.array(train[0].classes)}

    key = {"images": signature(paths), "size": size, "mode": mode, **decoder()}
    return assemble(name, key, read, **fields)


# ---- from image files to arrays


@dataclass(frozen=True)
class Listing:
    """Image files and their labels; a label is a position in `classes`."""

    paths: list[Path]
    labels: list[int]
    classes: tuple[str, ...]


def list_images(folder: Path, classes: Sequence[str] | None = None) -> Listing:
    """List the images in `<folder>/<class>` and its subfolders, in alphabetical order.

    Args:
        folder: the folder of the class folders.
        classes: the allowed classes; None: the names of the folders in `folder`.

    Raises:
        DataError: there is a folder of another class, or there are no images.
    """
    present = sorted(e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith("."))
    names = tuple(present if classes is None else classes)
    if unknown := sorted({*present} - {*names}):
        raise DataError(
            f"{folder} has the class folders {unknown}, which the training images do not have;"
            f" the classes of the training images are {list(names)}"
        )
    found: list[Path] = []
    labels: list[int] = []
    for name in present:
        images = [path for path in visible_files(folder / name) if is_image(path)]
        if classes is None and not images:
            raise DataError(
                f"{folder / name} contains no images; expected {PATTERNS}, because each folder is a"
                " class"
            )
        found += images
        labels += [names.index(name)] * len(images)
    if not found:
        raise DataError(f"{folder} contains no images; expected {folder}/<class>/{PATTERNS}")
    return Listing(found, labels, names)


def is_image(path: Path) -> bool:
    """Whether fedhet reads a file with this ending as an image."""
    return path.suffix.lower() in SUFFIXES


def visible_files(folder: Path) -> list[Path]:
    """List the files in a folder and its subfolders in alphabetical order, without hidden files.

    Raises:
        DataError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    found: list[Path] = []
    for place, _, names in sorted(os.walk(folder, onerror=refuse, followlinks=True)):
        if not any(part.startswith(".") for part in Path(place).relative_to(folder).parts):
            found += [Path(place, name) for name in sorted(names) if not name.startswith(".")]
    return found


def log_unread(folder: Path, images: Iterable[Path], level: int = logging.INFO) -> None:
    """Log the visible files of a folder that are not among the images that are read."""
    read = {*images}
    rest = [str(path.relative_to(folder)) for path in visible_files(folder) if path not in read]
    if rest:
        count = check.counted(len(rest), "file is", "files are")
        log.log(level, "%s: %s not read: %s", folder, count, listed(rest, _NAMED))


def read_images(
    images: Sequence[tuple[str, Path | BytesIO]], size: int | None = None, mode: str | None = None
) -> np.ndarray:
    """Decode images into uint8 (n, C, H, W); C is 1 for grey images and 3 for colour.

    Args:
        images: pairs (name of the image in messages, file).
        size: resizes each image to (size, size); None: images keep their size.
        mode: "L" converts all images to grey, "RGB" to colour; None: images keep their mode.

    Raises:
        DataError: a file is damaged, has an unknown format, or has another shape than the first
            image; the message names the file.
    """
    from PIL import Image

    array = np.empty(0, np.uint8)
    if size is not None:
        channels = 1 if mode == "L" else 3
        check_memory(channels * len(images) * size**2, f"dataset.size={size}")
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
    """Open an image, rotated as viewers show it, in PIL's `mode`; None: 8-bit grey or colour."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            if image.mode not in _MODES:
                raise ValueError(
                    f"it has PIL's mode {image.mode!r}; allowed are grey and colour of 8 or 16"
                    f" bits: {', '.join(_MODES)}"
                )
            # PIL's name for the numbers in the file; after reading, PIL no longer has it.
            stored = str(image.tile[0].args) if image.tile else ""
            turned = ImageOps.exif_transpose(image)
            return _opaque(turned, stored).convert(mode or _MODES[image.mode])
    # PIL raises SyntaxError for a broken PNG chunk, and the others for broken headers and EXIF tags
    except (
        OSError,
        SyntaxError,
        ValueError,
        TypeError,
        struct.error,
        Image.DecompressionBombError,
    ) as error:
        raise DataError(f"{name} is not a readable image: {error}") from error


def _opaque(image: Image.Image, stored: str) -> Image.Image:
    """Return the image with 8 bits per channel, and white in place of transparent pixels."""
    from PIL import Image

    clear = image.info.get("transparency")
    if image.mode.startswith("I;16"):
        numbers = np.asarray(image)
        # Keep the high byte, as PIL does for 16-bit colours.
        pixels = (numbers >> (4 if "I;12" in stored else 8)).astype(np.uint8)
        pixels[numbers == clear] = 255
        return Image.fromarray(pixels)
    if not image.has_transparency_data:
        return image
    if clear is not None and "RGB;16" in stored:
        raise ValueError(
            "it has colours of 16 bits, and one of them is transparent, but PIL reads only 8 bits;"
            " convert it to 8 bits"
        )
    if stored in ("L;2", "L;4"):  # PIL scales greys to 0..255, but not this one
        image.info["transparency"] *= {"L;2": 85, "L;4": 17}[stored]
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))


def decoder() -> dict[str, Any]:
    """Return the decoder's part of cache keys: another version may decode a file differently."""
    return {"pillow": version("pillow"), "decoder": _DECODER}
