"""FedGMM's generated samples: they follow the mixture, and they balance the classes."""

from __future__ import annotations

import numpy as np
import torch
from maths.cases import named_case
from maths.mixtures import moments

from fedhet.methods.fedgmm import gaussians as maths
from fedhet.methods.fedgmm.gaussians import Mixture


def test_samples_follow_the_mixture() -> None:
    """The moments are within five standard errors.

    The shares of the components are within five standard errors of the multinomial.
    """
    mixture = Mixture(
        torch.tensor([0.3, 0.7]),
        torch.tensor([[0.3, 0.5], [0.7, 0.4]]),
        torch.tensor([[1e-3, 4e-3], [2e-3, 1e-3]]),
    )
    n = 40_000
    samples = maths.sample(mixture, n, np.random.default_rng(0)).double()
    mean, variance = moments(mixture)
    assert samples.shape == (n, 2)
    assert ((samples.mean(0) - mean).abs() < 5 * (variance / n).sqrt()).all()
    torch.testing.assert_close(samples.var(0), variance, rtol=0.05, atol=0)
    first = int((samples[:, 0] < 0.5).sum())
    assert first != 0.3 * n and abs(first - 0.3 * n) < 5 * (n * 0.21) ** 0.5
    np.testing.assert_allclose(samples[:first].var(0), [1e-3, 4e-3], rtol=0.1)


def test_samples_are_clipped_and_repeat_with_the_stream() -> None:
    wide = Mixture(torch.ones(1), torch.tensor([[0.0, 1.0]]), torch.ones(1, 2))
    samples, again = (maths.sample(wide, 400, np.random.default_rng(3)) for _ in range(2))
    assert torch.equal(samples, again)
    assert float(samples.min()) == 0 and float(samples.max()) == 1
    assert 0.4 < float((samples == 0).double().mean(0)[0]) < 0.6
    assert maths.sample(wide, 0, np.random.default_rng(3)).shape == (0, 2)


# ---- how many samples are generated

COUNTS = torch.tensor([[5, 0, 2, 9], [0, 0, 0, 0], [1, 1, 1, 1]])


def test_generated_samples_bring_every_class_to_the_target() -> None:
    cases = [
        ("client_max", [[9] * 4, [0] * 4, [1] * 4]),
        ("global_max", [[9] * 4] * 3),
        (3, [[5, 3, 3, 9], [3] * 4, [3] * 4]),
        (0, COUNTS.tolist()),
    ]
    for target, expected in cases:
        with named_case(target, expected):
            everything = torch.ones(4, dtype=torch.bool)
            generated = maths.generate_counts(COUNTS, everything, target, 9)
            assert (generated + COUNTS).tolist() == expected


def test_nothing_is_generated_without_a_mixture() -> None:
    available = torch.tensor([True, False, True, False])
    generated = maths.generate_counts(COUNTS[0], available, "client_max", 9)
    assert generated.tolist() == [4, 0, 7, 0]
