"""How image files become pixels: as viewers show them, or not at all."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedhet.core.errors import DataError
from fedhet.data.images import read_images

SCENE = np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8)
# What the viewer does with the stored image, for each value of EXIF's tag.
TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.transpose(1, 0, 2),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).transpose(1, 0, 2),
    8: lambda x: np.rot90(x),
}
EXACT: dict[str, dict[str, Any]] = {"png": {}, "tiff": {}, "webp": {"lossless": True}}


def decoded(file: bytes, mode: str | None = None) -> list[Any]:
    """Its pixels as lists (H, W, C), or (H, W) if it is grey."""
    (x,) = read_images([("x", BytesIO(file))], mode=mode)
    return x.transpose(1, 2, 0).tolist() if len(x) == 3 else x[0].tolist()


def saved(image: Image.Image, kind: str = "png", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def raw_png(depth: int, colour: int, row: bytes, width: int, clear: bytes = b"") -> bytes:
    """A PNG of one row of a kind that PIL reads and does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0))
    body = (chunk(b"tRNS", clear) if clear else b"") + chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + head + body + chunk(b"IEND", b"")


def raw_tiff(bits: int, row: bytes, width: int) -> bytes:
    """A TIFF of one row of grey numbers, in little-endian order."""
    tags = {256: width, 257: 1, 258: bits, 259: 1, 262: 1, 273: 0, 277: 1, 278: 1, 279: len(row)}
    tags[273] = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + row


# ---- orientation


@pytest.mark.parametrize("kind", EXACT)
def test_photos_are_turned_as_their_camera_was(kind: str) -> None:
    for orientation, turn in TURNS.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = saved(Image.fromarray(SCENE), kind, exif=exif, **EXACT[kind])
        assert decoded(file) == turn(SCENE).tolist(), orientation


def test_what_is_turned_and_resized_is_turned_first() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    wide = np.repeat(np.array([[0, 255]], np.uint8), 4, 0).repeat(4, 1)  # dark on the left
    file = saved(Image.fromarray(wide), exif=exif)
    (x,) = read_images([("x", BytesIO(file))], size=2)
    assert x[0, 0].max() < x[0, 1].min()  # dark at the top


def test_a_damaged_exif_tag_is_an_error_of_the_file() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = saved(Image.fromarray(SCENE), "webp", exif=exif)
    damaged = file.replace(b"MM\0*", b"MMMM")
    assert damaged != file
    with pytest.raises(DataError, match=r"x .*readable image"):
        decoded(damaged)


# ---- transparency


def in_palette(clear: int | bytes) -> bytes:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    return saved(image, transparency=clear)


def test_what_is_transparent_is_white() -> None:
    white = [255] * 3
    black = np.zeros((1, 3, 4), np.uint8)
    black[..., 3] = 0, 128, 255
    for kind in ("png", "tiff", "webp"):
        options = {"lossless": True, "exact": True} if kind == "webp" else {}
        file = saved(Image.fromarray(black), kind, **options)
        assert decoded(file) == [[white, [127] * 3, [0] * 3]], kind
        assert decoded(file, "L") == [[255, 127, 0]], kind
    grey = Image.merge("LA", [Image.fromarray(black[..., 0]), Image.fromarray(black[..., 3])])
    assert decoded(saved(grey)) == [[255, 127, 0]]
    assert decoded(in_palette(1)) == [[[10, 20, 30], white, [70, 80, 90]]]
    assert decoded(in_palette(b"\0")) == [[white, [40, 50, 60], [70, 80, 90]]]


def test_one_colour_may_be_the_transparent_one() -> None:
    """The chunk tRNS, in the numbers that the file has."""
    greys = Image.fromarray(np.array([[0, 7, 255]], np.uint8))
    assert decoded(saved(greys, transparency=7)) == [[0, 255, 255]]
    colours = Image.fromarray(np.array([[[1, 2, 3], [3, 2, 1]]], np.uint8))
    assert decoded(saved(colours, transparency=(3, 2, 1))) == [[[1, 2, 3], [255] * 3]]
    assert decoded(raw_png(1, 0, bytes([0b01000000]), 3, b"\0\0")) == [[255, 255, 255]]
    assert decoded(raw_png(2, 0, bytes([0b00011011]), 4, b"\0\1")) == [[0, 255, 170, 255]]
    assert decoded(raw_png(4, 0, bytes([0x03, 0xF0]), 3, b"\0\3")) == [[0, 255, 255]]
    numbers = struct.pack(">3H", 0, 5, 65535)
    assert decoded(raw_png(16, 0, numbers, 3, b"\0\5")) == [[0, 255, 255]]
    with pytest.raises(DataError, match=r"colours .*16 bits, .*one .*transparent"):
        decoded(raw_png(16, 2, numbers, 1, numbers))


# ---- 16 bits, and what has no pixels


def test_numbers_of_16_bits_keep_their_greys() -> None:
    numbers = np.array([[0, 255, 256, 0x8000, 65535]], np.uint16)
    greys = [[0, 0, 1, 128, 255]]
    assert decoded(saved(Image.fromarray(numbers))) == greys
    assert decoded(saved(Image.fromarray(numbers)), "RGB") == [[[g] * 3 for g in greys[0]]]
    assert decoded(raw_tiff(16, numbers.tobytes(), 5)) == greys
    assert decoded(saved(Image.fromarray(numbers.astype(">u2")), "tiff")) == greys
    assert decoded(raw_tiff(12, bytes([0xFF, 0xF0, 0x10]), 2)) == [[255, 1]]
    coloured = struct.pack(">6H", *numbers[0], 0x1234)
    assert decoded(raw_png(16, 2, coloured, 2)) == [[[0, 0, 1], [128, 255, 0x12]]]


@pytest.mark.parametrize(("dtype", "mode"), [(np.int32, "I"), (np.float32, "F")])
def test_numbers_without_a_range_are_refused(dtype: type, mode: str) -> None:
    file = saved(Image.fromarray(np.zeros((2, 2), dtype)), "tiff")
    with pytest.raises(DataError, match=f"x .*PIL's mode '{mode}'; .*grey"):
        decoded(file)
