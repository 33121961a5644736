"""The messages of a step as Flower carries them, in both directions.

encoding.py has the encoding of weights and extras. Here are the headers, which say what a message
is: every field is checked when it arrives. A reply repeats the phase, the step and the round of the
message that it answers, so that an old reply cannot be taken for a new one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.client import NumPyClient
from flwr.common import (
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    Parameters,
    ndarrays_to_parameters,
)
from torch import Tensor

from fedhet.core.client import FedClient
from fedhet.core.errors import Rejected, clean
from fedhet.core.messages import LOST, Broadcast, Extra, Failure, Reply, Update
from fedhet.core.trees import Tree
from fedhet.flower.encoding import Encoded, pack, read_array, read_header, unpack
from fedhet.flower.fields import local_settings, metrics, read, run_id, seconds
from fedhet.flower.telling import told
from fedhet.process import exit_after

log = logging.getLogger("fedhet")
HANG_SECONDS = 5.0  # after its deadline, a client's process may take so long to end the work
MOST_PINNED = 100  # rounds whose state a client is asked to keep
REASONS = ("failed", LOST)  # of a failure that a client reports itself
AGREED = "agreed"  # in the header of a message
ECHO = ("phase", "step", "round", "pid")  # what a reply repeats of the message that it answers


class WireClient(NumPyClient):
    """A client of Flower that serves evaluation messages as it serves the others, in `fit`.

    Attributes:
        observe: is told of each message, its reply, and the seconds that it took; or None.
        paths: the paths in the node config of a machine whose folders the server may not learn;
            None where the node is simulated.
    """

    observe: Callable[[Broadcast, Reply, float], None] | None = None
    paths: Collection[Path] | None = None

    def handle(self, msg: Broadcast) -> Reply:
        """Serve a message."""
        raise NotImplementedError

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        began = time.perf_counter()
        msg = read_broadcast(parameters, config)
        # At the deadline the work ends by itself, unless it hangs outside of Python.
        with exit_after(None if msg.deadline is None else msg.deadline + HANG_SECONDS):
            reply = self._told(self.handle(msg))
            result = reply_arrays(msg, reply)
        if self.observe:
            self.observe(msg, reply, time.perf_counter() - began)
        return result

    def evaluate(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        _, examples, metrics = self.fit(parameters, config)
        return 0.0, examples, metrics

    def _told(self, reply: Reply) -> Reply:
        """The reply without what the server may not learn, which is logged here."""
        if self.paths is None or isinstance(reply, Update):
            return reply
        log.error("client %d: %s", reply.pid, clean(reply.cause))
        return replace(reply, cause=told(reply.cause, self.paths))


class Adapter(WireClient):
    """Serves Flower's messages by a method's client, to which it is attached.

    Args:
        client: the client.
    """

    def __init__(self, client: FedClient) -> None:
        client.adapter = self
        self._client = client

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return self._client.properties

    def handle(self, msg: Broadcast) -> Reply:
        return self._client.handle(msg)


# ---- server to client
class MessagePacker:
    """Packs the messages of one step; a tensor or tree that the cohort shares is packed once.

    Args:
        agreed: what the sites have agreed on before the first round, which every message repeats,
            because a client's process knows nothing of an earlier one. None: nothing.
    """

    def __init__(self, agreed: dict[str, list[float]] | None = None) -> None:
        self._agreed = {} if agreed is None else {AGREED: agreed}
        # Each object is kept beside its bytes, so that its id cannot be given to another.
        self._packed: dict[tuple[str, int], tuple[object, Encoded]] = {}

    def __call__(self, msg: Broadcast) -> tuple[Parameters, dict[str, Any]]:
        parts = [self._once("", msg.weights, self._weights)]
        for name, value in msg.extras.items():
            parts.append(self._once(name, value, partial(self._extra, name)))
        encoded = Encoded.joined(parts)
        header = _header(msg) | self._agreed
        return Parameters(encoded.arrays, "numpy.ndarray"), encoded.sealed(header, msg.weights)

    def _once(self, name: str, value: Any, make: Callable[[Any], Encoded]) -> Encoded:
        if not isinstance(value, Tensor | dict):
            return make(value)
        key = name, id(value)
        if key not in self._packed:
            self._packed[key] = value, make(value)
        return self._packed[key][1]

    @staticmethod
    def _weights(weights: Tree) -> Encoded:
        return _as_bytes(Encoded.of_weights(weights))

    @staticmethod
    def _extra(name: str, value: Extra) -> Encoded:
        return _as_bytes(Encoded.of_extra(name, value))


def _as_bytes(encoded: Encoded) -> Encoded:
    encoded.arrays = ndarrays_to_parameters(encoded.arrays).tensors
    return encoded


def fit_ins(msg: Broadcast, packer: MessagePacker) -> FitIns:
    """The message as what Flower sends to `NumPyClient.fit`."""
    return FitIns(*packer(msg))


def evaluate_ins(msg: Broadcast, packer: MessagePacker) -> EvaluateIns:
    """The message as what Flower sends to `NumPyClient.evaluate`."""
    return EvaluateIns(*packer(msg))


def write_broadcast(msg: Broadcast) -> tuple[list[np.ndarray], dict[str, Any]]:
    """What `NumPyClient.fit` is given; the inverse of `read_broadcast`."""
    return pack(msg.weights, msg.extras, _header(msg))


def read_broadcast(arrays: list[np.ndarray], config: Mapping[str, Any]) -> Broadcast:
    """The message from what `NumPyClient.fit` is given.

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
        plugins=_texts(read(header, "plugins", dict)),
        pid=read(header, "pid", int, low=0),
        version=read(header, "version", int, low=0),
        deadline=seconds(header.get("deadline")),
        pinned=_rounds(read(header, "pinned", list)),
        run_id=run_id(header.get("run_id")),
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


