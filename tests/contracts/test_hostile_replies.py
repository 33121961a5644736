"""A reply from another process is refused as a whole, whatever is wrong with it.

The step then equals the step without that client, bit for bit, and the failure names the client and
the kind of fault.
"""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from contracts.hostile import (
    LIMIT,
    Federation,
    Header,
    exchange,
    finish_step,
    forge,
    result,
    skipping,
    without,
)
from contracts.short import slow
from flwr.common import Parameters

from fedhet.core.messages import Broadcast, Failure, Upload
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.flower.wire import clean
from fedhet.methods.scaffold import Scaffold

DEEP = "[" * 200_000


def set_field(name: str, value: Any) -> Callable[[Header], Any]:
    return lambda header: header.update({name: value})


def set_part(name: str, value: Any) -> Callable[[Header], Any]:
    return lambda header: header["parts"].update({name: value})


def set_metric(name: str, value: Any) -> Callable[[Header], Any]:
    return lambda header: header["metrics"].update({name: value})


FORGED: list[Any] = [
    (lambda h: h["parts"][""].pop(), "corrupt"),
    (set_part("", 5), "unreadable"),
    (set_part("", []), "unreadable"),
    (set_part("", ["00", "a", "a", "b", "c"]), "unreadable"),
    (lambda h: h["parts"].pop(""), "unreadable"),
    (lambda h: h.pop("metrics"), "unreadable"),
    (set_part("x", 3), "unreadable"),
    (set_part("x", ["00"]), "corrupt"),
    (set_part("x", ["00", "y"]), "corrupt"),
    (lambda h: h["parts"]["scaffold.c_plus"].pop(), "corrupt"),
    (lambda h: h["parts"][""].__setitem__(0, "00"), "corrupt"),
    (set_field("scalars", {"scaffold.c_plus": 1.0}), "unreadable"),
    (set_field("scalars", {"x": None}), "unreadable"),
    (set_field("scalars", {"x": [1.0]}), "unreadable"),
    (set_field("scalars", {"x": 1.0}), "refused"),
    (set_field("pid", 99), "replayed"),
    (set_field("pid", True), "replayed"),
    (set_field("round", 7), "replayed"),
    (set_field("step", 7), "replayed"),
    (set_field("phase", "explore"), "replayed"),
    (set_field("n", 3), "corrupt"),
    (set_field("metrics", [1]), "unreadable"),
    (set_metric("a", "text"), "wrong content"),
    (set_metric("a", float("nan")), "wrong content"),
    (set_metric("a", 10**400), "wrong content"),
    (set_metric("a\x1b[2J", 1.0), "wrong content"),
    (set_metric("bytes.state", float("inf")), "refused"),
    (set_metric("bytes.state", -1.0), "refused"),
    (set_metric("seconds.train", float("inf")), "refused"),
    (lambda h: h["metrics"].update({f"m{i}": 1.0 for i in range(10_000)}), "wrong content"),
    (set_field("keeps", 1), "unreadable"),
    (set_field("failure", 3), "unreadable"),
    *slow(
        (set_part("", None), "unreadable"),
        (set_part("", ["00", ["a"], 2, 3, 4]), "unreadable"),
        (lambda h: h.pop("keeps"), "unreadable"),
        (lambda h: h.pop("parts"), "unreadable"),
        (set_field("parts", 3), "unreadable"),
        (lambda h: h.pop("scalars"), "unreadable"),
        (set_field("scalars", 3), "unreadable"),
        (set_field("pid", "%100000000000000d"), "replayed"),
        (set_metric("a", [1.0]), "wrong content"),
        (set_metric("a", None), "wrong content"),
    ),
]


@pytest.mark.parametrize(("change", "reason"), FORGED)
def test_a_forged_header(
    federation: Federation, change: Callable[[Header], Any], reason: str
) -> None:
    """Seen at the server: two clients reply well, the third has forged its header."""
    run = skipping(federation)
    expected = skipping(federation)
    plan, replies = exchange(run)
    forge(replies[1], change)
    finish_step(run, plan, replies)
    failures = run.current.failures
    assert [(failure.pid, failure.reason) for failure in failures] == [(plan[1].pid, reason)]
    others = [plan[0].pid, plan[2].pid]
    assert run.sha256 == without(expected, others)


@pytest.mark.parametrize(
    "text", [DEEP, "{" * 100, "", "null", "3", '"x"', "{}", "[]", " " * 2**21, "\ud800"]
)
def test_a_header_that_is_none(federation: Federation, text: str) -> None:
    msg, res = result(federation(toy_task(), Scaffold))
    res.metrics["fedhet"] = text
    failure = wire.read_result(msg, res, 2**22)
    assert isinstance(failure, Failure) and failure.pid == msg.pid
    assert failure.reason in ("unreadable", "corrupt", "too large")


@pytest.mark.parametrize("n", [0, -1, 10**18, True, 1.0, float("nan"), "12", None, [1]])
def test_a_number_of_examples_that_is_none(federation: Federation, n: Any) -> None:
    """Neither as Flower carries it nor in the sealed header."""
    run = skipping(federation)
    plan, replies = exchange(run)
    replies[0].num_examples = n
    forge(replies[0], set_field("n", n))
    finish_step(run, plan, replies)
    assert [failure.pid for failure in run.current.failures] == [plan[0].pid]


