"""Loads image datasets by their yaml, and writes small stand-ins for their files."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image

from fedhet.data import images
from fedhet.data.dataset import Dataset

CONF = Path(__file__).parents[2] / "conf" / "dataset"


def load(name: str, /, **keys: object) -> Dataset:
    """The dataset of conf/dataset/<name>.yaml with these settings."""
    conf = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    loader = getattr(images, conf.pop("_target_").split(".")[-1])
    return loader(**{**conf, **keys})


def load_folder(tmp_path: Path, **keys: object) -> Dataset:
    """The image folder `tmp_path`/mine."""
    return load("image_folder", data_dir=str(tmp_path), folder="mine", **keys)


def counts(y: torch.Tensor) -> list[int]:
    """The number of samples of each class."""
    return torch.bincount(y).tolist()


def save_image(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(path)


def grey(value: int, size: tuple[int, int] = (4, 6)) -> np.ndarray:
    """(H, W) = `size`, all of one value."""
    return np.full(size, value, np.uint8)


def png(pixels: np.ndarray) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def write_idx(path: Path, array: np.ndarray) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    header = bytes([0, 0, 8, array.ndim]) + sizes
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_mnist(folder: Path, value: int = 0) -> Path:
    """12 training and 4 test images (5, 6) of one value; returns the folder of the files."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    for part, n in (("train", 12), ("t10k", 4)):
        write_idx(raw / f"{part}-images-idx3-ubyte", np.full((n, 5, 6), value))
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(n) % 10)
    return raw


def write_images(folder: Path, shape: tuple[int, ...], suffix: str = ".png") -> None:
    """3 training and 2 test images of the classes a, b and c, each of one value."""
    for part, per_class in (("train", 3), ("test", 2)):
        for label, name in enumerate(("b", "a", "c")):
            place = folder / part / name
            place.mkdir(parents=True)
            for i in range(per_class):
                pixels = np.full(shape, 10 * label + i, np.uint8)
                save_image(place / f"{i}{suffix}", pixels)
