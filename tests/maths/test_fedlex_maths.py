"""FedLEx, equations 3, 4 and 6: closed forms, and what must hold for every input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedhet.maths.fedlex import (
    adjusted,
    contributors,
    deviation,
    global_guidance,
    mask_gradient,
    mask_step,
)
from fedhet.trees import Tree

SHAPES = {"w": (4, 3), "b": (3,), "k": (2, 2, 2)}
NAN, INF = float("nan"), float("inf")


def draw(seed: int, explorers: int = 5) -> list[Tree]:
    """Squares over several orders of magnitude, as explorations give them."""
    g = torch.Generator().manual_seed(seed)
    return [
        {
            name: (
                (
                    torch.randn(shape, generator=g, dtype=torch.float64)
                    * 10.0 ** torch.randn(shape, generator=g)
                ).square()
            )
            for name, shape in SHAPES.items()
        }
        for _ in range(explorers)
    ]


def same(found: Tree, expected: Tree, rtol: float = 1e-12) -> None:
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=1e-15)


def test_deviation() -> None:
    found = deviation(
        {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor(0.5)},
        {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor(0.0)},
    )
    assert (
        found["a"].tolist() == [0.0, 9.0]
        and found["b"].item() == 0.25
        and found["a"].dtype == torch.float64
    )


@pytest.mark.parametrize(
    ("final", "dtype"), [(NAN, torch.float64), (INF, torch.float64), (1e25, torch.float32)]
)
def test_a_diverged_exploration_is_told(final: float, dtype: torch.dtype) -> None:
    """Also where only the square overflows in the type that is sent."""
    with pytest.raises(ValueError, match=r"'b'.*diverged"):
        deviation(
            {"a": torch.zeros(2), "b": torch.zeros(2)},
            {"a": torch.ones(2), "b": torch.tensor([0.0, final])},
            dtype,
        )


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_the_equation_read_literally(scope: str) -> None:
    explorers = draw(0)
    expected: dict[str, Any] = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for d in explorers:
        whole = np.concatenate([t.numpy().ravel() for t in d.values()])
        for name, t in d.items():
            over = t.numpy() if scope == "tensor" else whole
            expected[name] += (t.numpy() - over.min()) / (over.max() - over.min()) / len(explorers)
    found = global_guidance(explorers, scope=scope)
    for name in SHAPES:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12)


@pytest.mark.parametrize("order", ["normalise_then_mean", "mean_then_normalise"])
@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("seed", range(3))
def test_bounds_and_permutation(seed: int, scope: str, order: str) -> None:
    explorers = draw(seed)
    before = [{name: t.clone() for name, t in d.items()} for d in explorers]
    found = global_guidance(explorers, scope=scope, order=order)
    assert all(float(g.min()) >= 0 and float(g.max()) <= 1 for g in found.values())
    same(found, global_guidance(explorers[::-1], scope=scope, order=order))
    one = global_guidance(explorers[:1], scope=scope, order=order)
    assert {float(t.min()) for t in one.values()} | {float(t.max()) for t in one.values()} >= {
        0.0,
        1.0,
    }
    same(one, global_guidance(explorers[:1] * 3, scope=scope, order=order))
    assert all(
        torch.equal(d[name], old[name])
        for d, old in zip(explorers, before, strict=True)
        for name in d
    )


def test_every_tensor_spans_zero_to_one_in_the_authors_order() -> None:
    found = global_guidance(draw(1), order="mean_then_normalise")
    assert all((float(g.min()), float(g.max())) == (0.0, 1.0) for g in found.values())
    assert all(float(g.max()) < 1 for g in global_guidance(draw(1)).values())


def test_an_explorers_scale_does_not_matter_before_the_mean() -> None:
    """Nor does what is added to a tensor; in the authors' order both do."""
    explorers = draw(2)
    scaled = [{name: 10.0 ** (i - 2) * t for name, t in d.items()} for i, d in enumerate(explorers)]
    same(global_guidance(scaled), global_guidance(explorers))
    shifted = [{**d, "w": d["w"] + 1.0} for d in explorers]
    same(global_guidance(shifted), global_guidance(explorers), rtol=1e-9)
    by_mean = [global_guidance(e, order="mean_then_normalise")["w"] for e in (explorers, scaled)]
    assert float((by_mean[0] - by_mean[1]).abs().max()) > 0.1


@pytest.mark.parametrize("value", [0.0, 3.0, 1e-30])
def test_a_constant_tensor_is_neutral_for_its_explorer(value: float) -> None:
    """One-element tensors too; 1 + 1e-13 counts as constant, 1 + 1e-11 does not."""
    first = {"a": torch.full((3,), value), "one": torch.tensor([7.0])}
    second = {"a": torch.tensor([0.0, 1.0, 4.0]), "one": torch.tensor([0.0])}
    found = global_guidance([first, second])
    assert found["a"].tolist() == [0.5, 0.625, 1.0] and found["one"].tolist() == [1.0]
    near, far = (
        global_guidance([{"a": torch.tensor([1.0, 1.0 + d], dtype=torch.float64)}])["a"]
        for d in (1e-13, 1e-11)
    )
    assert near.tolist() == [1.0, 1.0] and far.tolist() == [0.0, 1.0]


