"""The encoding of weights and extras in what Flower carries, and its checks.

The parameter list holds the weights. Extras travel in Flower's config dictionary (down) and metrics
dictionary (up): scalars as they are, tensors and trees as safetensors bytes under "fedhet.<name>".
An extra above INLINE_LIMIT follows the weights in the parameter list instead. The header is JSON
under the key "fedhet": what the message is, the names of the tensors, and a digest of each part
and of itself, so that a damaged message is noticed.

Whatever arrives is hostile until it is checked: `unpack` raises Rejected and nothing else.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from fedhet.core import trees
from fedhet.core.errors import Rejected
from fedhet.core.messages import Extra, Extras, check_extras
from fedhet.core.trees import AnyTree, Tree
from fedhet.record.files import check_header

HEADER = "fedhet"
# Bytes of one extra in a config or metrics dictionary, which Flower sends in one piece.
INLINE_LIMIT = 32 * 2**20
HEADER_LIMIT = 2**20  # characters; a ResNet-152 has 40,000
_READERS: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_LAYOUT = ("names", "trees", "behind", "digests", "digest")
_WEIGHTS = ""  # the name of the weights among the digests; no extra has an empty name


@dataclass
class Encoded:
    """Weights or extras as Flower carries them.

    Attributes:
        arrays: what follows the weights in the parameter list.
        entries: what goes into the config or metrics dictionary.
        names: extra -> the names of its tree, in order ([""] for a tensor). safetensors sorts
            names, but a tree has the order of the state dictionary in every engine.
        behind: the extras in `arrays`.
        digests: part -> SHA-256 of its content; "" for the weights.
    """

    arrays: list[Any] = field(default_factory=list)
    entries: dict[str, Any] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    behind: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_weights(cls, weights: AnyTree) -> Encoded:
        """The weights, which come first in the parameter list."""
        arrays = [_array(t) for t in weights.values()]
        return cls(arrays, digests={_WEIGHTS: digest_of(arrays)})

    @classmethod
    def of_extra(cls, name: str, value: Extra) -> Encoded:
        """One extra.

        Raises:
            TypeError: it cannot travel; the message names it.
        """
        check_extras({name: value}, {})
        if not isinstance(value, Tensor | dict):
            digests = {name: digest_of([json.dumps(value).encode()])}
            return cls(entries={f"{HEADER}.{name}": value}, digests=digests)
        tree = {"": value} if isinstance(value, Tensor) else value
        names = {name: list(tree)}
        if trees.nbytes(tree) > INLINE_LIMIT:
            arrays = [_array(t) for t in tree.values()]
            return cls(arrays, names=names, behind=[name], digests={name: digest_of(arrays)})
        data = safetensors.torch.save(
            {key: t.detach().cpu().contiguous() for key, t in tree.items()}
        )
        entries = {f"{HEADER}.{name}": data}
        return cls(entries=entries, names=names, digests={name: digest_of([data])})

    @classmethod
    def joined(cls, parts: Iterable[Encoded]) -> Encoded:
        """All of the parts together, in their order."""
        whole = cls()
        for part in parts:
            whole.arrays += part.arrays
            whole.entries |= part.entries
            whole.names |= part.names
            whole.behind += part.behind
            whole.digests |= part.digests
        return whole

    def sealed(self, header: dict[str, Any], weights: AnyTree) -> dict[str, Any]:
        """The dictionary that Flower carries, with the header that `unpack` reads."""
        layout = {
            "names": list(weights),
            "trees": self.names,
            "behind": self.behind,
            "digests": self.digests,
        }
        content = {**header, **layout}
        text = json.dumps({**content, "digest": seal(content)})
        if len(text) > HEADER_LIMIT:
            raise TypeError(
                f"the header of a message has {len(text)} characters; at most {HEADER_LIMIT} travel"
            )
        return {**self.entries, HEADER: text}


def pack(
    weights: AnyTree, extras: Extras, header: dict[str, Any]
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """(parameter list, config or metrics dictionary) of one message.

    Raises:
        TypeError: an extra cannot travel; the message names it.
    """
    parts = (Encoded.of_extra(name, value) for name, value in extras.items())
    encoded = Encoded.joined([Encoded.of_weights(weights), *parts])
    return encoded.arrays, encoded.sealed(header, weights)


def unpack(
    arrays: list[np.ndarray], carried: Mapping[str, Any]
) -> tuple[Tree, Extras, dict[str, Any]]:
    """The inverse of `pack`: (weights, extras, header).

    Raises:
        Rejected: the message is damaged, or not one of fedhet's.
    """
    header = read_header(carried)
    names, tree_names, behind, digests = _layout(header)
    expected = len(names) + sum(len(tree_names[name]) for name in behind)
    if len(arrays) != expected:
        raise Rejected(
            "corrupt", f"the message carries {len(arrays)} arrays but its header names {expected}"
        )
    parts: dict[str, list[Any]] = {_WEIGHTS: arrays[: len(names)]}
    position = len(names)
    for name in behind:
        end = position + len(tree_names[name])
        parts[name] = arrays[position:end]
        position = end
    inline = {
        str(key).removeprefix(f"{HEADER}."): value
        for key, value in carried.items()
        if str(key).startswith(f"{HEADER}.")
    }
    for name, value in inline.items():
        parts[name] = [value if isinstance(value, bytes) else json.dumps(value).encode()]
    _check_digests(parts, digests)
    extras: Extras = {}
    for name, value in inline.items():
        extras[name] = _decode(name, value, tree_names) if isinstance(value, bytes) else value
    for name in behind:
        tensors = map(_tensor, parts[name])
        extras[name] = _unwrap(dict(zip(tree_names[name], tensors, strict=True)))
    weights = dict(zip(names, map(_tensor, parts[_WEIGHTS]), strict=True))
    return weights, extras, {key: header[key] for key in header if key not in _LAYOUT}


def read_header(carried: Any) -> dict[str, Any]:
    """The header of a message, whose digest is right.

    Raises:
        Rejected: there is none, or it is damaged.
    """
    # Flower passes its own kind of mapping, not a dict.
    text = carried.get(HEADER) if isinstance(carried, Mapping) else None
    if not isinstance(text, str):
        raise Rejected("unreadable", f"not a fedhet message: it has no header under {HEADER!r}")
    if len(text) > HEADER_LIMIT:
        raise Rejected(
            "too large", f"the header has {len(text)} characters; at most {HEADER_LIMIT} are read"
        )
    try:
        header = json.loads(text)
        stated = header.pop("digest") if isinstance(header, dict) else None
        intact = isinstance(header, dict) and stated == seal(header)
    except (ValueError, RecursionError, KeyError) as error:
        problem = f"unreadable header: {type(error).__name__}: {error}"
        raise Rejected("unreadable", problem) from error
    if not intact:
        raise Rejected("corrupt", "the header does not have the content that its digest states")
    return header


def read_array(data: bytes) -> np.ndarray:
    """The array in the bytes of a .npy file, which may not claim to be larger than they are.

    Raises:
        Rejected: the bytes are no such file, or the array is not numeric.
    """
    try:
        file = io.BytesIO(data)
        version = np.lib.format.read_magic(file)
        read = _READERS[version]
        shape, fortran_order, dtype = read(file)
        start = file.tell()
        if dtype.kind not in "fiub" or math.prod(shape) * dtype.itemsize != len(data) - start:
            raise ValueError(f"{len(data)} bytes claim to be a {dtype} array of shape {shape}")
        flat = np.frombuffer(data, dtype, offset=start)
        return flat.reshape(shape, order="F" if fortran_order else "C").copy()
    except Exception as error:
        problem = f"unreadable parameters: {type(error).__name__}: {error}"
        raise Rejected("unreadable", problem) from error


def digest_of(pieces: Iterable[np.ndarray | bytes]) -> str:
    """SHA-256 of arrays (type, shape and content) or bytes."""
    digest = hashlib.sha256()
    for piece in pieces:
        if isinstance(piece, bytes):
            digest.update(piece)
            continue
        digest.update(f"{piece.dtype.str}{piece.shape}".encode())
        digest.update(np.ascontiguousarray(piece).data)
    return digest.hexdigest()


def seal(header: Mapping[str, Any]) -> str:
    """The digest of a header, without its own field "digest"."""
    return digest_of([json.dumps(header, sort_keys=True).encode()])


def _layout(
    header: dict[str, Any],
) -> tuple[list[str], dict[str, list[str]], list[str], dict[str, str]]:
    """What the header says about tensors: names, names in trees, extras behind, digests."""
    try:
        names, tree_names = header["names"], header["trees"]
        behind, digests = header["behind"], header["digests"]
    except KeyError as error:
        raise Rejected("unreadable", f"the header lacks {error}") from error
    for what, value in (("names", names), ("behind", behind)):
        if not _is_names(value):
            raise Rejected("unreadable", f"{what} in the header are no list of different names")
    if not isinstance(tree_names, dict) or not all(map(_is_names, tree_names.values())):
        raise Rejected("unreadable", "trees in the header are no lists of different names")
    if not set(behind) <= set(tree_names):
        raise Rejected("unreadable", "the header does not name the tensors of every extra")
    if not isinstance(digests, dict) or not all(isinstance(d, str) for d in digests.values()):
        raise Rejected("unreadable", "digests in the header are no texts")
    return names, tree_names, behind, digests


def _is_names(value: object) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    return len(set(value)) == len(value)


def _check_digests(parts: Mapping[str, list[Any]], digests: Mapping[str, str]) -> None:
    if set(parts) != set(digests):
        raise Rejected("corrupt", "the message does not have the parts that its header lists")
    for name, pieces in parts.items():
        if digest_of(pieces) != digests[name]:
            what = f"extra {name!r}" if name else "the weights"
            raise Rejected("corrupt", f"{what}: the content does not have the digest in the header")


def _array(t: Tensor) -> np.ndarray:
    return t.detach().cpu().numpy()


def _tensor(array: np.ndarray) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array) if array.ndim else array.copy())
    except (TypeError, ValueError) as error:
        problem = f"an array of type {array.dtype} is no tensor"
        raise Rejected("wrong content", problem) from error


def _unwrap(tree: Tree) -> Tensor | Tree:
    return tree[""] if list(tree) == [""] else tree


def _decode(name: str, value: bytes, tree_names: Mapping[str, list[str]]) -> Tensor | Tree:
    try:
        check_header(value[:8])
        tree = safetensors.torch.load(value)
    except Exception as error:
        raise Rejected("corrupt", f"extra {name!r} is damaged: {error}") from error
    keys = tree_names.get(name, [])
    if set(tree) != set(keys):
        raise Rejected(
            "corrupt", f"extra {name!r}: its tensors are not those that the header names"
        )
    return _unwrap({key: tree[key] for key in keys})
