"""Damage and forgery at random, for what comes from another process."""

from __future__ import annotations

import random
from typing import Any

import pytest
from flwr.common import FitRes, Parameters

NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    10**15,
    2**53 - 1,
    2**53,
    2**53 + 1,
    -(2**53) - 1,
    2**62,
    2**62 + 1,
    10**18,
    10**400,
    1e15,
    1e16,
    1e308,
    -1e308,
    float("-inf"),
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


def mutate(content: dict[str, Any], draw: random.Random) -> None:
    """Put a nasty value somewhere into the content, or remove something."""
    level: Any = content
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
