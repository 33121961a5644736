"""All records of a message as one, which Flower carries in few objects.

Flower sends each record, each array and each chunk of an array as an object of its own, with a
request at every station between the server's app and the client's. A message of a small model has
about 15 objects, a parcel 3; the arrays of a large one are a single array, which Flower divides
into chunks as ever. Parcels travel between the grid (server.py) and the mod `open_parcel` of the
client app. Nobody else sees them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

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

PARCEL = "fedhet.parcel"  # the record that stands for the others, and the property of a client
PROPERTIES = "getpropertiesres.properties"  # the record of a client's answer in Flower
DATA = "fedhet.parcel.data"  # the record with the content of large arrays
INLINE_BYTES = 2**18  # of arrays that travel in the parcel itself
KINDS = {"array": ArrayRecord, "config": ConfigRecord, "metric": MetricRecord}
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
        """The records as a parcel."""
        data = [array.data for array in _arrays(content)]
        sizes = list(map(len, data))
        if sum(sizes) <= INLINE_BYTES:
            return RecordDict({PARCEL: ConfigRecord({"records": _to_bytes(content)})})
        records: dict[str, Any] = dict(content)
        for name, record in content.array_records.items():
            records[name] = ArrayRecord({key: _emptied(array) for key, array in record.items()})
        config = ConfigRecord({"records": _to_bytes(RecordDict(records)), "sizes": sizes})
        arrays = ArrayRecord()
        arrays["data"] = self._join(data)
        return RecordDict({PARCEL: config, DATA: arrays})

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
    if not isinstance(config["records"], bytes):
        raise TypeError("its records are not in bytes")
    records = _from_bytes(config["records"])
    if set(content) == {PARCEL} and set(config) == {"records"}:
        return records
    if set(content) != {PARCEL, DATA} or set(config) != {"records", "sizes"}:
        raise ValueError("it has other parts than a parcel")
    data, sizes = content.array_records[DATA]["data"].data, config["sizes"]
    if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
        raise TypeError("its sizes are no list of numbers of bytes")
    arrays = list(_arrays(records))
    ends = list(accumulate(map(int, sizes)))
    if len(arrays) != len(ends) or ends[-1:] != [len(data)]:
        raise ValueError(
            f"{len(ends)} sizes, {sum(sizes)} bytes together, are stated of {len(arrays)} arrays in"
            f" {len(data)} bytes"
        )
    if any(array.data for array in arrays):
        raise ValueError("an array has a content beside that of the parcel")
    for array, (start, end) in zip(arrays, pairwise([0, *ends]), strict=True):
        array.data = data[start:end]
    return records


def open_parcel(message: Message, context: Context, call: Callable[..., Message]) -> Message:
    """A mod of Flower: the client gets the records of a parcel, and its reply becomes one.

    Other messages pass as they are, but for the client's properties, which say that it has this.

    Raises:
        Rejected: the parcel is damaged.
    """
    arrived = message.content
    message.content = opened(arrived)
    reply = call(message, context)
    if not reply.has_content():
        return reply
    if PARCEL in arrived:
        reply.content = Parcels()(reply.content)
    elif PROPERTIES in reply.content:
        reply.content.config_records[PROPERTIES][PARCEL] = True
    return reply


def _arrays(records: RecordDict) -> Iterator[Array]:
    for record in records.array_records.values():
        yield from record.values()


def _emptied(array: Array) -> Array:
    return Array(array.dtype, array.shape, array.stype, b"")


def _to_bytes(records: RecordDict) -> bytes:
    """The records as a line of JSON, and behind it what they have in bytes, one after another."""
    behind: list[bytes] = []

    def put(value: Any) -> Any:
        if isinstance(value, Array):
            return [value.dtype, value.shape, value.stype, value.data]
        behind.append(value)
        return {"bytes": len(value)}

    names = {record: kind for kind, record in KINDS.items()}
    tree = [[name, names[type(one)], list(one.items())] for name, one in records.items()]
    line = json.dumps(tree, default=put, separators=(",", ":"))
    return b"".join([line.encode(), b"\n", *behind])


def _from_bytes(content: bytes) -> RecordDict:
    """The records of `_to_bytes`; whatever else arrives raises one of UNDECODABLE."""
    line, _, behind = content.partition(b"\n")
    begin = 0

    def take(found: dict[str, Any]) -> bytes:
        nonlocal begin
        (size,) = found.values()
        if type(size) is not int or not 0 <= size <= len(behind) - begin:
            raise ValueError(f"{size} bytes of {len(behind) - begin}")
        begin += size
        return behind[begin - size : begin]

    tree = json.loads(line, object_hook=take, parse_int=_whole)
    json.dumps(tree, default=len, ensure_ascii=False).encode()  # no half of a character
    if begin < len(behind):
        raise ValueError(f"{len(behind) - begin} bytes too many")
    records = RecordDict()
    for name, kind, items in tree:
        if kind == "array":
            items = [(key, Array(a, tuple(b), c, d)) for key, (a, b, c, d) in items]
        records[name] = KINDS[kind](dict(items))
    return records


def _whole(text: str) -> int:
    """A number of 64 bits, as Flower's records have them."""
    if not -(2**63) <= (number := int(text)) < 2**63:
        raise ValueError(f"{text[:30]} has more than 64 bits")
    return number
