"""Parcels: what arrives is what was sent, in few of Flower's objects, and nothing else is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_grid import OnGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedhet.core.errors import Rejected
from fedhet.core.messages import Failure
from fedhet.data.toy import toy_task
from fedhet.flower import grid as flower_grid
from fedhet.flower import parcels
from fedhet.flower.grid import ASKS
from fedhet.flower.parcels import DATA, PARCEL, Parcels, open_parcel, opened
from fedhet.methods.scaffold import Scaffold

SMALL, LARGE = 2**18, 0  # INLINE_BYTES for which the arrays below are small or large


@pytest.fixture(autouse=True)
def _flower(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(flower_grid, "FAR_SECONDS", (0.001, 0.001))


def records() -> RecordDict:
    """Each kind of record, with each kind of value."""
    arrays = [np.arange(5.0), np.zeros((2, 0), np.float32), np.array(3, np.int64)]
    config: dict[str, Any] = {"text": "é", "bytes": b"\0\xff", "yes": True, "whole": -(2**63)}
    lists: dict[str, Any] = {"t": ["a", ""], "b": [b"1"], "y": [True, False], "n": [1, -2]}
    return RecordDict(
        {
            "second": ArrayRecord(arrays),
            "empty": ArrayRecord({"_empty": Array("", (), "numpy.ndarray", b"")}),
            "metrics": MetricRecord({"a": 1, "b": float("inf"), "c": [0.1, 2.0], "d": [1, 2]}),
            "config": ConfigRecord({**config, **lists}),
            "first": ArrayRecord([np.ones(2)]),
        }
    )


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
    monkeypatch.setattr(parcels, "INLINE_BYTES", limit)
    found, objects = carried(Parcels()(records()))
    assert objects == most < carried(records())[1]
    assert opened(found) == records()
    assert list(opened(found)) == list(records())


@pytest.mark.parametrize("limit", [SMALL, LARGE])
def test_records_without_arrays(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(parcels, "INLINE_BYTES", limit)
    for content in (RecordDict(), RecordDict({"m": MetricRecord({"n": 1})})):
        assert opened(carried(Parcels()(content))[0]) == content


def test_large_arrays_of_a_cohort_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "INLINE_BYTES", LARGE)
    shared, parcel = records(), Parcels()
    one, two = (parcel(RecordDict({**shared, "n": MetricRecord({"n": n})})) for n in (1, 2))
    assert one[DATA]["data"] is two[DATA]["data"]  # type: ignore[index]
    assert len(get_all_nested_objects(one).keys() & get_all_nested_objects(two).keys()) == 3
    other = parcel(records())[DATA]["data"]  # type: ignore[index]
    assert other is not one[DATA]["data"]  # type: ignore[index]


def test_other_records_are_no_parcel() -> None:
    content = records()
    assert opened(content) is content


def packed(limit: int, monkeypatch: pytest.MonkeyPatch) -> RecordDict:
    monkeypatch.setattr(parcels, "INLINE_BYTES", limit)
    return Parcels()(records())


def altered(name: str, value: Any) -> Callable[[RecordDict], None]:
    def alter(parcel: RecordDict) -> None:
        parcel.config_records[PARCEL][name] = value

    return alter


def beside(parcel: RecordDict) -> None:
    parcel["fitres.metrics"] = ConfigRecord()


def no_config(parcel: RecordDict) -> None:
    parcel[PARCEL] = MetricRecord({"n": 1})


def unnamed(parcel: RecordDict) -> None:
    del parcel.config_records[PARCEL]["records"]


def truncated(parcel: RecordDict) -> None:
    record = parcel.config_records[PARCEL]
    content = record["records"]
    assert isinstance(content, bytes)
    record["records"] = content[:-3]


def without_data(parcel: RecordDict) -> None:
    del parcel[DATA]


def rewritten(old: str, new: str) -> Callable[[RecordDict], None]:
    """Something else stands in the line of JSON."""

    def alter(parcel: RecordDict) -> None:
        record = parcel.config_records[PARCEL]
        content = record["records"]
        assert isinstance(content, bytes) and old.encode() in content
        record["records"] = content.replace(old.encode(), new.encode())

    return alter


def shorter(parcel: RecordDict) -> None:
    array = parcel.array_records[DATA]["data"]
    array.data = array.data[:-1]


def twice(parcel: RecordDict) -> None:
    """The arrays have their content a second time."""
    data = b"".join(a.data for record in records().array_records.values() for a in record.values())
    parcel.config_records[PARCEL]["records"] += data  # type: ignore[operator]


def two_arrays(parcel: RecordDict) -> None:
    parcel.array_records[DATA]["more"] = Array("uint8", (1,), PARCEL, b"a")


SIZE = '"numpy.ndarray",168]'  # of the first array
HOSTILE: dict[str, tuple[int, Callable[[RecordDict], None]]] = {
    "another record": (SMALL, beside),
    "another record beside a large one": (LARGE, beside),
    "no config record": (SMALL, no_config),
    "no records": (SMALL, unnamed),
    "another value": (SMALL, altered("more", 1)),
    "text": (SMALL, altered("records", "text")),
    "list": (SMALL, altered("records", [b"a"])),
    "noise": (SMALL, altered("records", b"\xff" * 40)),
    "truncated": (SMALL, truncated),
    "no data": (LARGE, without_data),
    "shorter data": (LARGE, shorter),
    "two arrays of data": (LARGE, two_arrays),
    "a negative size": (LARGE, rewritten(SIZE, SIZE.replace("168", "-168"))),
    "a size that is none": (LARGE, rewritten(SIZE, SIZE.replace("168", '"168"'))),
    "no size": (LARGE, rewritten(SIZE, SIZE.replace("168", "null"))),
    "a huge size": (LARGE, rewritten(SIZE, SIZE.replace("168", str(2**62)))),
    "a smaller size": (LARGE, rewritten(SIZE, SIZE.replace("168", "167"))),
    "content twice": (LARGE, twice),
}


ARRAY = '[["a","array",[["x",["f",[1],"s",1]]]]]'
BYTES = '[["a","config",[["x",{"bytes":1}]]]]'
LINES = {
    "no list": "7",
    "a name that is no text": '[[7,"metric",[]]]',
    "a record that is none": '[["a","other",[]]]',
    "a kind that is a list": '[["a",["metric"],[]]]',
    "a record of other parts": '[["a","metric"]]',
    "items that are no pairs": '[["a","metric",[["b"]]]]',
    "nothing in place of a number": '[["a","metric",[["b",null]]]]',
    "text in place of a number": '[["a","metric",[["b","c"]]]]',
    "a list of lists": '[["a","config",[["b",[[1]]]]]]',
    "an array of other parts": ARRAY.replace(',"s"', ""),
    "an array whose shape is a text": ARRAY.replace("[1]", '"1"'),
    "an array whose shape is no whole number": ARRAY.replace("[1]", "[0.5]"),
    "too many bytes": BYTES.replace("1}", "2}"),
    "too few bytes": BYTES.replace("1}", "0}"),
    "negative bytes": BYTES.replace("1}", "-1}"),
    "bytes that are no number": BYTES.replace("1}", '"1"}'),
    "bytes of bytes": BYTES.replace("1}", '{"bytes":1}}'),
    "no bytes": BYTES.replace('"bytes":1', ""),
    "bytes twice": BYTES.replace("1}", '1,"more":1}'),
    "more than 64 bits": '[["a","metric",[["b",9223372036854775808]]]]',
    "a number of many digits": f'[["a","metric",[["b",{"9" * 5000}]]]]',
    "half a character": '[["a","config",[["b","\\ud800"]]]]',
    "half a character in a name": '[["\\udfff","config",[]]]',
    "no end": "[" * 100_000,
}
HOSTILE |= {
    what: (SMALL, altered("records", f"{line}\n.".encode())) for what, line in LINES.items()
}


def test_the_lines_that_are_changed_above_are_read() -> None:
    array, text = (
        opened(RecordDict({PARCEL: ConfigRecord({"records": f"{line}\n.".encode()})}))
        for line in (ARRAY, BYTES)
    )
    assert array == RecordDict({"a": ArrayRecord({"x": Array("f", (1,), "s", b".")})})
    assert text == RecordDict({"a": ConfigRecord({"x": b"."})})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_parcel_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    limit, alter = HOSTILE[name]
    parcel = packed(limit, monkeypatch)
    alter(parcel)
    with pytest.raises(Rejected, match="unreadable parcel") as raised:
        opened(parcel)
    assert raised.value.reason == "unreadable"
    assert len(str(raised.value)) < 500


def test_a_client_replies_as_it_was_asked() -> None:
    """With a parcel to a parcel, and as ever to others."""
    context = Context(1, 1, {}, RecordDict(), {})

    def serve(message: Message, context: Context) -> Message:
        assert message.content == records()
        return Message(records(), reply_to=message)

    def answer(content: RecordDict) -> RecordDict:
        message = Message(content, 1, "train")
        message.metadata.__dict__["_message_id"] = "a"
        return open_parcel(message, context, serve).content

    assert answer(records()) == records()
    assert set(answer(Parcels()(records()))) == {PARCEL}


@pytest.mark.parametrize("near", [False, True])
def test_messages_to_other_machines_are_parcels(federation: Callable[..., Any], near: bool) -> None:
    """And the weights are the same."""
    on_grid = OnGrid(federation)
    on_grid.courier._near = near
    contents: list[RecordDict] = []
    push = on_grid.grid.push_messages

    def pushed(messages: Any) -> list[str]:
        contents.extend(message.content for message in messages if ASKS not in message.content)
        return push(messages)

    on_grid.grid.push_messages = pushed  # type: ignore[method-assign]
    on_grid.step()
    assert [PARCEL in content for content in contents] == [not near] * 4
    assert not any(PARCEL in message.content for message in on_grid.grid.opened)
    expected = federation(toy_task(4), Scaffold, on_failure="skip", rounds=5)
    expected.step()
    assert on_grid.run.sha256 == expected.sha256


def test_a_reply_in_a_damaged_parcel_is_that_clients_failure(
    federation: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_grid = OnGrid(federation)
    pull = on_grid.grid.pull_messages

    def pulled(ids: Any) -> list[Message]:
        replies = pull(ids)
        for reply in replies:
            sender = reply.metadata.src_node_id == 1002 or reply.metadata.dst_node_id == 1002
            if sender and PARCEL in reply.content:
                reply.content.config_records[PARCEL]["records"] = b"\xff"
        return replies

    monkeypatch.setattr(on_grid.grid, "pull_messages", pulled)
    replies = on_grid.step()
    failures = {pid: reply for pid, reply in replies.items() if isinstance(reply, Failure)}
    assert list(failures) == [2], replies
    assert failures[2].reason == "unreadable"
    assert "unreadable parcel" in failures[2].cause
