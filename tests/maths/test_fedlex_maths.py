"""FedLEx, equations 3, 4 and 6: closed forms, and properties that hold for every input."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from maths.cases import named_case
from torch import Tensor

from fedhet.core import trees
from fedhet.core.authors import as_given
from fedhet.core.client.optimizers import ScaledSteps
from fedhet.core.client.training import alter
from fedhet.core.kernel import Term
from fedhet.core.trees import Tree
from fedhet.methods.fedlex import adjusted, contributors, deviation, global_guidance

SHAPES = {"w": (4, 3), "b": (3,), "k": (2, 2, 2)}
NAN, INF = float("nan"), float("inf")
SCOPES = ["tensor", "model"]
ORDERS = ["normalise_then_mean", "mean_then_normalise"]


def draw(seed: int, explorers: int = 5) -> list[Tree]:
    """Squares over several orders of magnitude, as explorations give them."""
    g = torch.Generator().manual_seed(seed)

    def squares(shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=g, dtype=torch.float64)
        return (values * 10.0 ** torch.randn(shape, generator=g)).square()

    return [{name: squares(shape) for name, shape in SHAPES.items()} for _ in range(explorers)]


def assert_close(actual: Tree, expected: Tree, rtol: float = 1e-12) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=rtol, atol=1e-15)


def test_deviation() -> None:
    d = deviation(
        {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor(0.5)},
        {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor(0.0)},
    )
    assert d["a"].tolist() == [0.0, 9.0] and d["b"].item() == 0.25
    assert d["a"].dtype == torch.float64


def test_a_diverged_exploration_is_reported() -> None:
    """Also if only the square overflows, in the type that is sent."""
    for final, dtype in [(NAN, torch.float64), (INF, torch.float64), (1e25, torch.float32)]:
        with named_case(final, dtype):
            start = {"a": torch.zeros(2), "b": torch.zeros(2)}
            end = {"a": torch.ones(2), "b": torch.tensor([0.0, final])}
            with pytest.raises(ValueError, match=r"'b'.*diverged"):
                deviation(start, end, dtype)


def test_the_equation_read_literally() -> None:
    for scope in SCOPES:
        with named_case(scope):
            explorers = draw(0)
            expected: dict[str, Any] = {name: np.zeros(shape) for name, shape in SHAPES.items()}
            for d in explorers:
                whole = np.concatenate([t.numpy().ravel() for t in d.values()])
                for name, t in d.items():
                    values = t.numpy() if scope == "tensor" else whole
                    low, high = values.min(), values.max()
                    expected[name] += (t.numpy() - low) / (high - low) / len(explorers)
            guidance = global_guidance(explorers, scope=scope)
            for name in SHAPES:
                np.testing.assert_allclose(guidance[name], expected[name], rtol=1e-12)


def test_minima_and_maxima_over_each_explorer_or_over_all() -> None:
    """Over all, a_i counts by what it is in the common range: b of the second explorer is 8."""
    first = {"a": torch.tensor([0.0, 1.0, 4.0]), "b": torch.tensor([5.0, 5.0])}
    second = {"a": torch.tensor([2.0, 8.0, 4.0]), "b": torch.tensor([5.0, 15.0])}
    explorers = [first, second]
    each = global_guidance(explorers)
    assert each["a"].tolist() == pytest.approx([0, (1 / 4 + 1) / 2, (1 + 1 / 3) / 2])
    assert each["b"].tolist() == [0.5, 1.0]  # a constant D counts as 1
    joint = global_guidance(explorers, minmax="all")
    assert joint["a"].tolist() == [1 / 8, 9 / 16, 1 / 2]
    assert joint["b"].tolist() == [0.0, 0.5]
    whole = global_guidance(explorers, minmax="all", scope="model")
    assert whole["a"].tolist() == pytest.approx([1 / 15, 4.5 / 15, 4 / 15])
    assert whole["b"].tolist() == pytest.approx([5 / 15, 10 / 15])
    assert_close(global_guidance([first], minmax="all"), global_guidance([first]))


def test_over_all_explorers_the_mean_may_come_first() -> None:
    """The range is the same for all, so G = (mean D - min) / (max - min)."""
    for scope in SCOPES:
        with named_case(scope):
            explorers = draw(4)
            guidance = global_guidance(explorers, scope=scope, minmax="all")
            whole = np.concatenate([t.numpy().ravel() for d in explorers for t in d.values()])
            for name in SHAPES:
                stacked = np.stack([d[name].numpy() for d in explorers])
                values = stacked if scope == "tensor" else whole
                low, high = values.min(), values.max()
                expected = (stacked.mean(0) - low) / (high - low)
                np.testing.assert_allclose(guidance[name], expected, rtol=1e-10, atol=1e-15)


def test_the_range_of_a_mean_is_its_own() -> None:
    """In the authors' order there is one D, so both readings are the same."""
    for minmax in ["explorer", "all"]:
        with named_case(minmax):
            guidance = global_guidance(draw(5), order="mean_then_normalise", minmax=minmax)
            assert_close(guidance, global_guidance(draw(5), order="mean_then_normalise"))


