"""What a message between a `Strategy` and a client consists of, in few of Flower's objects.

Flower sends each record, each array and each chunk of an array as an object of its own, with a
request at every station between the server's app and the client's. So a message is a parcel: one
record with what wire.py packs, its arrays among it. From 256 KiB on, the arrays are one array
beside the record, which Flower divides into chunks as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from google.protobuf.message import DecodeError

from fedhet.core.errors import Rejected, clean

PARCEL = "fedhet.parcel"  # the record
DATA = "fedhet.parcel.data"  # the record with the content of large arrays
ARRAYS, SIZES = "arrays", "sizes"  # in the parcel: the content of small arrays, and all sizes
INLINE_BYTES = 2**18  # of arrays that travel in the parcel itself
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
    """Makes parcels; the large arrays that several have in common are joined once."""

    def __init__(self) -> None:
        # What was joined is kept beside the result, so that its ids cannot be given to others.
        self._joined: dict[tuple[int, ...], tuple[list[bytes], Array]] = {}

    def __call__(self, arrays: list[bytes], carried: Mapping[str, Any]) -> RecordDict:
        """The parcel of arrays and of values by name."""
        sizes = [len(array) for array in arrays]
        if sum(sizes) <= INLINE_BYTES:
            inline = {**carried, SIZES: sizes, ARRAYS: b"".join(arrays)}
            return RecordDict({PARCEL: ConfigRecord(inline)})
        parcel = RecordDict({PARCEL: ConfigRecord({**carried, SIZES: sizes})})
        parcel[DATA] = joined = ArrayRecord()  # which would copy what it is made of
        joined["data"] = self._join(arrays)
        return parcel

    def _join(self, data: list[bytes]) -> Array:
        key = tuple(map(id, data))
        if key not in self._joined:
            joined = b"".join(data)
            self._joined[key] = data, Array("uint8", (len(joined),), PARCEL, joined)
        return self._joined[key][1]


def opened(parcel: RecordDict) -> tuple[list[bytes], dict[str, Any]]:
    """The arrays of a parcel, and its values by name.

    Raises:
        Rejected: it is none, or damaged.
    """
    try:
        carried: dict[str, Any] = dict(parcel.config_records[PARCEL])
        sizes = carried.pop(SIZES)
        if DATA in parcel:
            (joined,) = parcel.array_records[DATA].values()
            stream = BytesIO(joined.data)
        else:
            stream = BytesIO(carried.pop(ARRAYS))
        arrays = [stream.read(size) for size in sizes]
        if [len(array) for array in arrays] != sizes or stream.read():
            raise ValueError("its arrays have other sizes")
    except UNDECODABLE as error:
        problem = f"unreadable parcel: {type(error).__name__}: {clean(str(error))}"
        raise Rejected("unreadable", problem) from error
    return arrays, carried
