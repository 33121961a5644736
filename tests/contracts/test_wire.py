"""Messages survive Flower's wire form, and whatever cannot be read is a failure with a name, never
a crash."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import FitRes, Parameters, parameters_to_ndarrays
from torch import Tensor

from fedhet import trees
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.messages import Broadcast, Extras, Failure, LocalSettings, Update, payload
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold

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


def same(found: Any, expected: Any, ordered: bool = True) -> bool:
    """Equal in type, names and their order, dtype, shape and content."""
    if isinstance(expected, dict):
        names = isinstance(found, dict) and (
            list(found) == list(expected) if ordered else set(found) == set(expected)
        )
        return names and all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, Tensor):
        alike = isinstance(found, Tensor) and (found.dtype, found.shape) == (
            expected.dtype,
            expected.shape,
        )
        return alike and torch.equal(found, expected)
    return type(found) is type(expected) and found == expected


@pytest.mark.parametrize("limit", [0, 8, 24, 2**25], ids=lambda n: f"inline-{n}")
@pytest.mark.parametrize("weights", [WEIGHTS, {}], ids=["weights", "none"])
def test_a_broadcast_comes_back(
    monkeypatch: pytest.MonkeyPatch, limit: int, weights: trees.Tree
) -> None:
    """Also where extras ride as named blocks behind the slot; through both writers."""
    monkeypatch.setattr(wire, "INLINE_LIMIT", limit)
    msg = replace(MESSAGE, weights=weights)
    ins = wire.fit_ins(msg, wire.Packer())
    for arrays, config in (
        wire.write_broadcast(msg),
        (parameters_to_ndarrays(ins.parameters), ins.config),
    ):
        got = wire.read_broadcast(arrays, config)
        assert same(got.weights, weights) and same(got.extras, EXTRAS, ordered=False)
        assert replace(got, weights={}, extras={}) == replace(msg, weights={}, extras={})
        behind = len(arrays) - len(weights or {})
        assert behind == {0: 7, 8: 4, 24: 3, 2**25: 0}[limit]


@pytest.mark.parametrize("limit", [0, 2**25])
def test_an_update_comes_back(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(wire, "INLINE_LIMIT", limit)
    reply = Update(4, 17, WEIGHTS, {"loss": 0.25}, keeps=True, extras=EXTRAS)
    arrays, examples, metrics = wire.reply_arrays(reply)
    # what NumPyClient insists on
    assert isinstance(arrays, list) and type(examples) is int and isinstance(metrics, dict)
    got = wire.read_reply(MESSAGE, (arrays, examples, metrics))
    assert isinstance(got, Update) and (got.pid, got.num_examples, got.metrics, got.keeps) == (
        4,
        17,
        {"loss": 0.25},
        True,
    )
    assert same(got.weights, WEIGHTS) and same(got.extras, EXTRAS, ordered=False)


def test_a_failure_comes_back() -> None:
    failure = Failure(4, "fedlex.explore", 2, "ValueError: it broke")
    assert wire.read_reply(MESSAGE, wire.reply_arrays(failure)) == failure


@pytest.mark.parametrize("limit", [0, 2**25])
def test_what_a_cohort_shares_is_packed_once_and_arrives_under_every_name(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The same tensor under two names, and the weights themselves as an extra."""
    monkeypatch.setattr(wire, "INLINE_LIMIT", limit)
    shared = torch.arange(4.0)
    packer = wire.Packer()
    for pid in (0, 1):
        msg = replace(
            MESSAGE,
            pid=pid,
            extras={
                "first": shared,
                "second": shared,
                "third": WEIGHTS,
                "own": torch.tensor([float(pid)]),
            },
        )
        ins = wire.fit_ins(msg, packer)
        got = wire.read_broadcast(parameters_to_ndarrays(ins.parameters), ins.config)
        assert (
            got.pid == pid
            and same(got.weights, WEIGHTS)
            and same(got.extras, msg.extras, ordered=False)
        )


@pytest.mark.parametrize(
    "value",
    [np.float64(1.5), np.float32(1.5), np.int64(3), np.bool_(True), np.ones(2), [1.0], None],
    ids=lambda value: type(value).__name__,
)
def test_only_pythons_own_scalars_travel(value: Any) -> None:
    """A numpy scalar passes in one engine and fails in another: it is refused with its name, or
    leaves as Python's own type."""
    try:
        _, carried = wire.pack({}, {"extra": value}, {})
    except TypeError as error:
        assert "extra" in str(error)
    else:
        assert type(carried["fedhet.extra"]) in (bool, int, float, str)


