"""FedPCL's equations, term by term."""

from __future__ import annotations

import numpy as np
import torch
from maths.cases import named_case
from torch.nn import functional

from fedhet.methods import fedpcl as maths

KNOWN = torch.tensor([True, True, False, True])


def test_losses_by_loops() -> None:
    draw = np.random.default_rng(0)
    z = functional.normalize(torch.from_numpy(draw.normal(size=(5, 3)))).numpy()
    y = np.array([0, 1, 3, 3, 0])
    mean = draw.normal(size=(4, 3))
    sets = draw.normal(size=(2, 4, 3))

    def term(b: int, rows: np.ndarray, denominator: str) -> float:
        s = rows @ z[b] / 0.2
        classes = [c for c in (0, 1, 3) if denominator == "all" or c != y[b]]
        return float(-s[y[b]] + np.log(np.exp(s[classes]).sum()))

    tensors = [torch.from_numpy(a) for a in (z, y, mean, sets)]
    for denominator in ("all", "others"):
        with named_case(denominator):
            expected = [
                term(b, mean, denominator) + np.mean([term(b, rows, denominator) for rows in sets])
                for b in range(5)
            ]
            losses = maths.losses(*tensors, KNOWN, 0.2, denominator)  # type: ignore[call-arg, arg-type]
            np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_unknown_classes_have_neither_loss_nor_gradient() -> None:
    for denominator in ("all", "others"):
        for known in [KNOWN, torch.tensor([1, 0, 0, 0]).bool(), torch.zeros(4).bool()]:
            with named_case(denominator, known):
                draws = torch.Generator().manual_seed(0)
                scores = torch.randn(2, 4, 4, generator=draws).requires_grad_()
                losses = maths.contrast(scores, torch.arange(4), known, denominator)
                (grad,) = torch.autograd.grad(losses.sum(), scores)
                contrasted = known & (known.sum() > 1)
                assert torch.isfinite(losses).all() and torch.isfinite(grad).all()
                assert torch.equal(losses != 0, contrasted.expand(2, 4))
                assert torch.equal(grad.abs().sum((0, 2)) > 0, contrasted)
                assert not grad[..., ~known].any()


def test_rows_are_classes_so_perfect_features_have_almost_no_loss() -> None:
    """Whatever the order of the labels is, and whichever classes a client lacks."""
    corners = torch.eye(5)
    y = torch.tensor([3, 3, 0, 4, 1, 2, 0])
    mean, has = maths.prototypes(corners[y], y, 5)
    assert torch.equal(mean.float(), corners) and has.all()
    some, some_has = maths.prototypes(corners[y[:3]], y[:3], 5)
    assert some_has.tolist() == [True, False, False, True, False] and not some[[1, 2, 4]].any()
    means, owned = torch.stack([some, mean]), torch.stack([some_has, has])
    pooled, known = maths.pooled(means, owned)
    assert torch.equal(pooled, mean) and known.all()
    prototypes = pooled.float(), torch.where(owned[..., None], means, pooled).float()
    right = maths.losses(corners[y], y, *prototypes, known, 0.07, "all")
    wrong = maths.losses(corners[y], y.roll(1), *prototypes, known, 0.07, "all")
    assert float(right.max()) < 1e-4
    assert float(wrong.mean()) > 10


def test_prototypes_are_plain_means_over_samples_and_over_clients() -> None:
    draw = np.random.default_rng(1)
    z, y = draw.normal(size=(6, 2)), np.array([2, 0, 2, 2, 0, 2])
    mean, _ = maths.prototypes(torch.from_numpy(z), torch.from_numpy(y), 3)
    np.testing.assert_allclose(mean[[0, 2]], [z[y == 0].mean(0), z[y == 2].mean(0)], rtol=1e-12)
    means = torch.randn(3, 3, 2).double()
    owned = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 0]]).bool()
    pooled, known = maths.pooled(means, owned)
    expected = [means[:, 0].mean(0), means[1:, 1].mean(0), torch.zeros(2).double()]
    np.testing.assert_allclose(pooled, torch.stack(expected), rtol=1e-12)
    assert known.tolist() == [True, True, False]
