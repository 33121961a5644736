"""Published cases, computed by independent float64 code.

manifest.json says what each case takes and returns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from maths.cases import named_case
from vectors.adapter import replay

HERE = Path(__file__).parent
CASES = json.loads((HERE / "manifest.json").read_text())


def arrays(case: dict[str, Any], way: str) -> dict[str, np.ndarray]:
    with np.load(HERE / f"{case['method']}.npz") as archive:
        return {name: archive[f"{case['id']}|{way}|{name}"] for name in case[way]}


@pytest.mark.parametrize(("method", "fn"), sorted({(case["method"], case["fn"]) for case in CASES}))
def test_cases(method: str, fn: str) -> None:
    for case in CASES:
        if (case["method"], case["fn"]) == (method, fn):
            with named_case(case["id"]):
                check(case)


def check(case: dict[str, Any]) -> None:
    """The package computes what the case says, or refuses it, and leaves the inputs unchanged."""
    inputs = arrays(case, "in")
    before = {name: array.copy() for name, array in inputs.items()}
    if case["raises"]:
        with pytest.raises(ValueError, match=r"\w"):
            replay(case["method"], case["fn"], case["params"], inputs)
        return
    outputs = replay(case["method"], case["fn"], case["params"], inputs)
    for name, expected in {**arrays(case, "out"), **case["expect"]}.items():
        if expected is None or is_nested(expected):
            assert outputs[name] == expected, name
        else:
            np.testing.assert_allclose(
                outputs[name], expected, rtol=case["rtol"], atol=case["atol"], err_msg=name
            )
    for name, array in before.items():
        np.testing.assert_array_equal(inputs[name], array, err_msg=f"{name} was changed in place")


def is_nested(expected: Any) -> bool:
    """Whether it is a list of lists, such as groups of unequal sizes, which form no array."""
    return isinstance(expected, list) and any(isinstance(part, list) for part in expected)


def test_an_unknown_function_is_reported() -> None:
    with pytest.raises(LookupError, match="hosts/nothing"):
        replay("hosts", "nothing", {}, {})
