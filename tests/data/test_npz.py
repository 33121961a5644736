"""The user's own npz file: what is kept, how it is standardised, and wrong arrays."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.own_data import load

from fedhet.core.errors import ConfigError, DataError
from fedhet.data.federation import transform


def arrays(**other: Any) -> dict[str, np.ndarray]:
    rows = np.arange(12.0).reshape(4, 3)
    return {
        "x_train": rows,
        "y_train": np.array([2, 0, 2, 7]),
        "x_test": rows[:2] + 0.5,
        "y_test": np.array([7, 2]),
        **other,
    }


def write(folder: Path, **other: Any) -> Path:
    np.savez(folder / "data.npz", **arrays(**other))
    return folder


def test_a_table_of_numbers(tmp_path: Path) -> None:
    data = load("npz", write(tmp_path, who=np.array(["b", "a", "b", "c"])), owner="who")
    assert (data.shape, data.x.dtype, data.text) == ((3,), torch.float64, False)
    assert data.x.tolist() == arrays()["x_train"].tolist()
    assert data.test.x.tolist() == arrays()["x_test"].tolist()
    assert data.classes == ("0", "2", "7")
    assert (data.y.tolist(), data.test.y.tolist()) == ([1, 0, 1, 2], [2, 1])
    assert data.owner_names == ("a", "b", "c")
    assert data.owners is not None and data.owners.tolist() == [1, 0, 1, 2]
    assert data.mean == data.std == "auto"  # until a partition says which samples train


def test_names_of_arrays_and_an_absolute_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    labels = np.array(["yes", "no"])
    np.savez(path, a=np.eye(2), b=labels, c=np.eye(2)[:1], d=labels[1:])
    names = {"x_train": "a", "y_train": "b", "x_test": "c", "y_test": "d"}
    data = load("npz", tmp_path / "elsewhere", file=str(path), **names)
    assert (data.classes, data.y.tolist(), data.test.y.tolist()) == (("no", "yes"), [1, 0], [0])
    ordered = load("npz", tmp_path, file="mine.npz", classes=["yes", "no", "?"], **names)
    assert ordered.y.tolist() == [0, 1]


def test_images(tmp_path: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (4, 5, 6), dtype=np.uint8)
    data = load("npz", write(tmp_path, x_train=grey, x_test=grey[:2]))
    assert (data.shape, data.x.dtype) == ((1, 5, 6), torch.uint8)
    assert np.array_equal(data.x[:, 0].numpy(), grey)
    coloured = np.random.default_rng(1).random((4, 3, 5, 6))
    write(tmp_path, x_train=coloured, x_test=coloured[:2])
    data = load("npz", tmp_path, mean=[0.5], std="auto")
    assert (data.shape, data.x.dtype, data.mean) == ((3, 5, 6), torch.float32, (0.5, 0.5, 0.5))
    assert data.std == "auto"


def test_tokens(tmp_path: Path) -> None:
    tokens = np.array([[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]])
    labels = np.array([3, 0, 1, 2])
    write(tmp_path, x_train=tokens, y_train=labels, x_test=tokens[:2], y_test=labels[:2])
    data = load("npz", tmp_path, text=True, classes=4)
    assert (data.text, data.shape, data.x.tolist()) == (True, (3,), tokens.tolist())
    assert transform(data) is None
    labels = np.array([0, 0, 1, 2])
    write(tmp_path, x_train=tokens, y_train=labels, x_test=tokens[:2], y_test=np.array([1, 0]))
    message = "training sample 1 .*token 3; .*0 .*2"
    with pytest.raises(DataError, match=message):
        load("npz", tmp_path, text=True, classes=3)
    assert not load("npz", tmp_path, classes=3).text


def test_what_the_export_of_a_client_writes(tmp_path: Path) -> None:
    """The client may lack classes, and its data are normalised as the federation's."""
    descriptive = {
        "classes": np.array(["a", "b", "c"]),
        "mean": np.array([1.0, 2.0, 3.0]),
        "std": np.array([4.0, 5.0, 6.0]),
    }
    write(tmp_path, y_train=np.array([2, 0, 2, 2]), y_test=np.array([0, 2]), **descriptive)
    data = load("npz", tmp_path)
    assert (data.classes, data.y.tolist()) == (("a", "b", "c"), [2, 0, 2, 2])
    assert (data.mean, data.std) == ((1, 2, 3), (4, 5, 6))
    message = r"row 3: label 7; .*one .*classes \['0', '1', '2'\]"
    with pytest.raises(DataError, match=message):
        load("npz", write(tmp_path, **descriptive))


