"""Thousands of damaged and forged replies: reading them raises nothing, and none spoils a merge."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from contracts.fuzzing import CASES, damage, mutate
from contracts.hostile import LIMIT, Federation, exchange, forge, skipping
from flwr.common import FitRes, Parameters

from fedhet.core import trees
from fedhet.core.messages import Failure, Upload
from fedhet.flower import wire


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
        if isinstance(reply, Upload):
            if way == "bits":  # such as a bit that stands for nothing: the content is the same
                assert same(reply, original)
            other = wire.read_result(plan[1], replies[1], LIMIT)
            run.strategy.finish_step(run.strategy.plan(1), [reply, other])
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
