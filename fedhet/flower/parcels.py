"""All records of a message as one, which Flower carries in few objects.

Flower sends each record, each array and each chunk of an array as an object of its own, with a
request at every station between the server's app and the client's. A message of a small model has
about 15 objects, a parcel 3; the arrays of a large one are a single array, which Flower divides
into chunks as ever. Parcels travel between the grid (server.py) and `open_parcel` in the client
app. Nobody else sees them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from google.protobuf.message import DecodeError

from fedhet.core.errors import Rejected, clean

PARCEL = "fedhet.parcel"  # the record that stands for the others
DATA = "fedhet.parcel.data"  # the record with the content of large arrays
INLINE_BYTES = 2**18  # of arrays that travel in the parcel itself
KINDS = {"array": ArrayRecord, "config": ConfigRecord, "metric": MetricRecord}
NAMES = {record: kind for kind, record in KINDS.items()}
# What Flower raises for bytes that are not what its SuperNode should have sent.
UNDECODABLE = (
    ArithmeticError,
    AttributeError,
    DecodeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class Parcels:
    """Makes parcels of messages; the large arrays that several have in common are joined once."""

    def __init__(self) -> None:
        # What was joined is kept beside the result, so that its ids cannot be given to others.
        self._joined: dict[tuple[int, ...], tuple[list[bytes], Array]] = {}

    def __call__(self, content: RecordDict) -> RecordDict:
        """The records as a parcel: a line of JSON, and behind it what they have in bytes."""
        arrays: list[bytes] = []
        inline: list[bytes] = []

        def put(value: Any) -> Any:
            if isinstance(value, Array):
                arrays.append(value.data)
                return [value.dtype, value.shape, value.stype, len(value.data)]
            inline.append(value)
            return {"bytes": len(value)}

        tree = [[name, NAMES[type(one)], list(one.items())] for name, one in content.items()]
        line = json.dumps(tree, default=put, separators=(",", ":")).encode()
        large = sum(map(len, arrays)) > INLINE_BYTES
        records = b"".join([line, b"\n", *inline, *([] if large else arrays)])
        parcel = RecordDict({PARCEL: ConfigRecord({"records": records})})
        if large:
            parcel[DATA] = joined = ArrayRecord()  # which would copy what it is made of
            joined["data"] = self._join(arrays)
        return parcel

    def _join(self, data: list[bytes]) -> Array:
        key = tuple(map(id, data))
        if key not in self._joined:
            joined = b"".join(data)
            self._joined[key] = data, Array("uint8", (len(joined),), PARCEL, joined)
        return self._joined[key][1]


def opened(content: RecordDict) -> RecordDict:
    """The records of a parcel; of records that are no parcel, these themselves.

    Raises:
        Rejected: the parcel is damaged.
    """
    if PARCEL not in content:
        return content
    try:
        return _opened(content)
    except UNDECODABLE as error:
        problem = f"unreadable parcel: {type(error).__name__}: {clean(str(error))}"
        raise Rejected("unreadable", problem) from error


def _opened(content: RecordDict) -> RecordDict:
    config = content.config_records[PARCEL]
    if set(config) != {"records"} or not set(content) <= {PARCEL, DATA}:
        raise ValueError("it has other parts than a parcel")
    line, _, behind = config["records"].partition(b"\n")  # type: ignore[union-attr, arg-type]
    inline = large = BytesIO(behind)
    if DATA in content:
        (joined,) = content.array_records[DATA].values()
        large = BytesIO(joined.data)
    tree = json.loads(
        line,
        object_hook=lambda one: _read(inline, *one.values()),
        parse_int=lambda text: int(np.int64(text)),  # which refuses more than 64 bits
    )
    json.dumps(tree, default=len, ensure_ascii=False).encode()  # no text has half of a character
    records = RecordDict()
    for name, kind, items in tree:
        if kind == "array":
            items = [
                (key, Array(dtype, tuple(shape), stype, _read(large, size)))
                for key, (dtype, shape, stype, size) in items
            ]
        records[name] = KINDS[kind](dict(items))
    if rest := inline.read() + large.read():
        raise ValueError(f"{len(rest)} bytes are of no record")
    return records


def _read(stream: BytesIO, size: int) -> bytes:
    if len(found := stream.read(size)) != size:
        raise ValueError(f"{len(found)} bytes are left in place of {size}")
    return found


def open_parcel(message: Message, context: Context, call: Callable[..., Message]) -> Message:
    """The client gets the records of a parcel, and its reply becomes one.

    Other messages pass as they are.

    Raises:
        Rejected: the parcel is damaged.
    """
    arrived = message.content
    message.content = opened(arrived)
    reply = call(message, context)
    if PARCEL in arrived and reply.has_content():
        reply.content = Parcels()(reply.content)
    return reply
