"""The messages of a step in Flower's format, in both directions.

The parameter list holds the tensors: first the weights, then each extra that is a tensor or a tree.
The header is JSON under the key "fedhet" of Flower's config dictionary (down) or metrics dictionary
(up). It has the fields of the message, the scalar extras, the names of the tensors, and a digest of
each part and of the header itself. The digests reveal a damaged message. A reply repeats the phase,
step, round and client of the message that it answers, so that an old reply cannot pass for a new
one.

Everything that arrives is hostile until it is checked. A function that reads it raises Rejected and
nothing else.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.client import NumPyClient
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    Parameters,
    ndarrays_to_parameters,
)
from torch import Tensor

from fedhet.core.check import EXACT
from fedhet.core.client.client import FedClient
from fedhet.core.errors import ConfigError, Rejected, clean
from fedhet.core.messages import (
    LOST,
    Broadcast,
    Extras,
    Failure,
    LocalSettings,
    Reply,
    Upload,
    check_extras,
)
from fedhet.core.trees import AnyTree, Tree, as_tree
from fedhet.data.forms import has_form
from fedhet.runs.process import exit_after

HANG_SECONDS = 5.0  # how long a client's process may continue after its deadline
MOST_PINNED = 100  # most earlier rounds for which a message may ask a client to keep its states
REASONS = ("failed", LOST)  # reasons of a failure that a client may report itself
AGREED = "agreed"  # header field with the statistics that the sites have agreed on
ECHO = ("phase", "step", "round", "pid")  # fields that a reply repeats from its message
HEADER = "fedhet"
ARRAY = "fedhet.array."  # followed by a number: an array among the metrics of an evaluation
EXAMPLES = "num-examples"  # key of the number of examples in a reply
HEADER_LIMIT = 2**20  # characters; a ResNet-152 has 40,000
_READERS: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_WEIGHTS = ""  # the name of the weights among the parts; no extra has an empty name
Ins = TypeVar("Ins", FitIns, EvaluateIns)
Part = tuple[list[Any], list[str]]  # arrays, and their digest followed by their names
LARGEST_INTEGER = 2**62
MOST_METRICS = 1000
LONGEST_NAME = 200


class Adapter(NumPyClient):
    """Answers Flower's messages by a method's client, and sets itself as the client's `adapter`.

    It answers Flower's evaluation messages as it answers all other messages.

    Args:
        client: the method's client.
    """

    def __init__(self, client: FedClient) -> None:
        client.adapter = self
        self.client = client

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return self.client.properties

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        msg = read_broadcast(parameters, config)
        # The client stops at its deadline by itself, unless it hangs outside of Python.
        with exit_after(None if msg.deadline is None else msg.deadline + HANG_SECONDS):
            return reply_arrays(msg, self.client.handle(msg))

    def evaluate(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        arrays, examples, metrics = self.fit(parameters, config)
        tensors = ndarrays_to_parameters(arrays).tensors  # Flower has no other place for arrays
        return 0.0, examples, {**metrics, **{f"{ARRAY}{i:06}": t for i, t in enumerate(tensors)}}


# ---- server to client
class MessagePacker:
    """Packs the messages of one step. A tensor or tree that several clients get is packed once.

    Args:
        agreed: the data statistics that the sites have agreed on before the first round. Every
            message includes them, because a client's process may not have seen an earlier message.
            None: there are none.
    """

    def __init__(self, agreed: dict[str, list[float]] | None = None) -> None:
        self._agreed = {} if agreed is None else {AGREED: agreed}
        # Each object is kept with its part, so that Python cannot reuse its id.
        self._packed: dict[int, tuple[object, Part]] = {}

    def __call__(self, msg: Broadcast) -> tuple[list[bytes], dict[str, Any]]:
        return pack(msg.weights, msg.extras, _header(msg) | self._agreed, self._once)

    def _once(self, value: Tensor | AnyTree) -> Part:
        """Return the part of a tensor or tree, with its arrays as bytes."""
        if id(value) not in self._packed:
            arrays, listed = part_of(value)
            self._packed[id(value)] = value, (ndarrays_to_parameters(arrays).tensors, listed)
        return self._packed[id(value)][1]


def fit_ins(msg: Broadcast, packer: MessagePacker, kind: type[Ins] = FitIns) -> Ins:
    """Return the message as Flower's FitIns for `fit`, or as EvaluateIns for `evaluate`."""
    tensors, config = packer(msg)
    return kind(Parameters(tensors, "numpy.ndarray"), config)


