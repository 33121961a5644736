"""The messages of a step as Flower carries them, in both directions.

The parameter list holds the tensors: those of the weights, then those of each extra that is a
tensor or a tree. The header is JSON under the key "fedhet" of Flower's config dictionary (down) or
metrics dictionary (up): what the message is, the other extras, the names of the tensors, and a
digest of each part and of itself, so that a damaged message is noticed. A reply repeats the phase,
the step and the round of the message that it answers, so that an old reply cannot be taken for a
new one.

Whatever arrives is hostile until it is checked: what reads it raises Rejected and nothing else.
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
from fedhet.core.trees import AnyTree, Tree
from fedhet.data.forms import has_form
from fedhet.runs.process import exit_after

HANG_SECONDS = 5.0  # after its deadline, a client's process may take so long to end the work
MOST_PINNED = 100  # rounds whose state a client is asked to keep
REASONS = ("failed", LOST)  # of a failure that a client reports itself
AGREED = "agreed"  # in the header of a message
ECHO = ("phase", "step", "round", "pid")  # what a reply repeats of the message that it answers
HEADER = "fedhet"
ARRAY = "fedhet.array."  # and a number: an array among the metrics of an evaluation
EXAMPLES = "num-examples"  # with what a reply carries
HEADER_LIMIT = 2**20  # characters; a ResNet-152 has 40,000
_READERS: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_WEIGHTS = ""  # the name of the weights among the parts; no extra has an empty name
Ins = TypeVar("Ins", FitIns, EvaluateIns)
Part = tuple[list[Any], list[str]]  # arrays, and their digest followed by their names
LONGEST_INTEGER = 2**62
MOST_METRICS = 1000
LONGEST_NAME = 200


class Adapter(NumPyClient):
    """Serves Flower's messages by a method's client, to which it is attached.

    Flower's messages of an evaluation are served as the others.

    Args:
        client: the client.
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
        # At the deadline the work ends by itself, unless it hangs outside of Python.
        with exit_after(None if msg.deadline is None else msg.deadline + HANG_SECONDS):
            return reply_arrays(msg, self.client.handle(msg))

    def evaluate(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        arrays, examples, metrics = self.fit(parameters, config)
        tensors = ndarrays_to_parameters(arrays).tensors  # for which Flower has no other place
        return 0.0, examples, {**metrics, **{f"{ARRAY}{i:06}": t for i, t in enumerate(tensors)}}


# ---- server to client
class MessagePacker:
    """Packs the messages of one step; a tensor or tree that the cohort shares is packed once.

    Args:
        agreed: what the sites have agreed on before the first round, which every message repeats,
            because a client's process knows nothing of an earlier one. None: nothing.
    """

    def __init__(self, agreed: dict[str, list[float]] | None = None) -> None:
        self._agreed = {} if agreed is None else {AGREED: agreed}
        # Each object is kept beside its part, so that its id cannot be given to another.
        self._packed: dict[int, tuple[object, Part]] = {}

    def __call__(self, msg: Broadcast) -> tuple[list[bytes], dict[str, Any]]:
        return pack(msg.weights, msg.extras, _header(msg) | self._agreed, self._once)

    def _once(self, value: Tensor | AnyTree) -> Part:
        """The part, with arrays as bytes."""
        if id(value) not in self._packed:
            arrays, listed = part_of(value)
            self._packed[id(value)] = value, (ndarrays_to_parameters(arrays).tensors, listed)
        return self._packed[id(value)][1]


def fit_ins(msg: Broadcast, packer: MessagePacker, kind: type[Ins] = FitIns) -> Ins:
    """The message as what Flower sends to `NumPyClient.fit`, or as EvaluateIns to `evaluate`."""
    tensors, config = packer(msg)
    return kind(Parameters(tensors, "numpy.ndarray"), config)


def read_broadcast(arrays: list[np.ndarray], config: Mapping[str, Any]) -> Broadcast:
    """The message from what `NumPyClient.fit` is given; the inverse of a `MessagePacker`.

    Raises:
        Rejected: the message is damaged, or a field of its header is not what it must be.
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
        plugins=read(header, "plugins", dict, good=lambda of: has_form([*of.values()], [str])),
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
    """What `NumPyClient.fit` returns for the reply to `msg`."""
    header: dict[str, Any] = {name: getattr(msg, name) for name in ECHO}
    if isinstance(reply, Failure):
        header |= {"failure": reply.cause, "reason": reply.reason}
        arrays, carried = pack({}, {}, header)
        return arrays, 0, carried
    header |= {"n": reply.num_examples, "metrics": reply.metrics, "keeps": reply.keeps}
    arrays, carried = pack(reply.weights, reply.extras, header)
    return arrays, reply.num_examples, carried


def read_reply(msg: Broadcast, reply: tuple[Iterable[np.ndarray], int, Mapping[str, Any]]) -> Reply:
    """The inverse of `reply_arrays`. A reply that is refused is a Failure of that client."""
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
                f"the reply is to another message: its {name} is {clean(repr(echoed), 50)},"
                f" that of the message {sent!r}",
            )
    if "failure" in header:
        cause, reason = read(header, "failure", str), read(header, "reason", str)
        if reason not in REASONS:
            raise Rejected("unreadable", f"the reason in the header is {clean(repr(reason), 50)}")
        return Failure(msg.pid, msg.phase, msg.step, cause, reason)
    if header.get("n") != num_examples:
        raise Rejected("corrupt", "num_examples is not the number in the header")
    return Upload(
        msg.pid,
        read(header, "n", int, low=0),
        weights,
        metrics(read(header, "metrics", dict)),
        read(header, "keeps", bool),
        extras=extras,
    )


def read_result(msg: Broadcast, res: FitRes | EvaluateRes, limit: int) -> Reply:
    """`read_arrays` from the types of Flower's classic API.

    Of a reply that says that the client has failed, nothing is read but that.

    Args:
        msg, limit: as for `read_arrays`.
        res: what the client returned.
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
    """`read_reply` from what has arrived.

    Args:
        msg: the message that was sent.
        tensors: the arrays, unread.
        carried: what came with them, the number of examples among it.
        limit: the number of bytes above which a reply is refused unread.
        failed: the parts of the reason, where Flower says that there is no reply.
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
    """The failure of the client whose reply to `msg` is refused."""
    return Failure(msg.pid, msg.phase, msg.step, str(error), error.reason)


# ---- weights and extras
def part_of(value: Tensor | AnyTree) -> Part:
    """The arrays of a tensor or a tree, and what the header says of them: digest and names.

    A tree has the order of its names in every engine.
    """
    tree = {"": value} if isinstance(value, Tensor) else value
    arrays = [t.detach().cpu().numpy() for t in tree.values()]
    return arrays, [digest_of(arrays), *tree]


def pack(
    weights: AnyTree,
    extras: Extras,
    header: dict[str, Any],
    part: Callable[[Tensor | AnyTree], Part] = part_of,
) -> tuple[list[Any], dict[str, Any]]:
    """(parameter list, config or metrics dictionary) of one message.

    Args:
        weights, extras: what it carries.
        header: what it is.
        part: `part_of`, or what remembers its results.

    Raises:
        TypeError: an extra cannot travel; the message names it.
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
            f"the header of a message has {len(text)} characters; at most {HEADER_LIMIT} travel"
        )
    return [array for arrays, _ in parts.values() for array in arrays], {HEADER: text}


