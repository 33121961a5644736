"""Thousands of damaged and forged replies: reading them raises nothing, and none spoils a merge."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from contracts.hostile import LIMIT, Federation, Header, exchange, forge, skipping
from flwr.common import FitRes, Parameters

from fedhet import trees
from fedhet.flower import wire
from fedhet.messages import Failure, Update

NASTY = [
    None,
    True,
    -1,
    0,
    1,
    10**18,
    10**400,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "%100000000000000d",
    "../../x",
    "x" * 10_000,
    [],
    {},
    [[]] * 100,
    {"a": 1},
    ["a", "a"],
]


def damage(res: FitRes, draw: random.Random) -> None:
    """Change one or five bits of one randomly chosen part of the reply."""
    tensors = list(res.parameters.tensors)
    parts = [key for key, value in res.metrics.items() if isinstance(value, bytes | str)]
    part = draw.choice(parts + [str(i) for i in range(len(tensors))])
    for _ in range(draw.choice([1, 1, 5])):
        if part.isdigit():
            tensors[int(part)] = flipped(tensors[int(part)], draw)
        elif isinstance(value := res.metrics[part], str):
            res.metrics[part] = flipped(value.encode("latin1"), draw).decode("latin1")
        else:
            res.metrics[part] = flipped(value, draw)  # type: ignore[arg-type]
    res.parameters = Parameters(tensors, "numpy.ndarray")


def flipped(value: bytes, draw: random.Random) -> bytes:
    """The bytes with one bit changed."""
    at = draw.randrange(len(value))
    return value[:at] + bytes([value[at] ^ (1 << draw.randrange(8))]) + value[at + 1 :]


def mutate(header: Header, draw: random.Random) -> None:
    """Put a nasty value somewhere into the header, or remove something."""
    level: Any = header
    while True:
        key = draw.choice(list(level)) if isinstance(level, dict) else draw.randrange(len(level))
        inner = level[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.6:
            level = inner
            continue
        if draw.random() < 0.2:
            del level[key]
        else:
            level[key] = draw.choice(NASTY)
        return


CASES = [
    pytest.param(150, id="150"),
    pytest.param(1000, id="1000", marks=pytest.mark.slow),
    pytest.param(10_000, id="10000", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("way", ["bits", "header"])
def test_fuzzed_replies(federation: Federation, way: str, cases: int) -> None:
    """Reading raises nothing. Damaged bits are always noticed, forged headers often.

    What passes is an update, which then passes all checks or is refused by them.
    """
    draw = random.Random(0)
    run = skipping(federation)
    plan, replies = exchange(run)
    msg, intact = plan[0], replies[0]
    original = wire.read_result(msg, intact, LIMIT)
    noticed = 0
    tracemalloc.start()
    for _ in range(cases):
        parameters = Parameters(list(intact.parameters.tensors), "numpy.ndarray")
        res = FitRes(intact.status, parameters, intact.num_examples, dict(intact.metrics))
        if way == "bits":
            damage(res, draw)
        else:
            forge(res, lambda header: mutate(header, draw))
        reply = wire.read_result(msg, res, LIMIT)
        noticed += isinstance(reply, Failure)
        if isinstance(reply, Update):
            if way == "bits":  # such as a bit that stands for nothing: the content is the same
                assert same(reply, original)
            run.strategy.plan(1)
            run.strategy.settle([reply, wire.read_result(plan[1], replies[1], LIMIT)])
            assert trees.first_nonfinite(run.model) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert noticed > cases * (0.9 if way == "bits" else 0.5)
    assert peak < 2 * LIMIT + 2**23


def same(one: Any, other: Any) -> bool:
    weights = trees.sha256({"": one.weights}) == trees.sha256({"": other.weights})
    return weights and (one.pid, one.num_examples, one.metrics, one.keeps) == (
        other.pid,
        other.num_examples,
        other.metrics,
        other.keeps,
    )