def read_broadcast(arrays: list[np.ndarray], config: Mapping[str, Any]) -> Broadcast:
    """Read the message from the arguments of `NumPyClient.fit`; the inverse of a `MessagePacker`.

    Raises:
        Rejected: the message is damaged, or a field of its header is not allowed.
    """
    weights, extras, header = unpack(arrays, config)
    return Broadcast(
        phase=read(header, "phase", str),
        step=read(header, "step", int, low=1),
        round=read(header, "round", int, low=1),
        local=local_settings(read(header, "local", dict)),
        slot=read(header, "slot", str),
        weights=weights,
        trains=read(header, "trains", bool),
        plugins=read(header, "plugins", dict, good=lambda ids: has_form([*ids.values()], [str])),
        pid=read(header, "pid", int, low=0),
        version=read(header, "version", int, low=0),
        deadline=None
        if header.get("deadline") is None
        else read(header, "deadline", float, good=lambda seconds: 0 < seconds < math.inf),
        pinned=read(header, "pinned", list, good=_are_rounds),
        run_id=read(header, "run_id", str, good=partial(re.fullmatch, r"[0-9a-f]{32}")),
        extras=extras,
    )


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
        "deadline": msg.deadline,
        "pinned": msg.pinned,
        "run_id": msg.run_id,
    }


def _are_rounds(values: list[Any]) -> bool:
    return len(values) <= MOST_PINNED and has_form(values, [int]) and min(values, default=0) >= 0


# ---- client to server
def reply_arrays(msg: Broadcast, reply: Reply) -> tuple[list[np.ndarray], int, dict[str, Any]]:
    """Return the reply to `msg` in the form that `NumPyClient.fit` returns."""
    header: dict[str, Any] = {name: getattr(msg, name) for name in ECHO}
    if isinstance(reply, Failure):
        header |= {"failure": reply.cause, "reason": reply.reason}
        arrays, carried = pack({}, {}, header)
        return arrays, 0, carried
    header |= {"n": reply.num_examples, "metrics": reply.metrics, "keeps": reply.keeps}
    arrays, carried = pack(reply.weights, reply.extras, header)
    return arrays, reply.num_examples, carried


def read_reply(msg: Broadcast, reply: tuple[Iterable[np.ndarray], int, Mapping[str, Any]]) -> Reply:
    """Read a reply; the inverse of `reply_arrays`. A refused reply becomes the client's Failure."""
    try:
        return _read_reply(msg, *reply)
    except Rejected as error:
        return refusal(msg, error)


def _read_reply(
    msg: Broadcast, arrays: Iterable[np.ndarray], num_examples: int, carried: Mapping[str, Any]
) -> Reply:
    weights, extras, header = unpack(list(arrays), carried)
    for name in ECHO:
        echoed, sent = header.get(name), getattr(msg, name)
        if type(echoed) is not type(sent) or echoed != sent:
            raise Rejected(
                "replayed",
                f"the reply is to another message: its {name} is {clean(repr(echoed), 50)}, but the"
                f" message has {sent!r}",
            )
    if "failure" in header:
        cause, reason = read(header, "failure", str), read(header, "reason", str)
        if reason not in REASONS:
            raise Rejected(
                "unreadable",
                f"the reason in the header is {clean(repr(reason), 50)}; expected one of"
                f" {', '.join(REASONS)}",
            )
        return Failure(msg.pid, msg.phase, msg.step, cause, reason)
    if header.get("n") != num_examples:
        raise Rejected("corrupt", "num_examples differs from the number in the header")
    return Upload(
        msg.pid,
        read(header, "n", int, low=0),
        weights,
        metrics(read(header, "metrics", dict)),
        read(header, "keeps", bool),
        extras=extras,
    )


def read_result(msg: Broadcast, res: FitRes | EvaluateRes, limit: int) -> Reply:
    """Read a reply from the types of Flower's classic API, by `read_arrays`.

    If the reply reports a failure, read only the failure.

    Args:
        msg, limit: see `read_arrays`.
        res: the client's result.
    """
    status = res.status
    failed = () if status.code is Code.OK else (status.code.name, status.message)
    carried = {**res.metrics, EXAMPLES: res.num_examples}
    if isinstance(res, FitRes):
        return read_arrays(msg, res.parameters.tensors, carried, limit, failed)
    tensors = [carried.pop(key) for key in sorted(carried) if key.startswith(ARRAY)]
    return read_arrays(msg, tensors, carried, limit, failed)


