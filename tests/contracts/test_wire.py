"""Messages survive Flower's wire format."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from asking import packed_message
from flwr.common import parameters_to_ndarrays
from torch import Tensor

from fedhet.core import trees
from fedhet.core.messages import Broadcast, Extras, Failure, LocalSettings, Upload, payload
from fedhet.flower import wire

WEIGHTS = {
    "w": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "n": torch.tensor(7),
    "empty": torch.zeros(0, 3),
}
EXTRAS: Extras = {
    "flag": True,
    "count": 3,
    "rate": -0.5,
    "text": "Grüße, 'x\"",
    "vector": torch.tensor([1.0, -2.0]),
    "half": torch.tensor([1.5], dtype=torch.float16),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "tree": {"b": torch.ones(2, 2), "c": torch.tensor(4, dtype=torch.int64), "a": torch.zeros(1)},
    "one": {"only": torch.zeros(1)},
}
LOCAL = LocalSettings(lr=0.1, epochs=3, clip=1.0)
MESSAGE = Broadcast(
    phase="fedlex.explore",
    step=2,
    round=5,
    local=LOCAL,
    slot="model",
    weights=WEIGHTS,
    extras=EXTRAS,
    trains=True,
    plugins={"fedlex": "abc"},
    pid=4,
    version=3,
)


def same(value: Any, expected: Any, ordered: bool = True) -> bool:
    """Whether both are equal in type, names and their order, dtype, shape and content."""
    if isinstance(expected, dict):
        if not isinstance(value, dict) or set(value) != set(expected):
            return False
        if ordered and list(value) != list(expected):
            return False
        return all(same(value[name], expected[name]) for name in expected)
    if isinstance(expected, Tensor):
        if not isinstance(value, Tensor):
            return False
        alike = (value.dtype, value.shape) == (expected.dtype, expected.shape)
        return alike and torch.equal(value, expected)
    return type(value) is type(expected) and value == expected


@pytest.mark.parametrize("weights", [WEIGHTS, {}], ids=["weights", "none"])
def test_a_broadcast_comes_back(weights: trees.Tree) -> None:
    """By both writers."""
    msg = replace(MESSAGE, weights=weights)
    ins = wire.fit_ins(msg, wire.MessagePacker())
    carried = [
        packed_message(msg),
        (parameters_to_ndarrays(ins.parameters), ins.config),
    ]
    for arrays, config in carried:
        got = wire.read_broadcast(arrays, config)
        assert same(got.weights, weights) and same(got.extras, EXTRAS, ordered=False)
        assert replace(got, weights={}, extras={}) == replace(msg, weights={}, extras={})


def test_an_update_comes_back() -> None:
    reply = Upload(4, 17, WEIGHTS, {"loss": 0.25}, keeps=True, extras=EXTRAS)
    arrays, examples, metrics = wire.reply_arrays(MESSAGE, reply)
    # NumPyClient accepts nothing else.
    assert isinstance(arrays, list) and type(examples) is int and isinstance(metrics, dict)
    got = wire.read_reply(MESSAGE, (arrays, examples, metrics))
    assert isinstance(got, Upload)
    assert (got.pid, got.num_examples, got.metrics, got.keeps) == (4, 17, {"loss": 0.25}, True)
    assert same(got.weights, WEIGHTS) and same(got.extras, EXTRAS, ordered=False)


def test_a_failure_comes_back() -> None:
    failure = Failure(4, "fedlex.explore", 2, "ValueError: it broke")
    assert wire.read_reply(MESSAGE, wire.reply_arrays(MESSAGE, failure)) == failure


def test_what_a_cohort_shares_arrives_under_every_name() -> None:
    """The same tensor under two names, and the weights themselves as an extra."""
    shared = torch.arange(4.0)
    packer = wire.MessagePacker()
    for pid in (0, 1):
        own = torch.tensor([float(pid)])
        extras: Extras = {"first": shared, "second": shared, "third": WEIGHTS, "own": own}
        msg = replace(MESSAGE, pid=pid, extras=extras)
        ins = wire.fit_ins(msg, packer)
        got = wire.read_broadcast(parameters_to_ndarrays(ins.parameters), ins.config)
        assert got.pid == pid
        assert same(got.weights, WEIGHTS) and same(got.extras, extras, ordered=False)


@pytest.mark.parametrize(
    "value",
    [np.float64(1.5), np.float32(1.5), np.int64(3), np.bool_(True), np.ones(2), [1.0], None],
    ids=lambda value: type(value).__name__,
)
def test_only_pythons_own_scalars_travel(value: Any) -> None:
    """A numpy scalar would pass in one engine and fail in another.

    So it is refused with its name, or leaves as Python's own type.
    """
    try:
        _, carried = wire.pack({}, {"extra": value}, {})
    except TypeError as error:
        assert "extra" in str(error)
    else:
        assert type(json.loads(carried["fedhet"])["scalars"]["extra"]) is float


def test_received_tensors_can_be_written_to() -> None:
    """They neither share the sender's memory nor lie in read-only memory."""
    reply = Upload(4, 1, trees.map(torch.clone, WEIGHTS))
    got = wire.read_reply(MESSAGE, wire.reply_arrays(MESSAGE, reply))
    assert isinstance(got, Upload)
    got.weights["w"].add_(1.0)


def test_bytes_are_counted_by_kind() -> None:
    counted = payload("model", WEIGHTS, EXTRAS)
    assert counted == {
        "model": 6 * 4 + 8 + 8 + 0,
        "flag": 1,
        "count": 8,
        "rate": 8,
        "text": 12,
        "vector": 8,
        "half": 2,
        "transposed": 24,
        "tree": 4 * 4 + 8 + 4,
        "one": 4,
    }
    assert payload("", {}, {}) == {}
