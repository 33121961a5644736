"""The only code that knows how Flower carries messages.

The parameter list holds the slot's weights. Extras ride in Flower's config (down) and metrics (up)
dictionaries: scalars as they are, tensors and trees as safetensors bytes under "fedhet.<name>".
What is too large for one unchunked object rides behind the slot in the parameter list, announced in
the header. The header is JSON under the key "fedhet"."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
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
# bytes of one extra in a config or metrics dictionary; Flower sends those unchunked
INLINE_LIMIT = 32 * 2**20


def _array(t: Tensor) -> np.ndarray:
    return t.detach().cpu().numpy()


Piece = tuple[list[np.ndarray], dict[str, Any], dict[str, list[str]], list[str]]


def _encode(name: str, value: Extra) -> Piece:
    """(arrays behind the slot, dictionary entries, {name: a tree's names}, [name] if it rides
    behind the slot) of one extra."""
    check_extras({name: value}, {})
    if not isinstance(value, Tensor | dict):
        return [], {f"{HEADER}.{name}": value}, {}, []
    tree = {"": value} if isinstance(value, Tensor) else value
    if trees.nbytes(tree) > INLINE_LIMIT:
        return [_array(t) for t in tree.values()], {}, {name: list(tree)}, [name]
    coded = safetensors.torch.save({key: t.detach().cpu().contiguous() for key, t in tree.items()})
    return [], {f"{HEADER}.{name}": coded}, {name: list(tree)}, []


def _seal(
    header: dict[str, Any], weights: AnyTree | None, names: dict[str, list[str]], behind: list[str]
) -> str:
    # A phase without a slot sends None, which an empty parameter list alone would not tell from an
    # empty tree. The names of trees are said because safetensors sorts them, and a tree is in
    # state-dict order in every engine.
    return json.dumps(
        {
            **header,
            "names": None if weights is None else list(weights),
            "trees": names,
            "behind": behind,
        }
    )


def pack(
    weights: AnyTree | None, extras: Extras, header: dict[str, Any]
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """(parameter list, config or metrics dictionary) of one message; TypeError names an extra that
    cannot travel."""
    arrays = [_array(t) for t in (weights or {}).values()]
    more, carried, names, behind = _join(_encode(name, value) for name, value in extras.items())
    return arrays + more, {**carried, HEADER: _seal(header, weights, names, behind)}


def _join(
    pieces: Iterable[tuple[list[Any], dict[str, Any], dict[str, list[str]], list[str]]],
) -> tuple[list[Any], dict[str, Any], dict[str, list[str]], list[str]]:
    arrays: list[Any] = []
    carried: dict[str, Any] = {}
    names: dict[str, list[str]] = {}
    behind: list[str] = []
    for more, entries, said, late in pieces:
        arrays += more
        carried |= entries
        names |= said
        behind += late
    return arrays, carried, names, behind


def unpack(
    arrays: list[np.ndarray], carried: dict[str, Any]
) -> tuple[Tree | None, Extras, dict[str, Any]]:
    """The inverse of `pack`: (weights, extras, header); ValueError where the message is not one of
    ours or damaged."""
    header = read_header(carried)
    names, inside, behind = header.pop("names"), header.pop("trees"), header.pop("behind")
    expected = len(names or []) + sum(len(inside[name]) for name in behind)
    if len(arrays) != expected:
        raise ValueError(
            f"the message carries {len(arrays)} arrays but its header names {expected}"
        )
    tensors = iter(
        [torch.from_numpy(np.ascontiguousarray(a) if a.ndim else a.copy()) for a in arrays]
    )
    weights = None if names is None else {name: next(tensors) for name in names}
    extras: Extras = {}
    for key, value in carried.items():
        if key.startswith(f"{HEADER}."):
            name = key.removeprefix(f"{HEADER}.")
            extras[name] = _decode(name, value, inside[name]) if isinstance(value, bytes) else value
    for name in behind:
        extras[name] = _unwrap({key: next(tensors) for key in inside[name]})
    return weights, extras, header


def read_header(carried: Any) -> dict[str, Any]:
    """The header of a message; ValueError where there is none."""
    # what Flower hands over is no dict
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
    }


class Packer:
    """Packs the messages of one step; a tensor or tree that the cohort shares is packed once."""

    def __init__(self) -> None:
        # The object lies beside its bytes, so that its id cannot be another's.
        self._done: dict[tuple[str, int], tuple[object, Any]] = {}

    def __call__(self, msg: Broadcast) -> tuple[Parameters, dict[str, Any]]:
        weights = self._once("", msg.weights, self._weights) if msg.weights else []
        more, carried, names, behind = _join(
            self._once(name, value, partial(self._extra, name))
            for name, value in msg.extras.items()
        )
        return Parameters(weights + more, "numpy.ndarray"), {
            **carried,
            HEADER: _seal(_header(msg), msg.weights, names, behind),
        }

    def _once(self, name: str, value: Any, make: Callable[[Any], Any]) -> Any:
        if not isinstance(value, Tensor | dict):
            return make(value)
        if (name, id(value)) not in self._done:
            self._done[name, id(value)] = value, make(value)
        return self._done[name, id(value)][1]

    @staticmethod
    def _weights(weights: Tree) -> list[bytes]:
        return ndarrays_to_parameters([_array(t) for t in weights.values()]).tensors

    @staticmethod
    def _extra(
        name: str, value: Extra
    ) -> tuple[list[bytes], dict[str, Any], dict[str, list[str]], list[str]]:
        arrays, entries, names, behind = _encode(name, value)
        return ndarrays_to_parameters(arrays).tensors, entries, names, behind


def fit_ins(msg: Broadcast, packer: Packer) -> FitIns:
    return FitIns(*packer(msg))


def evaluate_ins(msg: Broadcast, packer: Packer) -> EvaluateIns:
    return EvaluateIns(*packer(msg))


def write_broadcast(msg: Broadcast) -> tuple[list[np.ndarray], dict[str, Any]]:
    """What `NumPyClient.fit` is given; the inverse of `read_broadcast`."""
    return pack(msg.weights, msg.extras, _header(msg))


def read_broadcast(arrays: list[np.ndarray], config: dict[str, Any]) -> Broadcast:
    """The client's side of `fit_ins`."""
    weights, extras, header = unpack(arrays, config)
    return Broadcast(
        **{**header, "local": LocalSettings(**header["local"])}, weights=weights, extras=extras
    )


def reply_arrays(reply: Reply) -> tuple[list[np.ndarray], int, dict[str, Any]]:
    """What `NumPyClient.fit` returns for a reply."""
    if isinstance(reply, Failure):
        arrays, metrics = pack(None, {}, {"failure": asdict(reply)})
        return arrays, 0, metrics
    arrays, metrics = pack(
        reply.weights,
        reply.extras,
        {"pid": reply.pid, "metrics": reply.metrics, "keeps": reply.keeps},
    )
    return arrays, reply.num_examples, metrics


def read_reply(msg: Broadcast, reply: tuple[list[np.ndarray], int, dict[str, Any]]) -> Reply:
    """The inverse of `reply_arrays`; whatever cannot be read is a Failure of the client that `msg`
    went to."""
    arrays, num_examples, metrics = reply
    try:
        weights, extras, header = unpack(arrays, metrics)
        signed = header.get("failure", header)["pid"]
        if signed != msg.pid:
            raise ValueError(f"the reply is signed by client {signed}")
        if "failure" in header:
            return Failure(**header["failure"])
        return Update(msg.pid, num_examples, weights, extras, header["metrics"], header["keeps"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return _unreadable(msg, error)


def read_result(msg: Broadcast, res: FitRes | EvaluateRes) -> Reply:
    """`read_reply` from Flower's own types."""
    try:
        arrays = parameters_to_ndarrays(res.parameters) if isinstance(res, FitRes) else []
    except Exception as error:  # noqa: BLE001 -- numpy's reader raises what it likes on damaged bytes
        return _unreadable(msg, error)
    return read_reply(msg, (arrays, res.num_examples, dict(res.metrics)))


def _unreadable(msg: Broadcast, error: Exception) -> Failure:
    return Failure(
        msg.pid, msg.phase, msg.step, f"unreadable reply: {type(error).__name__}: {error}"
    )