def test_an_extra_that_nobody_expects(federation: Federation) -> None:
    run = federation(toy_task(3), Scaffold, on_failure="skip", rounds=1)

    def add(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        replies[0].extras["mine"] = 1.0
        replies[1].extras |= {f"mine.{i}": torch.ones(2) for i in range(10_000)}
        return replies

    run.step(alter=add)
    assert [f.reason for f in run.current.failures] == ["refused", "refused"]
    assert "unexpected extras ['mine']" in run.current.failures[0].cause


@pytest.mark.parametrize("value", [1e30, -1e16, float("nan"), float("inf")])
def test_numbers_beyond_every_model(federation: Federation, value: float) -> None:
    """In the weights, and in the extras of a method and of a plug-in."""
    for component in ("weights", "scaffold.c_plus", "fednorm.z"):
        run = skipping(federation)

        def spoil(
            plan: list[Broadcast], replies: list[Any], component: str = component
        ) -> list[Any]:
            update = replies[0]
            tensor = update.extras[component] if component != "weights" else update.weights
            tensor = tensor if isinstance(tensor, torch.Tensor) else next(iter(tensor.values()))
            tensor.view(-1)[0] = value
            return replies

        run.step(alter=spoil)
        failures = run.current.failures
        assert [failure.reason for failure in failures] == ["refused"]


def test_a_shape_that_could_be_broadcast(federation: Federation) -> None:
    """Refused, like every other shape that is not the model's, from whichever client it comes."""

    def shrink(pid: int) -> Callable[..., Any]:
        def apply(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
            weights = next(reply for reply in replies if reply.pid == pid).weights
            name = next(iter(weights))
            weights[name] = weights[name][:1]
            return replies

        return apply

    pids = [msg.pid for msg in skipping(federation).strategy.plan(1).messages]
    for pid in pids:
        run, expected = skipping(federation), skipping(federation)
        run.step(alter=shrink(pid))
        (failure,) = run.current.failures
        assert (failure.pid, failure.reason) == (pid, "refused")
        assert "tensor of shape" in failure.cause
        assert run.sha256 == without(expected, [other for other in pids if other != pid])


# ---- size


def test_a_reply_that_is_too_large_is_not_read(federation: Federation) -> None:
    """Beyond `replies.max_mb` neither its tensors nor an extra among the metrics is."""
    msg, res = result(federation(toy_task(), Scaffold))
    for change in (
        lambda: res.parameters.tensors.append(bytes(LIMIT)),
        lambda: res.metrics.update({"fedhet.x": bytes(LIMIT)}),
        lambda: res.metrics.update({"other": "x" * LIMIT}),
        lambda: res.metrics.update({"x" * LIMIT: 1.0}),
        lambda: res.metrics.update({"other": [1.0] * LIMIT}),
    ):
        tensors, metrics = list(res.parameters.tensors), dict(res.metrics)
        change()
        failure = wire.read_result(msg, res, LIMIT)
        assert isinstance(failure, Failure) and failure.reason == "too large"
        assert f"at most {LIMIT} are read" in failure.cause
        res.parameters, res.metrics = Parameters(tensors, "numpy.ndarray"), metrics
    assert isinstance(wire.read_result(msg, res, LIMIT), Upload)


def test_an_array_that_claims_to_be_huge(federation: Federation) -> None:
    """Its header says 16 GB; its bytes are few. Nothing of that size is allocated."""
    msg, res = result(federation(toy_task(), Scaffold))
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f8", "fortran_order": False, "shape": (2**31,)}
    )
    res.parameters.tensors[0] = file.getvalue() + bytes(80)
    tracemalloc.start()
    failure = wire.read_result(msg, res, LIMIT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(failure, Failure) and failure.reason == "unreadable"
    assert peak < 2 * LIMIT


@pytest.mark.parametrize("kind", ["object", "text", "complex", "archive", "float64"])
def test_an_array_that_is_no_tensor_of_the_model(federation: Federation, kind: str) -> None:
    run = skipping(federation)
    plan, replies = exchange(run)
    file = io.BytesIO()
    if kind == "archive":
        np.savez(file, a=np.ones(2))
    else:
        array = {
            "object": np.array([{}], dtype=object),
            "text": np.array(["x"]),
            "complex": np.ones(2, complex),
            "float64": np.ones(2),
        }[kind]
        np.save(file, array, allow_pickle=True)
    replies[0].parameters.tensors[0] = file.getvalue()
    finish_step(run, plan, replies)
    assert [failure.pid for failure in run.current.failures] == [plan[0].pid]


# ---- text


def test_what_a_client_says_stays_one_short_line(federation: Federation) -> None:
    """A cause with line breaks, control codes or 50 MB would otherwise reach log and record."""
    msg, _ = result(federation(toy_task(), Scaffold))
    cause = "\x1b[31mok\nround 9: accuracy 1.0\r" + "x" * 50_000
    arrays, n, metrics = wire.reply_arrays(msg, Failure(msg.pid, "train", 1, cause))
    failure = wire.read_reply(msg, (arrays, n, metrics))
    assert isinstance(failure, Failure)
    assert failure.cause.isprintable() and len(failure.cause) < 1100
    assert clean("\x1b[31ma\nb") == "\\x1b[31ma\\nb"
    forged = dict(metrics)
    header = json.loads(forged["fedhet"])
    del header["digest"]
    header["failure"] = cause
    forged["fedhet"] = json.dumps({**header, "digest": wire.seal(header)})
    failure = wire.read_reply(msg, (arrays, n, forged))
    assert isinstance(failure, Failure)
    assert failure.cause.isprintable() and len(failure.cause) < 1100