def unpack(
    arrays: list[np.ndarray], carried: Mapping[str, Any]
) -> tuple[Tree, Extras, dict[str, Any]]:
    """The inverse of `pack`: (weights, extras, header).

    Raises:
        Rejected: the message is damaged, or not one of fedhet's.
    """
    header = read_header(carried)
    parts, extras = _layout(header)
    expected = sum(len(names) for _, *names in parts.values())
    if len(arrays) != expected:
        raise Rejected(
            "corrupt", f"the message carries {len(arrays)} arrays but its header names {expected}"
        )
    rest, weights = iter(arrays), dict[str, Tensor]()
    for name, (digest, *names) in parts.items():
        pieces = list(islice(rest, len(names)))
        if digest_of(pieces) != digest:
            what = f"extra {name!r}" if name else "the weights"
            raise Rejected("corrupt", f"{what}: the content does not have the digest in the header")
        tree = dict(zip(names, map(_tensor, pieces), strict=True))
        if name == _WEIGHTS:
            weights = tree
        else:
            extras[name] = tree[""] if names == [""] else tree
    return weights, extras, header


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
        reader = _READERS[version]
        shape, fortran_order, dtype = reader(file)
        start = file.tell()
        if dtype.kind not in "fiub" or math.prod(shape) * dtype.itemsize != len(data) - start:
            raise ValueError(f"{len(data)} bytes claim to be a {dtype} array of shape {shape}")
        flat = np.frombuffer(data, dtype, offset=start)
        return flat.reshape(shape, order="F" if fortran_order else "C").copy()
    except Exception as error:
        problem = f"unreadable parameters: {type(error).__name__}: {error}"
        raise Rejected("unreadable", problem) from error