def read_arrays(
    msg: Broadcast,
    tensors: list[bytes],
    carried: dict[str, Any],
    limit: int,
    failed: tuple[str, ...] = (),
) -> Reply:
    """Read a reply by `read_reply` from arrays that are still bytes.

    Args:
        msg: the message that was sent.
        tensors: the arrays, as the bytes of .npy files.
        carried: the named values that came with them, such as the header and number of examples.
        limit: a reply with more bytes is refused unread.
        failed: if Flower reports that there is no reply, the texts that say why; else ().
    """
    size = _size([*tensors, *carried, *carried.values(), *failed])
    if size > limit:
        problem = f"the reply has {size} bytes; at most {limit} are read"
        return refusal(msg, Rejected("too large", problem))
    if failed:
        return Failure(msg.pid, msg.phase, msg.step, ": ".join(map(clean, failed)), "no reply")
    return read_reply(msg, (map(read_array, tensors), carried.pop(EXAMPLES, 0), carried))


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 8


def refusal(msg: Broadcast, error: Rejected) -> Failure:
    """Return the failure of a client after the server has refused its reply to `msg`."""
    return Failure(msg.pid, msg.phase, msg.step, str(error), error.reason)


# ---- weights and extras
def part_of(value: Tensor | AnyTree) -> Part:
    """Return the arrays of a tensor or a tree, and their list in the header: digest, then names.

    A tree's names have the same order in every engine.
    """
    tree = as_tree(value)
    arrays = [t.detach().cpu().numpy() for t in tree.values()]
    return arrays, [digest_of(arrays), *tree]


def pack(
    weights: AnyTree,
    extras: Extras,
    header: dict[str, Any],
    part: Callable[[Tensor | AnyTree], Part] = part_of,
) -> tuple[list[Any], dict[str, Any]]:
    """Return (parameter list, config or metrics dictionary) of one message.

    Args:
        weights, extras: the content of the message.
        header: its other fields.
        part: `part_of`, or a cached version of it.

    Raises:
        TypeError: an extra has a type that cannot be sent; the message names it.
    """
    check_extras(extras, {})
    large = {name: value for name, value in extras.items() if isinstance(value, Tensor | dict)}
    parts = {name: part(value) for name, value in {_WEIGHTS: weights, **large}.items()}
    content = {
        **header,
        "parts": {name: listed for name, (_, listed) in parts.items()},
        "scalars": {name: value for name, value in extras.items() if name not in large},
    }
    text = json.dumps({**content, "digest": seal(content)})
    if len(text) > HEADER_LIMIT:
        raise TypeError(
            f"the header of a message has {len(text)} characters; at most {HEADER_LIMIT} are sent"
        )
    return [array for arrays, _ in parts.values() for array in arrays], {HEADER: text}


def unpack(
    arrays: list[np.ndarray], carried: Mapping[str, Any]
) -> tuple[Tree, Extras, dict[str, Any]]:
    """Return (weights, extras, header) of one message; the inverse of `pack`.

    Raises:
        Rejected: the message is damaged, or not from fedhet.
    """
    header = read_header(carried)
    parts, extras = _take_parts(header)
    expected = sum(len(names) for _, *names in parts.values())
    if len(arrays) != expected:
        raise Rejected(
            "corrupt", f"the message has {len(arrays)} arrays, but its header names {expected}"
        )
    rest, weights = iter(arrays), dict[str, Tensor]()
    for name, (digest, *names) in parts.items():
        content = list(islice(rest, len(names)))
        if digest_of(content) != digest:
            part = f"extra {name!r}" if name else "the weights"
            raise Rejected("corrupt", f"{part}: the content does not match the header's digest")
        tree = dict(zip(names, map(_tensor, content), strict=True))
        if name == _WEIGHTS:
            weights = tree
        else:
            extras[name] = tree[""] if names == [""] else tree
    return weights, extras, header


