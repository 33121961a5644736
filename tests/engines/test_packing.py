"""Parcels: what arrives is what was sent, in few of Flower's objects, and nothing else is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_grid import OnGrid
from flwr.app import Array, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedhet.core.errors import Rejected
from fedhet.core.messages import Failure
from fedhet.flower import packing
from fedhet.flower import transport as flower_server
from fedhet.flower.packing import DATA, RECORD, RecordPacker, opened

SMALL, LARGE = 2**18, 0  # INLINE_BYTES for which the arrays below are small or large


@pytest.fixture(autouse=True)
def _flower(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(flower_server, "FAR_SECONDS", (0.001, 0.001))


ARRAYS = [b"first", b"", b"\0\xff" * 84]
VALUES: dict[str, Any] = {
    **{"text": "é", "bytes": b"\0\xff", "yes": True, "whole": -(2**63), "none": []},
    **{"t": ["a", ""], "b": [b"1"], "y": [True, False], "n": [1, -2], "x": float("inf")},
}


def carried(content: RecordDict) -> tuple[RecordDict, int]:
    """What arrives of a content that Flower carries, and of how many objects it consists."""
    objects = get_all_nested_objects(content)
    contents = {name: part.deflate() for name, part in objects.items()}
    found = inflate_object_from_contents(content.object_id, contents)
    assert isinstance(found, RecordDict)
    return found, len(objects)


@pytest.mark.parametrize(("limit", "most"), [(SMALL, 2), (LARGE, 5)])
def test_what_arrives_is_what_was_sent(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    monkeypatch.setattr(packing, "INLINE_BYTES", limit)
    for arrays in (ARRAYS, [b"a"]):
        found, objects = carried(RecordPacker()(arrays, VALUES))
        assert objects == most
        assert opened(found) == (arrays, VALUES)


@pytest.mark.parametrize("limit", [SMALL, LARGE])
def test_no_arrays(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(packing, "INLINE_BYTES", limit)
    assert opened(carried(RecordPacker()([], {}))[0]) == ([], {})


def test_large_arrays_of_a_cohort_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "INLINE_BYTES", LARGE)
    pack = RecordPacker()
    one, two = (pack(ARRAYS, {"n": n}) for n in (1, 2))
    assert one[DATA]["data"] is two[DATA]["data"]  # type: ignore[index]
    assert len(get_all_nested_objects(one).keys() & get_all_nested_objects(two).keys()) == 3
    other = pack([bytes(a) + b"x" for a in ARRAYS], {})[DATA]["data"]  # type: ignore[index]
    assert other is not one[DATA]["data"]  # type: ignore[index]


def packed(limit: int, monkeypatch: pytest.MonkeyPatch) -> RecordDict:
    monkeypatch.setattr(packing, "INLINE_BYTES", limit)
    return RecordPacker()(ARRAYS, VALUES)


def altered(name: str, value: Any) -> Callable[[RecordDict], None]:
    def alter(parcel: RecordDict) -> None:
        parcel.config_records[RECORD][name] = value

    return alter


def no_config(parcel: RecordDict) -> None:
    parcel[RECORD] = MetricRecord({"n": 1})


def without(name: str) -> Callable[[RecordDict], None]:
    def alter(parcel: RecordDict) -> None:
        del parcel.config_records[RECORD][name]

    return alter


def without_data(parcel: RecordDict) -> None:
    del parcel[DATA]


def shorter(parcel: RecordDict) -> None:
    array = parcel.array_records[DATA]["data"]
    array.data = array.data[:-1]


def two_arrays(parcel: RecordDict) -> None:
    parcel.array_records[DATA]["more"] = Array("uint8", (1,), RECORD, b"a")


HOSTILE: dict[str, tuple[int, Callable[[RecordDict], None]]] = {
    "no config record": (SMALL, no_config),
    "no arrays": (SMALL, without("arrays")),
    "no sizes": (SMALL, without("sizes")),
    "text": (SMALL, altered("arrays", "text")),
    "list": (SMALL, altered("arrays", [b"a"])),
    "other arrays": (SMALL, altered("arrays", b"\xff" * 40)),
    "truncated": (SMALL, altered("arrays", b"".join(ARRAYS)[:-3])),
    "content twice": (SMALL, altered("arrays", b"".join(ARRAYS) * 2)),
    "no data": (LARGE, without_data),
    "shorter data": (LARGE, shorter),
    "two arrays of data": (LARGE, two_arrays),
    **{
        f"sizes {sizes!r}"[:30]: (limit, altered("sizes", sizes))
        for limit in (SMALL, LARGE)
        for sizes in (
            *([5, 0, -168], [5, 0, 2**62], [5, 0, 167], [5.0, 0.0, 168.0], ["5"]),
            *([b"5"], "5", b"5", 5, True, [], [True], [0, 5, 169]),
        )
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_parcel_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    limit, alter = HOSTILE[name]
    parcel = packed(limit, monkeypatch)
    alter(parcel)
    with pytest.raises(Rejected, match="unreadable message") as raised:
        opened(parcel)
    assert raised.value.reason == "unreadable"
    assert len(str(raised.value)) < 500


def test_a_reply_in_a_damaged_parcel_is_that_clients_failure(
    federation: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_grid = OnGrid(federation)
    pull = on_grid.grid.pull_messages

    def pulled(ids: Any) -> list[Message]:
        replies = pull(ids)
        for reply in replies:
            sender = reply.metadata.src_node_id == 1002 or reply.metadata.dst_node_id == 1002
            if sender and RECORD in reply.content:
                reply.content.config_records[RECORD]["arrays"] = b"\xff"
        return replies

    monkeypatch.setattr(on_grid.grid, "pull_messages", pulled)
    replies = on_grid.step()
    failures = {pid: reply for pid, reply in replies.items() if isinstance(reply, Failure)}
    assert list(failures) == [2], replies
    assert failures[2].reason == "unreadable"
    assert "unreadable message" in failures[2].cause
