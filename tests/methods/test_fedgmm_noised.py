"""FedGMM under privacy.noise: content of one form at every client, and what it is read as."""

from __future__ import annotations

import torch
from maths.cases import named_case

from fedhet.methods.fedgmm.gaussians import Mixture, check_mixture
from fedhet.methods.fedgmm.mixtures import content, counts_in, mixtures_in, unpack, whole

COUNTS = torch.tensor([6, 0, 1, 13])
DRAW = torch.Generator().manual_seed(0)


def mixture(k: int) -> Mixture:
    pi = torch.rand(k, generator=DRAW) + 0.1
    mu, var = torch.rand(2, k, 5, generator=DRAW)
    return Mixture(pi / pi.sum(), mu, 0.01 + 0.2 * var)


MIXTURES = {0: mixture(3), 3: mixture(3)}


def test_without_noise_it_is_what_was_fitted() -> None:
    shares, tree = content(COUNTS, MIXTURES, 3, 5)
    counts = counts_in(shares, 20)
    packed = mixtures_in(tree, counts, 2, 1e-6)
    assert torch.equal(counts, COUNTS)
    read = unpack(packed, 5, 4, 1e-6)
    assert sorted(read) == [0, 3]
    for c, expected in MIXTURES.items():
        for ours, theirs in zip(read[c], expected, strict=True):
            assert torch.allclose(ours, theirs.float(), atol=1e-6)


def test_the_content_has_one_form_whatever_a_client_has() -> None:
    shares, tree = content(COUNTS, MIXTURES, 3, 5)
    others, other = content(torch.tensor([20, 0, 0, 0]), {}, 3, 5)
    assert others.shape == shares.shape
    assert {name: t.shape for name, t in other.items()} == {n: t.shape for n, t in tree.items()}
    assert all(not t.any() for t in other.values())  # neutral: the contribution is zero


def test_whatever_the_noise_the_server_gets_valid_mixtures() -> None:
    for std in [0.1, 1.0, 100.0]:
        with named_case(std):
            shares, tree = content(COUNTS, MIXTURES, 3, 5)
            shares = shares + std * torch.randn(shares.shape, generator=DRAW)
            tree = {
                name: t + std * torch.randn(t.shape, generator=DRAW) for name, t in tree.items()
            }
            counts = counts_in(shares, 20)
            packed = mixtures_in(tree, counts, 2, 1e-3)
            assert int(counts.sum()) == 20
            assert int(counts.min()) >= 0
            read = unpack(packed, 5, 4, 1e-6)
            assert sorted(read) == [c for c, n in enumerate(counts.tolist()) if n >= 2]
            for one in read.values():
                check_mixture(one, 5)
                assert float(one.mu.min()) >= 0
                assert float(one.mu.max()) <= 1
                assert float(one.var.min()) >= 1e-3 * (1 - 1e-6)


def test_whole_numbers_by_the_largest_remainders() -> None:
    assert whole(torch.tensor([0.49, 0.26, 0.25]).double(), 10).tolist() == [5, 3, 2]
    assert whole(torch.tensor([1.0, 0.0]).double(), 7).tolist() == [7, 0]