def test_where_nothing_moves_the_mask_is_one() -> None:
    still = [{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * 3
    for scope in ("tensor", "model"):
        for order in ("normalise_then_mean", "mean_then_normalise"):
            for rescale in ("none", "mean1"):
                found = adjusted(global_guidance(still, scope=scope, order=order), rescale, 0.3)
                assert all(torch.equal(g, torch.ones_like(g)) for g in found.values())


def test_rescaling_and_the_floor() -> None:
    guidance = global_guidance(draw(3))
    assert all(torch.equal(g, guidance[name]) for name, g in adjusted(guidance).items())
    for name, g in adjusted(guidance, "mean1").items():
        assert float(g.mean()) == pytest.approx(1, rel=1e-12)
        torch.testing.assert_close(
            g / g.max(), guidance[name] / guidance[name].max(), rtol=1e-12, atol=0
        )
    floored = adjusted(guidance, g_min=0.25)
    for name, g in floored.items():
        torch.testing.assert_close(g, 0.25 + 0.75 * guidance[name], rtol=1e-12, atol=0)
    both = adjusted(guidance, "mean1", 0.25)
    assert all(
        float(g.mean()) == pytest.approx(1, rel=1e-12) and float(g.min()) >= 0.25
        for g in both.values()
    )


def test_a_tensor_whose_mask_is_zero_throughout_is_rescaled_to_one() -> None:
    """Over the whole model "b" holds nothing but the smallest D, so that G / mean(G) would be
    0/0."""
    guidance = global_guidance(
        [{"a": torch.tensor([0.0, 1.0, 4.0]), "b": torch.tensor([0.0, 0.0])}], scope="model"
    )
    assert guidance["b"].tolist() == [0.0, 0.0]
    found = adjusted(guidance, "mean1")
    assert found["b"].tolist() == [1.0, 1.0] and found["a"].tolist() == pytest.approx(
        [0.0, 0.6, 2.4]
    )
    assert adjusted(guidance)["b"].tolist() == [0.0, 0.0] and adjusted(guidance, "mean1", 0.25)[
        "b"
    ].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("participants", "how", "expected"),
    [
        ([4, 2, 0], {"first": True}, [7, 2, 5]),
        ([4, 2, 0], {"first": False}, [2]),
        (
            [5, 4, 7],
            {"first": False},
            [7, 5],
        ),  # in the explorers' order, whatever the participants'
        ([0, 1], {"first": False}, None),
        ([0, 1], {"first": True}, [7, 2, 5]),
        ([0, 1], {"first": False, "empty": "all"}, [7, 2, 5]),
        ([2, 1], {"first": False, "empty": "all"}, [2]),
        ([2, 1], {"first": False, "refresh": "all"}, [7, 2, 5]),
    ],
)
def test_whose_deviations_count(
    participants: list[int], how: dict[str, Any], expected: list[int] | None
) -> None:
    assert contributors([7, 2, 5], participants, **how) == expected


def test_masks() -> None:
    grads = [torch.tensor([2.0, -3.0, 5.0]), torch.tensor(4.0)]
    mask_gradient(grads, [torch.tensor([0.0, 1.0, 0.5]), torch.tensor(0.25)])
    assert grads[0].tolist() == [0.0, -3.0, 2.5] and grads[1].item() == 1.0


def test_a_masked_step_is_exact_at_zero_and_one() -> None:
    g = torch.Generator().manual_seed(0)
    before, after = (
        torch.randn(500, generator=g) * 10.0 ** torch.randint(-15, 15, (500,), generator=g)
        for _ in range(2)
    )
    for mask, expected in ((torch.zeros(500), before), (torch.ones(500), after)):
        w = after.clone()
        mask_step([w], [before], [mask])
        assert torch.equal(w, expected)
    w = torch.tensor([3.0, 3.0])
    mask_step([w], [torch.tensor([1.0, 1.0])], [torch.tensor([0.25, 2.0])])
    assert w.tolist() == [1.5, 5.0]


GOOD = {"a": torch.tensor([0.0, 1.0])}


@pytest.mark.parametrize(
    ("deviations", "how", "said"),
    [
        ([], {}, "0 explorers"),
        ([{}], {}, "0 tensors"),
        ([GOOD, {"a": torch.tensor([0.0, NAN])}], {}, "explorer 1, tensor 'a'"),
        ([{"a": torch.tensor([0.0, INF])}, GOOD], {}, "explorer 0, tensor 'a'"),
        ([GOOD, {"a": torch.tensor([0.0, -1e-9])}], {}, "explorer 1, tensor 'a'.*>= 0"),
        ([GOOD, {"b": torch.ones(2)}], {}, "explorer 1 has the tensors"),
        ([GOOD], {"scope": "layer"}, "scope='layer'"),
        ([GOOD], {"order": "mean"}, "order='mean'"),
    ],
)
def test_bad_input_is_named(
    deviations: Sequence[dict[str, Tensor]], how: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        global_guidance(deviations, **how)
