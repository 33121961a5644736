"""How Flower carries messages.

The parameter list holds the slot's weights. Extras travel in Flower's config dictionary (down) and
metrics dictionary (up): scalars as they are, tensors and trees as safetensors bytes under
"fedhet.<name>". An extra above INLINE_LIMIT follows the weights in the parameter list instead, and
the header says so. The header is JSON under the key "fedhet".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import safetensors.torch
import torch
from flwr.common import (
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    Parameters,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from torch import Tensor

from fedhet import trees
from fedhet.messages import (
    Broadcast,
    Extra,
    Extras,
    Failure,
    LocalSettings,
    Reply,
    Update,
    check_extras,
)
from fedhet.trees import AnyTree, Tree

HEADER = "fedhet"
# Bytes of one extra in a config or metrics dictionary, which Flower sends in one piece.
INLINE_LIMIT = 32 * 2**20


@dataclass
class Encoded:
    """Extras as Flower carries them.

    Attributes:
        arrays: what follows the weights in the parameter list.
        entries: what goes into the config or metrics dictionary.
        names: extra -> the names of its tree, in order ([""] for a tensor). safetensors sorts
            names, but a tree has the order of the state dictionary in every engine.
        behind: the extras in `arrays`.
    """

    arrays: list[Any] = field(default_factory=list)
    entries: dict[str, Any] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    behind: list[str] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Iterable[Encoded]) -> Encoded:
        """All of the parts together, in their order."""
        whole = cls()
        for part in parts:
            whole.arrays += part.arrays
            whole.entries |= part.entries
            whole.names |= part.names
            whole.behind += part.behind
        return whole

    def sealed(self, header: dict[str, Any], weights: AnyTree) -> dict[str, Any]:
        """The dictionary that Flower carries, with the header that `unpack` reads."""
        layout = {"names": list(weights), "trees": self.names, "behind": self.behind}
        return {**self.entries, HEADER: json.dumps({**header, **layout})}


def _array(t: Tensor) -> np.ndarray:
    return t.detach().cpu().numpy()


def _encode(name: str, value: Extra) -> Encoded:
    check_extras({name: value}, {})
    if not isinstance(value, Tensor | dict):
        return Encoded(entries={f"{HEADER}.{name}": value})
    tree = {"": value} if isinstance(value, Tensor) else value
    names = {name: list(tree)}
    if trees.nbytes(tree) > INLINE_LIMIT:
        return Encoded([_array(t) for t in tree.values()], names=names, behind=[name])
    data = safetensors.torch.save({key: t.detach().cpu().contiguous() for key, t in tree.items()})
    return Encoded(entries={f"{HEADER}.{name}": data}, names=names)


def pack(
    weights: AnyTree, extras: Extras, header: dict[str, Any]
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """(parameter list, config or metrics dictionary) of one message.

    Raises:
        TypeError: an extra cannot travel; the message names it.
    """
    encoded = Encoded.joined(_encode(name, value) for name, value in extras.items())
    arrays = [_array(t) for t in weights.values()]
    return arrays + encoded.arrays, encoded.sealed(header, weights)


def unpack(
    arrays: list[np.ndarray], carried: dict[str, Any]
) -> tuple[Tree, Extras, dict[str, Any]]:
    """The inverse of `pack`: (weights, extras, header).

    Raises:
        ValueError: the message is damaged, or not one of fedhet's.
    """
    header = read_header(carried)
    names = header.pop("names")
    tree_names = header.pop("trees")
    behind = header.pop("behind")
    if not isinstance(names, list):
        raise ValueError(f"damaged header: the names of the weights are {names!r}")
    expected = len(names) + sum(len(tree_names[name]) for name in behind)
    if len(arrays) != expected:
        raise ValueError(
            f"the message carries {len(arrays)} arrays but its header names {expected}"
        )
    tensors = iter(
        [torch.from_numpy(np.ascontiguousarray(a) if a.ndim else a.copy()) for a in arrays]
    )
    weights = {name: next(tensors) for name in names}
    extras: Extras = {}
    for key, value in carried.items():
        if key.startswith(f"{HEADER}."):
            name = key.removeprefix(f"{HEADER}.")
            if isinstance(value, bytes):
                value = _decode(name, value, tree_names[name])
            extras[name] = value
    for name in behind:
        extras[name] = _unwrap({key: next(tensors) for key in tree_names[name]})
    return weights, extras, header


def read_header(carried: Any) -> dict[str, Any]:
    """The header of a message; ValueError where there is none."""
    # Flower passes its own kind of mapping, not a dict.
    text = carried.get(HEADER) if isinstance(carried, Mapping) else None
    header = json.loads(text) if isinstance(text, str) else None
    if not isinstance(header, dict):
        raise ValueError(f"not a fedhet message: it has no header under {HEADER!r}")
    return header


def _unwrap(tree: Tree) -> Tensor | Tree:
    return tree[""] if list(tree) == [""] else tree


def _decode(name: str, value: bytes, keys: list[str]) -> Tensor | Tree:
    try:
        tree = safetensors.torch.load(value)
    except safetensors.SafetensorError as error:
        raise ValueError(f"extra {name!r} is damaged: {error}") from error
    if set(tree) != set(keys):
        raise ValueError(
            f"extra {name!r} is damaged: it holds {sorted(tree)[:3]}, its header names"
            f" {sorted(keys)[:3]}"
        )
    return _unwrap({key: tree[key] for key in keys})


def _header(msg: Broadcast) -> dict[str, Any]:
    return {
        "phase": msg.phase,
        "step": msg.step,
        "round": msg.round,
        "slot": msg.slot,
        "local": asdict(msg.local),
        "trains": msg.trains,
        "plugins": msg.plugins,
        "pid": msg.pid,
        "version": msg.version,
        "pinned": msg.pinned,
    }


class Packer:
    """Packs the messages of one step; a tensor or tree that the cohort shares is packed once."""

    def __init__(self) -> None:
        # Each object is kept beside its bytes, so that its id cannot be given to another.
        self._packed: dict[tuple[str, int], tuple[object, Any]] = {}

    def __call__(self, msg: Broadcast) -> tuple[Parameters, dict[str, Any]]:
        encoded = Encoded.joined(
            self._once(name, value, partial(self._extra, name))
            for name, value in msg.extras.items()
        )
        weights = self._once("", msg.weights, self._weights) if msg.weights else []
        carried = encoded.sealed(_header(msg), msg.weights)
        return Parameters(weights + encoded.arrays, "numpy.ndarray"), carried

    def _once(self, name: str, value: Any, make: Callable[[Any], Any]) -> Any:
        if not isinstance(value, Tensor | dict):
            return make(value)
        key = name, id(value)
        if key not in self._packed:
            self._packed[key] = value, make(value)
        return self._packed[key][1]

    @staticmethod
    def _weights(weights: Tree) -> list[bytes]:
        return ndarrays_to_parameters([_array(t) for t in weights.values()]).tensors

    @staticmethod
    def _extra(name: str, value: Extra) -> Encoded:
        encoded = _encode(name, value)
        encoded.arrays = ndarrays_to_parameters(encoded.arrays).tensors
        return encoded


def fit_ins(msg: Broadcast, packer: Packer) -> FitIns:
    """The message as what Flower sends to `NumPyClient.fit`."""
    return FitIns(*packer(msg))


def evaluate_ins(msg: Broadcast, packer: Packer) -> EvaluateIns:
    """The message as what Flower sends to `NumPyClient.evaluate`."""
    return EvaluateIns(*packer(msg))


def write_broadcast(msg: Broadcast) -> tuple[list[np.ndarray], dict[str, Any]]:
    """What `NumPyClient.fit` is given; the inverse of `read_broadcast`."""
    return pack(msg.weights, msg.extras, _header(msg))


def read_broadcast(arrays: list[np.ndarray], config: dict[str, Any]) -> Broadcast:
    """The message from what `NumPyClient.fit` is given."""
    weights, extras, header = unpack(arrays, config)
    local = LocalSettings(**header.pop("local"))
    return Broadcast(**header, local=local, weights=weights, extras=extras)


def reply_arrays(reply: Reply) -> tuple[list[np.ndarray], int, dict[str, Any]]:
    """What `NumPyClient.fit` returns for a reply."""
    if isinstance(reply, Failure):
        arrays, metrics = pack({}, {}, {"failure": asdict(reply)})
        return arrays, 0, metrics
    header = {"pid": reply.pid, "metrics": reply.metrics, "keeps": reply.keeps}
    arrays, metrics = pack(reply.weights, reply.extras, header)
    return arrays, reply.num_examples, metrics


def read_reply(msg: Broadcast, reply: tuple[list[np.ndarray], int, dict[str, Any]]) -> Reply:
    """The inverse of `reply_arrays`, for the client that `msg` went to.

    A reply that cannot be read is a Failure of that client.
    """
    arrays, num_examples, carried = reply
    try:
        weights, extras, header = unpack(arrays, carried)
        signed = header.get("failure", header)["pid"]
        if signed != msg.pid:
            raise ValueError(f"the reply is signed by client {signed}")
        if "failure" in header:
            return Failure(**header["failure"])
        metrics = header["metrics"]
        return Update(msg.pid, num_examples, weights, metrics, header["keeps"], extras=extras)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return _unreadable(msg, error)


def read_result(msg: Broadcast, res: FitRes | EvaluateRes) -> Reply:
    """`read_reply` from Flower's own types."""
    try:
        arrays = parameters_to_ndarrays(res.parameters) if isinstance(res, FitRes) else []
    except Exception as error:  # noqa: BLE001 -- numpy's reader raises anything on damaged bytes
        return _unreadable(msg, error)
    return read_reply(msg, (arrays, res.num_examples, dict(res.metrics)))


def _unreadable(msg: Broadcast, error: Exception) -> Failure:
    cause = f"unreadable reply: {type(error).__name__}: {error}"
    return Failure(msg.pid, msg.phase, msg.step, cause)