def test_bounds_and_permutation() -> None:
    for order, scope, seed in itertools.product(ORDERS, SCOPES, range(3)):
        with named_case(order, scope, seed):
            explorers = draw(seed)
            before = [{name: t.clone() for name, t in d.items()} for d in explorers]
            guidance = global_guidance(explorers, scope=scope, order=order)
            assert all(float(g.min()) >= 0 and float(g.max()) <= 1 for g in guidance.values())
            assert_close(guidance, global_guidance(explorers[::-1], scope=scope, order=order))
            one = global_guidance(explorers[:1], scope=scope, order=order)
            extremes = {float(bound) for t in one.values() for bound in t.aminmax()}
            assert extremes >= {0.0, 1.0}
            assert_close(one, global_guidance(explorers[:1] * 3, scope=scope, order=order))
            for d, old in zip(explorers, before, strict=True):
                assert all(torch.equal(d[name], old[name]) for name in d)  # left unchanged


def test_every_tensor_spans_zero_to_one_in_the_authors_order() -> None:
    guidance = global_guidance(draw(1), order="mean_then_normalise")
    assert all((float(g.min()), float(g.max())) == (0.0, 1.0) for g in guidance.values())
    assert all(float(g.max()) < 1 for g in global_guidance(draw(1)).values())


def test_the_sum_over_the_explorers_is_the_mean_times_their_number() -> None:
    """By hand: of (0, 1/4, 1) and (0, 1, 1/2) the sum is (0, 5/4, 3/2), and 1 + 3/4 of its part."""
    d = [torch.tensor([1.0, 2.0, 5.0]), torch.tensor([3.0, 5.0, 4.0])]
    guidance = global_guidance([{"a": each} for each in d])
    assert adjusted(guidance, "sum", explorers=2)["a"].tolist() == [0.0, 1.25, 1.5]
    floor = adjusted(guidance, "sum", 0.5, explorers=2)["a"]
    assert floor.tolist() == [0.5, 0.5 + 0.625, 0.5 + 0.75]
    assert_close(adjusted(guidance, "sum", explorers=1), guidance)


def test_an_explorers_scale_does_not_matter_before_the_mean() -> None:
    """Nor does a constant that is added to a tensor; in the authors' order both do."""
    explorers = draw(2)
    scaled = [{name: 10.0 ** (i - 2) * t for name, t in d.items()} for i, d in enumerate(explorers)]
    assert_close(global_guidance(scaled), global_guidance(explorers))
    shifted = [{**d, "w": d["w"] + 1.0} for d in explorers]
    assert_close(global_guidance(shifted), global_guidance(explorers), rtol=1e-9)
    by_mean = [global_guidance(e, order="mean_then_normalise")["w"] for e in (explorers, scaled)]
    assert float((by_mean[0] - by_mean[1]).abs().max()) > 0.1


def test_a_constant_tensor_is_neutral_for_its_explorer() -> None:
    """Also a one-element tensor; 1 + 1e-13 counts as constant, 1 + 1e-11 does not."""
    for value in [0.0, 3.0, 1e-30]:
        with named_case(value):
            first = {"a": torch.full((3,), value), "one": torch.tensor([7.0])}
            second = {"a": torch.tensor([0.0, 1.0, 4.0]), "one": torch.tensor([0.0])}
            guidance = global_guidance([first, second])
            assert guidance["a"].tolist() == [0.5, 0.625, 1.0] and guidance["one"].tolist() == [1.0]
            for spread, expected in ((1e-13, [1.0, 1.0]), (1e-11, [0.0, 1.0])):
                d = {"a": torch.tensor([1.0, 1.0 + spread], dtype=torch.float64)}
                assert global_guidance([d])["a"].tolist() == expected