def digest_of(pieces: Iterable[np.ndarray]) -> str:
    """SHA-256 of arrays: type, shape and content."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(f"{piece.dtype.str}{piece.shape}".encode())
        digest.update(np.ascontiguousarray(piece).data)
    return digest.hexdigest()


def seal(header: Mapping[str, Any]) -> str:
    """The digest of a header, without its own field "digest"."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _layout(header: dict[str, Any]) -> tuple[dict[str, list[str]], Extras]:
    """Take from the header its parts, as `part_of` lists them, and the extras in it."""
    parts, scalars = header.pop("parts", None), header.pop("scalars", None)
    good = has_form([parts], [{str: [str]}]) and all(parts.values()) and _WEIGHTS in parts
    good = good and all(len({*names}) == len(names) for _, *names in parts.values())
    good = good and isinstance(scalars, dict) and not scalars.keys() & parts.keys()
    if not good or not {type(value) for value in scalars.values()} <= {bool, int, float, str}:
        raise Rejected(
            "unreadable",
            "parts and scalars in the header are no lists of a digest and different names, and no"
            " values by name",
        )
    return parts, scalars


def _tensor(array: np.ndarray) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array) if array.ndim else array.copy())
    except (TypeError, ValueError) as error:
        problem = f"an array of type {array.dtype} is no tensor"
        raise Rejected("wrong content", problem) from error


# ---- single fields of a header
def read(
    header: Mapping[str, Any],
    name: str,
    kind: type[Any],
    low: int | None = None,
    good: Callable[[Any], object] | None = None,
) -> Any:
    """The field `name`, which must be exactly of this type.

    Args:
        header: the header.
        name: the field.
        kind: its type.
        low: what an int must be at least.
        good: whether a value of this type is allowed.

    Raises:
        Rejected: it is missing, of another type, or not allowed.
    """
    value: Any = header.get(name)
    if type(value) is not kind:
        raise Rejected("unreadable", f"{name} in the header is no {kind.__name__}")
    outside = low is not None and not low <= value <= LONGEST_INTEGER
    if outside or (good and not good(value)):
        raise Rejected("unreadable", f"{name} in the header is {clean(repr(value), 50)}")
    return value


def metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Metrics by name: exactly floats. They may be infinite, but not NaN.

    Raises:
        Rejected: there are too many, or one of them is no such number.
    """
    if len(values) > MOST_METRICS:
        raise Rejected("wrong content", f"{len(values)} metrics; at most {MOST_METRICS} are read")
    for name, value in values.items():
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise Rejected("wrong content", f"the name of a metric is {clean(name, 50)!r}")
        whole = type(value) in (bool, int) and abs(value) <= EXACT
        if not whole and (type(value) is not float or math.isnan(value)):
            shown = clean(repr(value), 50)
            raise Rejected("wrong content", f"metric {name!r} is {shown}; a number is expected")
    return dict(values)


def local_settings(values: Mapping[str, Any]) -> LocalSettings:
    """The settings of local training.

    Raises:
        Rejected: one is missing, unknown, of another type or out of range.
    """
    names = {entry.name for entry in fields(LocalSettings)}
    if set(values) != names:
        raise Rejected("unreadable", f"the settings of local training are not {sorted(names)}")
    try:
        return LocalSettings(**values)
    except ConfigError as error:
        raise Rejected("unreadable", clean(f"local training: {error}")) from error
