"""The losses of MOON, FedNTD and FedROD: closed forms and invariances."""

from __future__ import annotations

import math

import pytest
import torch
from maths.cases import named_case
from torch import Tensor
from torch.nn import functional

from fedhet.methods.fedntd import not_true_distillation
from fedhet.methods.fedrod import balanced_softmax
from fedhet.methods.moon import contrastive


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


Y = torch.tensor([2, 0, 4, 1, 1, 3])
LOGITS, GLOBAL = draw(6, 5), draw(6, 5, seed=1)


# ---- MOON
def test_contrast_at_known_angles() -> None:
    """The features are along x, the global ones along x, y, -x, and the previous ones along y.

    Thus s_g - s_p = 1, 0, -1.
    """
    x, y = torch.eye(2, dtype=torch.float64)
    z, z_global, z_previous = (torch.stack(rows) for rows in ([x, x, x], [x, y, -x], [y, y, y]))
    expected = [math.log1p(math.exp(-2)), math.log(2), math.log1p(math.exp(2))]
    losses = contrastive(z, z_global, z_previous, 0.5)
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64))


def test_contrast_depends_on_directions_only() -> None:
    z, a, b = draw(6, 3), draw(6, 3, seed=1), draw(6, 3, seed=2)
    torch.testing.assert_close(contrastive(7 * z, 0.1 * a, 3 * b, 0.5), contrastive(z, a, b, 0.5))


def test_contrast_of_zero_features_is_log_two() -> None:
    losses = contrastive(torch.zeros(2, 3), torch.ones(2, 3), -torch.ones(2, 3), 0.5)
    assert losses.tolist() == pytest.approx([math.log(2)] * 2)


def test_contrast_at_a_tiny_temperature_is_finite() -> None:
    x = torch.tensor([[1.0, 0.0]])
    assert contrastive(x, -x, x, 1e-6).tolist() == pytest.approx([2e6])
    assert contrastive(x, x, -x, 1e-6).tolist() == [0.0]


# ---- FedNTD
def test_distillation_by_its_definition() -> None:
    for tau in [1.0, 3.0]:
        with named_case(tau):
            losses = not_true_distillation(LOGITS, GLOBAL, Y, tau)
            for i, y in enumerate(Y.tolist()):
                others = [c for c in range(5) if c != y]
                p, q = ([math.exp(float(t[i, c]) / tau) for c in others] for t in (GLOBAL, LOGITS))
                p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
                expected = tau**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
                assert float(losses[i]) == pytest.approx(expected, rel=1e-12)


def test_distillation_leaves_the_label_free() -> None:
    """The label's logit matters on neither side and gets no gradient; equal logits give 0."""
    label = functional.one_hot(Y, 5).double()
    expected = not_true_distillation(LOGITS, GLOBAL, Y, 2.0)
    shifted = not_true_distillation(LOGITS + 9 * label, GLOBAL - 5 * label, Y, 2.0)
    assert torch.equal(shifted, expected) and expected.min() > 0
    logits = LOGITS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(not_true_distillation(logits, GLOBAL, Y, 2.0).sum(), logits)
    assert grad[label.bool()].tolist() == [0.0] * 6 and grad.abs().sum(1).min() > 0
    equal = not_true_distillation(LOGITS + 4, LOGITS, Y, 2.0)
    torch.testing.assert_close(equal, torch.zeros(6, dtype=torch.float64))


def test_two_classes_leave_nothing_to_distil() -> None:
    two = not_true_distillation(draw(3, 2), draw(3, 2, seed=1), torch.tensor([0, 1, 1]), 1.0)
    assert two.tolist() == [0.0] * 3


# ---- FedROD
def test_balanced_softmax_by_its_definition() -> None:
    """-log(n_y^gamma e^{l_y} / sum_c n_c^gamma e^{l_c}); a class without samples is left out."""
    for gamma in [1.0, 0.5]:
        with named_case(gamma):
            counts = torch.tensor([7, 1, 30, 2, 4, 0])
            logits = draw(6, 6)
            logits[:, 5] = 50
            weighted = counts**gamma * logits.exp()
            expected = -(weighted[range(6), Y] / weighted.sum(1)).log()
            torch.testing.assert_close(balanced_softmax(logits, Y, counts, gamma), expected)


def test_balanced_softmax_reduces_to_cross_entropy() -> None:
    """Bit for bit with gamma = 0, also if a class is missing; with equal counts for every gamma."""
    plain = functional.cross_entropy(LOGITS, Y, reduction="none")
    assert torch.equal(balanced_softmax(LOGITS, Y, torch.tensor([5, 1, 2, 3, 9]), 0.0), plain)
    missing = balanced_softmax(LOGITS, Y % 4, torch.tensor([5, 1, 2, 3, 0]), 0.0)
    assert torch.equal(missing, functional.cross_entropy(LOGITS, Y % 4, reduction="none"))
    torch.testing.assert_close(balanced_softmax(LOGITS, Y, torch.full((5,), 8), 3.0), plain)


def test_a_label_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"count 0.*\[1, 1, 1, 1, 0\]"):
        balanced_softmax(LOGITS, Y, torch.tensor([1, 1, 1, 1, 0]), 1.0)