# Changes of the file, settings, and what the error says.
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"x_train": np.array([[1, 2], [3, np.inf], [0, 0], [0, 0]])},
        {},
        r"array 'x_train', row 1: inf .*\[1\]; .*finite",
    ),
    ({"x_train": np.array([[1, 2], [3, 4], [1e39, 0], [0, 0]])}, {}, r"row 2: 1e\+39 .*\[0\]"),
    ({"x_train": np.zeros((4, 0))}, {}, r"float64 \(4, 0\); .*numbers"),
    (
        {"x_train": np.full((4, 2, 2), 1.5)},
        {},
        r"array 'x_train', row 0: 1.5 .*\[0, 0, 0\]; .*pixels .*\[0, 1\]",
    ),
    ({"x_test": np.full((2, 1, 2, 2), -0.5)}, {}, r"array 'x_test', row 0: -0.5"),
    (
        {"y_train": np.array([0, 1, np.inf, 0])},
        {},
        r"array 'y_train', row 2: label inf; .*class",
    ),
    (
        {"y_train": np.array([0, 1e30, 0, 0])},
        {"classes": 2},
        r"row 1: label '10+19.*'; .*one .*classes",
    ),
    ({"classes": np.array("a")}, {}, r"array 'classes' .*<U1 \(\); .*1"),
    ({"classes": np.array(["a", "a"])}, {}, r"classes=\['a', 'a'\]: .*distinct"),
    ({"mean": np.array(0.5)}, {}, r"array 'mean' .*float64 \(\); .*1"),
    ({"mean": np.array([np.nan] * 3)}, {}, r"dataset\.mean\[0\]=nan "),
    ({"std": np.array([1, 0, 1])}, {}, r"dataset\.std=\[1.*, 0.*\]: .*> 0"),
    ({"who": np.array([0, np.nan, 1, 1])}, {"owner": "who"}, r"row 1: .*owner .*nan"),
    ({"x_test": np.full((2, 1, 2, 2), np.nan)}, {}, r"array 'x_test', row 0: nan .*\[0, 0, 0\]"),
    (
        {"x_train": np.array([["a"] * 3] * 4)},
        {},
        r"array 'x_train' .*<U1 \(4, 3\); .*numbers \(n, F\)",
    ),
    ({"x_train": np.zeros(4)}, {}, r"float64 \(4,\); .*numbers"),
    ({"x_train": np.zeros((4, 5, 5, 3))}, {}, r"\(4, 5, 5, 3\); .*channels first"),
    ({"x_train": np.zeros((4, 5, 5), np.int64)}, {}, r"int64 \(4, 5, 5\); .*uint8"),
    ({"x_train": np.zeros((0, 3)), "y_train": np.zeros(0, int)}, {}, "samples"),
    ({"y_train": np.array([0, 1])}, {}, r"labels .*shape \(2,\) .*shape \(4,\)"),
    (
        {"y_train": np.array([0, 1.5, 0, 0])},
        {"target": "class"},
        r"array 'y_train', row 1: label 1.5; .*class",
    ),
    (
        {"y_test": np.array([7, 3])},
        {},
        r"array 'y_test', row 1: label 3; .*one .*classes \['0', '2', '7'\]",
    ),
    (
        {},
        {"classes": 7},
        r"array 'y_train', row 3: label 7; .*one .*classes \['0', '1', .*'6'\]",
    ),
    ({"who": np.arange(3)}, {"owner": "who"}, r"owners .*shape \(3,\) .*shape \(4,\)"),
    (
        {},
        {"owner": "who"},
        r"^[^:]*.*array 'who' \(dataset.owner\); .*x_train, y_train, x_test, y_test",
    ),
    ({}, {"text": True}, r"float64 \(4, 3\); dataset.text=true .*token numbers \(n, T\)"),
    (
        {"x_test": np.zeros((2, 4))},
        {},
        r"training samples .*shape \(3,\), .*test samples \(4,\)",
    ),
    (
        {"y_train": np.array([None] * 4)},
        {},
        r"data\.npz .*damaged.*: Object arrays",
    ),
]


@pytest.mark.parametrize(("content", "keys", "message"), WRONG)
def test_wrong_arrays_are_named(
    tmp_path: Path, content: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        load("npz", write(tmp_path, **content), **keys)


def test_damaged_npz(tmp_path: Path) -> None:
    path = write(tmp_path) / "data.npz"
    whole = path.read_bytes()
    for content in (whole[:-40], whole[:200], b"", b"PK\x03\x04", b"no npz"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"data\.npz .*damaged, .*npz"):
            load("npz", tmp_path)
    np.savez_compressed(path, **arrays())
    whole = path.read_bytes()
    for position in range(30, 300, 3):  # in a deflated array's header and bytes
        path.write_bytes(whole[:position] + b"\xff\xff" + whole[position + 2 :])
        # some bytes do not matter; no other error may be raised
        with contextlib.suppress(DataError):
            load("npz", tmp_path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match=r"data\.npz .*damaged, .*npz"):
        load("npz", tmp_path)
    with pytest.raises(DataError, match=r"(?s)not .*other\.npz\. .*dataset\.file"):
        load("npz", tmp_path, file="other.npz")


def test_wrong_settings(tmp_path: Path) -> None:
    write(tmp_path)
    for keys in (
        {"text": 1},
        {"file": None},
        {"classes": 0},
        {"classes": True},
        {"classes": "a"},
        {"classes": ["a", "a"]},
        {"classes": []},
        {"mean": "mean"},
        {"std": 1.0},
        {"std": ["a"]},
    ):
        with pytest.raises(ConfigError, match=rf"dataset\.{next(iter(keys))}(\[0\])?="):
            load("npz", tmp_path, **keys)