def test_the_mask_is_one_where_nothing_moves() -> None:
    still = [{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * 3
    for rescale, order, scope in itertools.product(["none", "mean1"], ORDERS, SCOPES):
        with named_case(rescale, order, scope):
            mask = adjusted(global_guidance(still, scope=scope, order=order), rescale, 0.3)
            assert all(torch.equal(g, torch.ones_like(g)) for g in mask.values())


def test_rescaling_and_the_floor() -> None:
    guidance = global_guidance(draw(3))
    assert all(torch.equal(g, guidance[name]) for name, g in adjusted(guidance).items())
    for name, g in adjusted(guidance, "mean1").items():
        assert float(g.mean()) == pytest.approx(1, rel=1e-12)
        expected = guidance[name] / guidance[name].max()
        torch.testing.assert_close(g / g.max(), expected, rtol=1e-12, atol=0)
    floored = adjusted(guidance, g_min=0.25)
    for name, g in floored.items():
        torch.testing.assert_close(g, 0.25 + 0.75 * guidance[name], rtol=1e-12, atol=0)
    for g in adjusted(guidance, "mean1", 0.25).values():
        assert float(g.mean()) == pytest.approx(1, rel=1e-12)
        assert float(g.min()) >= 0.25


def test_a_tensor_whose_mask_is_zero_throughout_is_rescaled_to_one() -> None:
    """With scope="model", "b" holds nothing but the smallest D, and G / mean(G) would be 0/0."""
    d = {"a": torch.tensor([0.0, 1.0, 4.0]), "b": torch.tensor([0.0, 0.0])}
    guidance = global_guidance([d], scope="model")
    assert guidance["b"].tolist() == [0.0, 0.0]
    rescaled = adjusted(guidance, "mean1")
    assert rescaled["a"].tolist() == pytest.approx([0.0, 0.6, 2.4])
    assert rescaled["b"].tolist() == [1.0, 1.0]
    assert adjusted(guidance)["b"].tolist() == [0.0, 0.0]
    assert adjusted(guidance, "mean1", 0.25)["b"].tolist() == [1.0, 1.0]


def test_whose_deviations_count() -> None:
    cases = [
        ([4, 2, 0], [], {}, [7, 2, 5]),
        ([4, 2, 0], [7, 5], {}, [2]),
        # in the order of the explorers, not in that of the participants
        ([5, 4, 7], [2], {}, [7, 5]),
        ([0, 1], [7, 5], {}, [7, 5]),
        ([0, 1], [], {}, [7, 2, 5]),
        ([0, 1], [7], {"empty": "all"}, [7, 2, 5]),
        ([2, 1], [7], {"empty": "all"}, [2]),
        ([2, 1], [7], {"refresh": "all"}, [7, 2, 5]),
    ]
    for participants, last, options, expected in cases:
        with named_case(participants, last, options, expected):
            assert contributors([7, 2, 5], participants, last, **options) == expected


def test_masks() -> None:
    grads = {"a": torch.tensor([2.0, -3.0, 5.0]), "b": torch.tensor(4.0), "kept": torch.ones(1)}
    guidance = {"a": torch.tensor([0.0, 1.0, 0.5]), "b": torch.tensor(0.25)}
    alter(Term("scale", as_given), grads, {}, guidance)
    assert grads["a"].tolist() == [0.0, -3.0, 2.5] and grads["b"].item() == 1.0
    assert grads["kept"].item() == 1.0  # a tensor that clients keep has no mask


class To:
    """An optimiser with a step to this value, whatever the gradient."""

    def __init__(self, w: Tensor, value: Tensor) -> None:
        self.w = w
        self.value = value

    def step(self, grads: list[Tensor]) -> None:
        self.w.copy_(self.value)


def masked_step(before: Tensor, after: Tensor, guidance: Tensor) -> Tensor:
    w = before.clone()
    factors = as_given({"w": w}, None, {"w": guidance})
    ScaledSteps(To(w, after), *trees.columns(factors, {"w": w}, factors)).step([])
    return w


def test_a_masked_step_is_exact_at_zero_and_one() -> None:
    g = torch.Generator().manual_seed(0)

    def values() -> Tensor:
        return torch.randn(500, generator=g) * 10.0 ** torch.randint(-15, 15, (500,), generator=g)

    before, after = values(), values()
    for guidance, expected in ((torch.zeros(500), before), (torch.ones(500), after)):
        assert torch.equal(masked_step(before, after, guidance), expected)
    w = masked_step(torch.ones(2), torch.full((2,), 3.0), torch.tensor([0.25, 2.0]))
    assert w.tolist() == [1.5, 5.0]
