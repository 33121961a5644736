"""Checks of single settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fedhet.core import check
from fedhet.core.errors import ConfigError


@pytest.mark.parametrize("value", [0, 0.0, 1, 0.5, np.float64(0.5), np.int64(1)])
def test_a_number_in_its_range_is_returned_as_a_float(value: float) -> None:
    checked = check.number("k", value, low=0, high=1)
    assert type(checked) is float
    assert checked == value


@pytest.mark.parametrize("value", [True, "1", None, math.nan, math.inf, -math.inf, [1], 1j])
def test_only_finite_numbers_are_numbers(value: object) -> None:
    message = r"^plugin\.x\.mu=.*number >= 0$"
    with pytest.raises(ConfigError, match=message):
        check.number("plugin.x.mu", value, low=0)


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "interval"),
    [
        ({"low": 2}, [2, 3], [1.9], ">= 2"),
        ({"open_low": 2}, [2.1], [2, 1], "> 2"),
        ({"high": 2}, [2, 1], [2.1], "<= 2"),
        ({"open_high": 2}, [1.9], [2, 3], "< 2"),
        ({"open_low": 0, "high": 1}, [1e-9, 1], [0, 1.1], "> 0 and <= 1"),
        ({"low": 0, "open_high": 1}, [0, 0.9], [-0.1, 1], ">= 0 and < 1"),
    ],
)
def test_open_and_closed_ends(
    limits: dict[str, float], inside: list[float], outside: list[float], interval: str
) -> None:
    for value in inside:
        assert check.number("k", value, **limits) == value
    for value in outside:
        with pytest.raises(ConfigError) as caught:
            check.number("k", value, **limits)
        said = str(caught.value)
        assert said.startswith(f"k={value} ") and said.endswith(f" number {interval}")


@pytest.mark.parametrize("value", [1.0, True, "1", None, 0, math.nan])
def test_integers_are_whole_numbers_in_their_range(value: object) -> None:
    assert check.integer("k", np.int64(1), low=1) == 1
    with pytest.raises(ConfigError, match=r"^k=.* whole number >= 1 and <= 9$"):
        check.integer("k", value, low=1, high=9)


@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_only_true_and_false_are_booleans(value: object) -> None:
    assert check.boolean("k", False) is False
    with pytest.raises(ConfigError, match=r"^k=.*true or false"):
        check.boolean("k", value)


def test_one_of_suggests_the_closest_word() -> None:
    words = ("average", "local", "frozen")
    assert check.one_of("buffers", "local", words) == "local"
    with pytest.raises(ConfigError, match=r"buffers=frosen .*frozen\?.*average, local, frozen"):
        check.one_of("buffers", "frosen", words)
    with pytest.raises(ConfigError, match=r"buffers=null .*average, local, frozen"):
        check.one_of("buffers", None, words)


def test_optional_allows_null_and_says_so() -> None:
    assert check.optional(check.number, "clip", None, open_low=0) is None
    assert check.optional(check.number, "clip", 2, open_low=0) == 2.0
    message = "clip=0 .* > 0, or null"
    with pytest.raises(ConfigError, match=message):
        check.optional(check.number, "clip", 0, open_low=0)


def test_text_is_not_empty() -> None:
    assert check.text("data_dir", "data") == "data"
    for value in ("", None, 3):
        with pytest.raises(ConfigError, match=r"data_dir=.* text"):
            check.text("data_dir", value)


def test_each_names_the_place_in_the_list() -> None:
    assert check.each(check.integer, "hidden", [1, 2], low=1) == (1, 2)
    for value, message in (
        ([1, 0], r"hidden\[1\]=0 .*whole number >= 1"),
        ("12", "hidden=12 .* a list"),
        (None, "hidden=null .* a list"),
    ):
        with pytest.raises(ConfigError, match=message):
            check.each(check.integer, "hidden", value, low=1)


@dataclass(frozen=True)
class Mine(check.Checked):
    GROUP = "mine"
    share: float = check.setting(low=0, high=1)
    flag: bool = False
    name: str | None = None
    kind: str = check.setting("a", name="other.kind", allowed=("a", "b"))
    free: int | str = "auto"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": 2}, r"mine\.share=2 .*number >= 0 and <= 1"),
        ({"share": None}, r"mine\.share=null .*number >= 0 and <= 1"),
        ({"flag": 1}, r"mine\.flag=1 .*true or false"),
        ({"name": ""}, r"mine\.name= .*text, or null"),
        ({"kind": "c"}, r"other\.kind=c .*: a, b"),
    ],
)
def test_fields_are_checked_by_their_types_and_limits(given: dict[str, Any], message: str) -> None:
    assert Mine(share=0.5, name=None, free=[]).kind == "a"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^{message}$"):
        Mine(**{"share": 1, **given})