def test_received_tensors_can_be_written_to() -> None:
    """They must not alias the sender's, nor be read-only memory."""
    got = wire.read_reply(MESSAGE, wire.reply_arrays(Update(4, 1, trees.map(torch.clone, WEIGHTS))))
    assert isinstance(got, Update) and got.weights
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


# ---- damage


def result(run: Any) -> tuple[Broadcast, FitRes]:
    msg = run.strategy.plan(run.round + 1)[0]
    return msg, run.client().to_client().fit(wire.fit_ins(msg, wire.Packer()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h["names"].pop(), "arrays but its header names"),
        (lambda h: h.update(names=None), "names of the weights are None"),
        (lambda h: h.update(names=5), "unreadable reply"),
        (lambda h: h.pop("names"), "unreadable reply"),
        (lambda h: h.pop("metrics"), "unreadable reply"),
        (lambda h: h.pop("keeps"), "unreadable reply"),
        (lambda h: h.update(behind=["scaffold.c_plus"]), "arrays but its header names"),
        (lambda h: h.update(behind=["x"]), "unreadable reply"),
        (lambda h: h.update(behind=3), "unreadable reply"),
        (lambda h: h["trees"]["scaffold.c_plus"].pop(), "scaffold.c_plus"),
        (lambda h: h.pop("trees"), "unreadable reply"),
        (lambda h: h.update(pid=99), "signed by client 99"),
    ],
)
def test_a_damaged_header(
    federation: Callable[..., Any], change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    msg, res = result(federation(toy_task(), Scaffold))
    header = json.loads(str(res.metrics[wire.HEADER]))
    change(header)
    res.metrics[wire.HEADER] = json.dumps(header)
    failure = wire.read_result(msg, res)
    assert isinstance(failure, Failure) and (failure.pid, failure.phase, failure.step) == (
        msg.pid,
        "train",
        1,
    )
    assert said in failure.cause


def test_damaged_tensors(federation: Callable[..., Any]) -> None:
    msg, res = result(federation(toy_task(), Scaffold))
    intact = dict(res.metrics)
    res.metrics["fedhet.scaffold.c_plus"] = bytes(res.metrics["fedhet.scaffold.c_plus"])[:-3]  # type: ignore[arg-type]
    failure = wire.read_result(msg, res)
    assert isinstance(failure, Failure) and "scaffold.c_plus" in failure.cause
    res.metrics = intact
    res.parameters = Parameters(
        [res.parameters.tensors[0][:-3], *res.parameters.tensors[1:]], "numpy.ndarray"
    )
    failure = wire.read_result(msg, res)
    assert isinstance(failure, Failure) and "unreadable reply" in failure.cause


def test_any_damage_is_a_failure_or_an_update_that_passes_all_checks(
    federation: Callable[..., Any],
) -> None:
    """Random bytes of a reply are changed; the step must end, with finite weights, and blame nobody
    else."""
    draw = random.Random(0)
    blamed = 0
    for trial in range(90):
        run = federation(
            toy_task(3), Scaffold, plugins=lambda: [FedNormPlugin()], on_failure="skip", rounds=1
        )
        plan = run.strategy.plan(1)
        found = [run.client().to_client().fit(wire.fit_ins(msg, wire.Packer())) for msg in plan]
        victim = trial % 3
        res, tensors = found[victim], list(found[victim].parameters.tensors)
        places = [key for key, value in res.metrics.items() if isinstance(value, bytes | str)]
        where = draw.choice(places + [str(i) for i in range(len(tensors))])
        for _ in range(draw.choice([1, 1, 5])):
            if where.isdigit():
                tensors[int(where)] = flipped(tensors[int(where)], draw)
            elif isinstance(value := res.metrics[where], str):
                res.metrics[where] = flipped(value.encode(), draw).decode("latin1")
            else:
                res.metrics[where] = flipped(value, draw)  # type: ignore[arg-type]
        res.parameters = Parameters(tensors, "numpy.ndarray")
        run.strategy.settle(
            wire.read_result(msg, res) for msg, res in zip(plan, found, strict=True)
        )
        assert trees.first_nonfinite(run.model) is None
        assert all(failure.pid == plan[victim].pid for failure in run.strategy.current.failures)
        blamed += len(run.strategy.current.failures)
    assert blamed > 30  # most damage is noticed; the rest changed digits of a number


def flipped(value: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(value))
    return value[:at] + bytes([value[at] ^ (1 << draw.randrange(8))]) + value[at + 1 :]
