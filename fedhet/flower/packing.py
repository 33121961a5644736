"""Pack a message between a `Strategy` and a client into few of Flower's objects.

Flower sends each record, each array and each chunk of an array as a separate object. Each object
costs a request at every hop between the server's app and the client's app. wire.py turns a message
into arrays and a header; this module packs both into one record. If the arrays exceed 256 KiB in
total, they are joined into one array in a second record, which Flower sends in chunks as usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from google.protobuf.message import DecodeError

from fedhet.core.errors import Rejected, clean

RECORD = "fedhet.parcel"  # name of the record
DATA = "fedhet.parcel.data"  # name of the second record, with the content of large arrays
# Keys in the record: the content of small arrays, and the sizes of all arrays.
ARRAYS, SIZES = "arrays", "sizes"
INLINE_BYTES = 2**18  # arrays up to this total size travel in the first record
# Flower raises these for bytes that none of its own SuperNodes would send.
UNDECODABLE = (
    ArithmeticError,
    AttributeError,
    DecodeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class RecordPacker:
    """Packs messages. If several messages share large arrays, it joins these arrays only once."""

    def __init__(self) -> None:
        # The joined arrays are kept alive, so that Python cannot reuse their ids.
        self._joined: dict[tuple[int, ...], tuple[list[bytes], Array]] = {}

    def __call__(self, arrays: list[bytes], carried: Mapping[str, Any]) -> RecordDict:
        """Return the records with the arrays and the named values."""
        sizes = [len(array) for array in arrays]
        if sum(sizes) <= INLINE_BYTES:
            inline = {**carried, SIZES: sizes, ARRAYS: b"".join(arrays)}
            return RecordDict({RECORD: ConfigRecord(inline)})
        packed = RecordDict({RECORD: ConfigRecord({**carried, SIZES: sizes})})
        packed[DATA] = joined = ArrayRecord()  # filled below: its constructor would copy the array
        joined["data"] = self._join(arrays)
        return packed

    def _join(self, data: list[bytes]) -> Array:
        key = tuple(map(id, data))
        if key not in self._joined:
            joined = b"".join(data)
            self._joined[key] = data, Array("uint8", (len(joined),), RECORD, joined)
        return self._joined[key][1]


def opened(packed: RecordDict) -> tuple[list[bytes], dict[str, Any]]:
    """Return the arrays and the named values of a packed message.

    Raises:
        Rejected: the records are not a packed message, or are damaged.
    """
    try:
        carried: dict[str, Any] = dict(packed.config_records[RECORD])
        sizes = carried.pop(SIZES)
        if DATA in packed:
            (joined,) = packed.array_records[DATA].values()
            stream = BytesIO(joined.data)
        else:
            stream = BytesIO(carried.pop(ARRAYS))
        arrays = [stream.read(size) for size in sizes]
        if [len(array) for array in arrays] != sizes or stream.read():
            raise ValueError("its arrays have other sizes")
    except UNDECODABLE as error:
        problem = f"unreadable message: {type(error).__name__}: {clean(str(error))}"
        raise Rejected("unreadable", problem) from error
    return arrays, carried