def read_header(carried: Any) -> dict[str, Any]:
    """Read the header of a message, and check its digest.

    Raises:
        Rejected: the header is missing or damaged.
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
        raise Rejected("corrupt", "the header does not match its own digest")
    return header


def read_array(data: bytes) -> np.ndarray:
    """Return the array that the bytes of a .npy file hold.

    Raises:
        Rejected: the bytes are not such a file, the array is not numeric, or its type and shape
            need more or fewer bytes than there are.
    """
    try:
        file = io.BytesIO(data)
        shape, fortran_order, dtype = _READERS[np.lib.format.read_magic(file)](file)
        start = file.tell()
        if dtype.kind not in "fiub" or math.prod(shape) * dtype.itemsize != len(data) - start:
            raise ValueError(f"{len(data)} bytes claim to be a {dtype} array of shape {shape}")
        flat = np.frombuffer(data, dtype, offset=start)
        return flat.reshape(shape, order="F" if fortran_order else "C").copy()
    except Exception as error:
        problem = f"unreadable parameters: {type(error).__name__}: {error}"
        raise Rejected("unreadable", problem) from error


def digest_of(arrays: Iterable[np.ndarray]) -> str:
    """Return the SHA-256 of arrays: their types, shapes and content."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def seal(header: Mapping[str, Any]) -> str:
    """Return the digest of a header, which is computed without the field "digest"."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _take_parts(header: dict[str, Any]) -> tuple[dict[str, list[str]], Extras]:
    """Take the parts (as `part_of` lists them) and the scalar extras out of the header."""
    parts, scalars = header.pop("parts", None), header.pop("scalars", None)
    good = has_form([parts], [{str: [str]}]) and all(parts.values()) and _WEIGHTS in parts
    good = good and all(len({*names}) == len(names) for _, *names in parts.values())
    good = good and isinstance(scalars, dict) and not scalars.keys() & parts.keys()
    if not good or not {type(value) for value in scalars.values()} <= {bool, int, float, str}:
        raise Rejected(
            "unreadable",
            "the header's parts must map each name to a list [digest, different tensor names ...],"
            " and its scalars must map other names to bool, int, float or str",
        )
    return parts, scalars


def _tensor(array: np.ndarray) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array) if array.ndim else array.copy())
    except (TypeError, ValueError) as error:
        problem = f"an array of type {array.dtype} cannot be a tensor"
        raise Rejected("wrong content", problem) from error


# ---- single fields of a header
def read(
    header: Mapping[str, Any],
    name: str,
    kind: type[Any],
    low: int | None = None,
    good: Callable[[Any], object] | None = None,
) -> Any:
    """Return the field `name`. It must have exactly this type, not a subclass.

    Args:
        header: the header.
        name: the field.
        kind: its type.
        low: for an int, the smallest value allowed; the largest is LARGEST_INTEGER.
        good: a function that returns whether a value of this type is allowed.

    Raises:
        Rejected: the field is missing, of another type, or not allowed.
    """
    value: Any = header.get(name)
    if type(value) is not kind:
        raise Rejected("unreadable", f"{name} in the header is not a {kind.__name__}")
    outside = low is not None and not low <= value <= LARGEST_INTEGER
    if outside or (good and not good(value)):
        raise Rejected(
            "unreadable", f"{name} in the header is {clean(repr(value), 50)}, which is not allowed"
        )
    return value


def metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Check metrics by name, and return them: numbers that may be infinite, but not NaN.

    Raises:
        Rejected: there are too many, or one of them is not such a number.
    """
    if len(values) > MOST_METRICS:
        raise Rejected("wrong content", f"{len(values)} metrics; at most {MOST_METRICS} are read")
    for name, value in values.items():
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise Rejected(
                "wrong content",
                f"the name of a metric is {clean(name, 50)!r}; expected at most {LONGEST_NAME}"
                " printable characters",
            )
        whole = type(value) in (bool, int) and abs(value) <= EXACT
        if not whole and (type(value) is not float or math.isnan(value)):
            shown = clean(repr(value), 50)
            raise Rejected("wrong content", f"metric {name!r} is {shown}; a number is expected")
    return dict(values)


def local_settings(values: Mapping[str, Any]) -> LocalSettings:
    """Return the settings of local training.

    Raises:
        Rejected: a setting is missing, unknown, of another type or out of range.
    """
    names = {entry.name for entry in fields(LocalSettings)}
    if set(values) != names:
        raise Rejected("unreadable", f"the settings of local training must be {sorted(names)}")
    try:
        return LocalSettings(**values)
    except ConfigError as error:
        raise Rejected("unreadable", clean(f"local training: {error}")) from error