def _texts(value: dict[str, Any]) -> dict[str, str]:
    if not all(isinstance(text, str) for text in value.values()):
        raise Rejected("unreadable", "the plug-ins in the header are no texts")
    return value


def _rounds(values: list[Any]) -> list[int]:
    if len(values) > MOST_PINNED or not all(type(n) is int and n >= 0 for n in values):
        raise Rejected("unreadable", "the pinned rounds in the header are no short list of rounds")
    return values


def agreed(carried: Mapping[str, Any]) -> Any:
    """What a message says that the sites have agreed on, unchecked; None if it says nothing.

    Raises:
        Rejected: the header is damaged.
    """
    return read_header(carried).get(AGREED)


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


def read_reply(msg: Broadcast, reply: tuple[list[np.ndarray], int, Mapping[str, Any]]) -> Reply:
    """The inverse of `reply_arrays`. A reply that is refused is a Failure of that client."""
    try:
        return _read_reply(msg, *reply)
    except Rejected as error:
        return refusal(msg, error)


def _read_reply(
    msg: Broadcast, arrays: list[np.ndarray], num_examples: int, carried: Mapping[str, Any]
) -> Reply:
    weights, extras, header = unpack(arrays, carried)
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
    return Update(
        msg.pid,
        read(header, "n", int, low=0),
        weights,
        metrics(read(header, "metrics", dict)),
        read(header, "keeps", bool),
        extras=extras,
    )


def read_result(msg: Broadcast, res: FitRes | EvaluateRes, limit: int) -> Reply:
    """`read_reply` from Flower's own types.

    Args:
        msg: the message that was sent.
        res: what the client returned.
        limit: the number of bytes above which a reply is refused unread.
    """
    tensors = res.parameters.tensors if isinstance(res, FitRes) else []
    size = sum(map(len, tensors)) + sum(map(_size, res.metrics.values()))
    if size > limit:
        problem = f"the reply has {size} bytes; at most {limit} are read"
        return refusal(msg, Rejected("too large", problem))
    try:
        arrays = [read_array(data) for data in tensors]
    except Rejected as error:
        return refusal(msg, error)
    return read_reply(msg, (arrays, res.num_examples, dict(res.metrics)))


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else 8


def refusal(msg: Broadcast, error: Rejected) -> Failure:
    """The failure of the client whose reply to `msg` is refused."""
    return Failure(msg.pid, msg.phase, msg.step, str(error), error.reason)


def sender(carried: Any) -> int:
    """The client that has signed a reply.

    Raises:
        Rejected: the header is damaged.
    """
    pid: int = read(read_header(carried), "pid", int, low=0)
    return pid
