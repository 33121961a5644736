"""FedSA, equations 2 to 15: the paper read literally, and properties that hold for every input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from maths.cases import named_case
from maths.fedsa_literal import aggregate as literal
from torch import Tensor

from fedhet.core.errors import ConfigError
from fedhet.methods import fedsa
from fedhet.methods.fedsa import FedSA, aggregate_tensor

SEEDS = range(8)


def draw(seed: int, clients: int = 9, entries: int = 60, spread: float = 0.5) -> Tensor:
    """Values around one point per entry.

    Even clients scatter more at even entries, and odd clients at odd entries.
    """
    g = torch.Generator().manual_seed(seed)
    more = 1 + 3 * ((torch.arange(clients)[:, None] + torch.arange(entries)) % 2 == 0).double()
    centres = torch.randn(entries, generator=g).double()
    return centres + spread * more * torch.randn(clients, entries, generator=g).double()


def test_the_equations_read_literally() -> None:
    for seed in range(40):
        with named_case(seed):
            pick = np.random.default_rng(seed)
            options = {
                "cv_t": float(pick.choice([0.0, 0.02, 0.05, 0.2])),
                "sim_t": float(pick.choice([0.0, 0.2, 0.4, 0.7, 1.0])),
                "C": int(pick.integers(1, 9)),
                "S": int(pick.integers(1, 7)),
            }
            W = draw(seed, int(pick.integers(2, 14)), int(pick.integers(2, 50)))
            expected = literal(W.numpy(), **options)
            actual = aggregate_tensor(W, FedSA(**options))
            assert actual.high.tolist() == expected["high"]
            assert actual.clusters == expected["clusters"]
            np.testing.assert_allclose(actual.w, expected["w"], rtol=1e-12, atol=1e-13)


def test_a_case_by_hand() -> None:
    """Three clients agree except at one entry each.

    At the two high entries, the clients' deviations are in the classes 1, 1, 4 and 4, 1, 1.
    """
    W = torch.tensor([[1.0, 1.0, 4.0], [1.0, 1.0, 1.0], [1.0, 4.0, 1.0]])
    together = aggregate_tensor(W, FedSA(cv_t=0.1, S=1))
    # mu = 1, 2, 2; the squared deviations of the middle entry are 1, 1, 4, so u = 1/4, 1/4, 1.
    assert together.high.tolist() == [1, 2]
    assert together.mic.tolist() == [[1, 4], [1, 1], [4, 1]]
    assert together.sim[0].tolist() == [1.0, 0.5, 0.0]
    # (0, 1) opens a cluster; the similarity of client 2 to it is (0 + 1/2) / 2 = .25 > .2.
    assert together.clusters == [[0, 1, 2]]
    assert together.w.tolist() == [1.0, 2.0, 2.0]
    # .25 does not exceed .25, so client 2 stays out.
    alone = aggregate_tensor(W, FedSA(cv_t=0.1, S=1, sim_t=0.25))
    assert alone.clusters == [[0, 1]]
    assert alone.w.tolist() == [1.0, 1.0, 2.5]


def test_the_scale_does_not_matter() -> None:
    for seed in SEEDS:
        with named_case(seed):
            W = draw(seed)
            plain = aggregate_tensor(W, FedSA(cv_t=0.02))
            for scale in (2.0**-40, -1.0, 1e6):
                scaled = aggregate_tensor(W * scale, FedSA(cv_t=0.02))
                assert scaled.high.tolist() == plain.high.tolist()
                assert scaled.clusters == plain.clusters
                torch.testing.assert_close(scaled.w, plain.w * scale, rtol=1e-12, atol=0)


def test_the_result_lies_between_the_clients() -> None:
    cases = [
        {},
        {"mic_scale": "layer"},
        {"mic_scale": "none"},
        {"cv_clip_quantile": 0.9},
        {"threshold": "always"},
    ]
    for options in cases:
        with named_case(options):
            changed = 0
            for seed in SEEDS:
                W = draw(seed)
                result = aggregate_tensor(W, FedSA(cv_t=0.02, **options))
                assert (result.w >= W.amin(0) - 1e-12).all()
                assert (result.w <= W.amax(0) + 1e-12).all()
                low = torch.ones(W.shape[1], dtype=torch.bool)
                low[result.high] = False
                torch.testing.assert_close(result.w[low], W.mean(0)[low], rtol=1e-13, atol=1e-15)
                changed += int((result.w - W.mean(0)).abs().max() > 1e-3)
            # In some draws all clients are in one cluster, and the result is their mean.
            assert changed


def alphas(W: Tensor, options: FedSA) -> Tensor:
    mac = aggregate_tensor(W, options).mac
    return fedsa.cluster_weights(mac, fedsa.class_counts(mac, options.C), options)


def test_weights_of_the_clusters_sum_to_one_or_shrink() -> None:
    for seed in SEEDS:
        with named_case(seed):
            W = draw(seed)
            alpha = alphas(W, FedSA(cv_t=0.02))
            assert len(alpha) > 1 and (alpha > 0).all()
            ones = torch.ones(alpha.shape[1]).double()
            torch.testing.assert_close(alpha.sum(0), ones, rtol=1e-14, atol=0)
            shrunk = alphas(W, FedSA(cv_t=0.02, alpha_mode="shrink"))
            assert (shrunk.sum(0) <= 1 + 1e-14).all() and float(shrunk.sum(0).min()) < 1
            torch.testing.assert_close(shrunk / shrunk.sum(0), alpha, rtol=1e-12, atol=0)


def test_cv_t_of_one_is_the_uniform_mean() -> None:
    for seed in SEEDS:
        with named_case(seed):
            W = draw(seed, entries=1000).float()
            result = aggregate_tensor(W, FedSA(cv_t=1))
            assert not len(result.high) and result.clusters == []
            ulps = result.w.float().view(torch.int32) - W.double().mean(0).float().view(torch.int32)
            assert int(ulps.abs().max()) <= 1


def test_few_clients() -> None:
    for options in [{}, {"cv_t": 0.0}, {"cv_clip_quantile": 0.5, "C": 1, "S": 1}]:
        with named_case(options):
            one = draw(0, clients=1)
            assert torch.equal(aggregate_tensor(one, FedSA(**options)).w, one[0])
            two = draw(1, clients=2)  # equal deviations: one cluster
            mean = aggregate_tensor(two, FedSA(**options)).w
            torch.testing.assert_close(mean, two.mean(0), rtol=1e-14, atol=1e-16)
            three = draw(2, clients=3)  # fewer clients than clusters
            assert len(aggregate_tensor(three, FedSA(S=5, cv_t=0.01)).clusters) == 1


def test_identical_clients_keep_their_value() -> None:
    """To float32's last bit, although the mean of K equal float64 values may be off by one bit."""
    for clients in [3, 6, 10, 17, 20]:
        with named_case(clients):
            values = draw(3, clients=1).float()
            for options in (FedSA(), FedSA(cv_t=0.0), FedSA(cv_clip_quantile=0.5)):
                result = aggregate_tensor(values.expand(clients, -1), options)
                assert torch.equal(result.w.float(), values[0])


def test_one_class_or_one_cluster_is_the_mean_of_the_clustered() -> None:
    W = draw(4)
    one_class = aggregate_tensor(W, FedSA(C=1, cv_t=0.02))  # all are equal: one cluster of all
    assert one_class.clusters == [list(range(len(W)))]
    torch.testing.assert_close(one_class.w, W.mean(0), rtol=1e-13, atol=1e-15)
    result = aggregate_tensor(W, FedSA(S=1, cv_t=0.02, sim_t=0.5))
    (members,) = result.clusters
    assert 1 < len(members) < len(W)
    expected = W[members].mean(0)[result.high]
    torch.testing.assert_close(result.w[result.high], expected, rtol=1e-13, atol=1e-15)


def test_means_of_zero() -> None:
    """With some spread, cv is the largest finite cv; without spread, it is 0."""
    W = torch.tensor([[1.0, 0.0, 1.0, 5.0], [-1.0, 0.0, 3.0, 5.5], [0.0, 0.0, 2.0, 4.5]])
    cv = aggregate_tensor(W, FedSA()).cv
    assert float(cv[1]) == 0
    assert float(cv[0]) == float(cv[2]) == pytest.approx((2 / 3) ** 0.5 / 2, rel=1e-12)
    assert aggregate_tensor(W[:2, :1], FedSA()).cv.tolist() == [1.0]
    opposite = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    assert not len(aggregate_tensor(opposite, FedSA(cv_t=0)).high)
    assert aggregate_tensor(torch.zeros(3, 0), FedSA()).w.shape == (0,)


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        with named_case(seed):
            W = draw(seed, entries=301)
            options = FedSA(cv_t=0.01, cv_clip_quantile=0.9, mic_scale="layer")
            weights = torch.rand(len(W), generator=torch.Generator().manual_seed(seed)).double()
            whole = aggregate_tensor(W, options, weights)
            with monkeypatch.context() as patched:
                patched.setattr(fedsa, "BLOCK_VALUES", 7 * len(W))
                parts = aggregate_tensor(list(W), options, weights)
            assert torch.equal(whole.w, parts.w)
            assert torch.equal(whole.mic, parts.mic)
            assert whole.clusters == parts.clusters


def test_sums_follow_the_clients_order() -> None:
    """As in a loop, so that the number of threads or another version's kernels change nothing."""
    for clients in [5, 20, 37]:
        with named_case(clients):
            W = draw(5, clients=clients)
            total = np.zeros(W.shape[1])
            for row in W.numpy():
                total = total + row
            assert (aggregate_tensor(W, FedSA(cv_t=1)).w.numpy() == total / clients).all()


def test_the_cut_quantile() -> None:
    for q in [0.3, 0.95, 1.0]:
        with named_case(q):
            W = draw(6, entries=500)
            plain = aggregate_tensor(W, FedSA())
            cut = aggregate_tensor(W, FedSA(cv_clip_quantile=q))
            cv = np.minimum(plain.cv.numpy(), np.quantile(plain.cv.numpy(), q))
            scaled = (cv - cv.min()) / (cv.max() - cv.min())
            assert cut.high.tolist() == np.flatnonzero(scaled > 0.2).tolist()
            assert torch.equal(plain.cv, cut.cv)
            assert (q == 1.0) == (len(cut.high) == len(plain.high))


def test_read_literally_few_entries_are_high_whatever_the_size() -> None:
    """About 1/cv_t of them: a coefficient of variation has a 1/|mean| tail."""
    for entries in (1000, 100_000):
        results = [aggregate_tensor(draw(seed, entries=entries), FedSA()) for seed in SEEDS]
        counts = [len(result.high) for result in results]
        assert min(counts) >= 1 and max(counts) < 60 and 2 < np.mean(counts) < 20


def test_client_weights_count_in_the_means_only() -> None:
    for seed in SEEDS:
        with named_case(seed):
            W, options = draw(seed), FedSA(cv_t=0.02)
            weights = (
                torch.rand(len(W), generator=torch.Generator().manual_seed(seed)).double() + 0.1
            )
            plain = aggregate_tensor(W, options)
            weighted = aggregate_tensor(W, options, weights)
            assert torch.equal(plain.cv, weighted.cv)
            assert torch.equal(plain.mic, weighted.mic)
            assert plain.clusters == weighted.clusters
            mean = (weights[:, None] * W).sum(0) / weights.sum()
            low = torch.ones(W.shape[1], dtype=torch.bool)
            low[plain.high] = False
            torch.testing.assert_close(weighted.w[low], mean[low], rtol=1e-12, atol=1e-14)
            alpha = fedsa.cluster_weights(
                plain.mac, fedsa.class_counts(plain.mac, options.C), options
            )
            means = [(weights[m, None] * W[m]).sum(0) / weights[m].sum() for m in plain.clusters]
            expected = (alpha * torch.stack(means)[:, plain.high]).sum(0)
            torch.testing.assert_close(weighted.w[plain.high], expected, rtol=1e-12, atol=1e-14)
            equal = aggregate_tensor(W, options, torch.full((len(W),), 3.0).double())
            torch.testing.assert_close(equal.w, plain.w, rtol=1e-13, atol=1e-15)


def test_a_cluster_without_weight_has_a_plain_mean() -> None:
    W, weights = draw(7), torch.zeros(9).double()
    weights[0] = 1
    result = aggregate_tensor(W, FedSA(cv_t=0.02), weights)
    assert len(result.clusters) > 1 and torch.isfinite(result.w).all()


def test_scales_of_the_micro_classes() -> None:
    """The deviations are 1.2, -.6, -.6 and 6, -3, -3, their squares 1.44, .36, .36 and 36, 9, 9.

    A quarter of the largest square is in class 1.
    """
    cases = [
        ("entry", [[4, 4], [1, 1], [1, 1]]),
        ("layer", [[1, 4], [1, 1], [1, 1]]),
        ("none", [[4, 4], [2, 4], [2, 4]]),
    ]
    for scale, expected in cases:
        with named_case(scale, expected):
            block = torch.tensor([[1.2, 6.0], [-0.6, -3.0], [-0.6, -3.0]]).double()
            exact = torch.round(block * 64) / 64
            classes = fedsa.micro_classes(exact - exact.mean(0), FedSA(mic_scale=scale), 36.5)
            assert classes.tolist() == expected


def test_macro_classes_take_the_smallest_of_equally_frequent_classes() -> None:
    mic = torch.tensor([[3, 1, 2], [2, 4, 2], [3, 4, 1], [2, 1, 4]])
    assert fedsa.macro_classes(mic, [[0, 1, 2, 3], [1, 2]], 4).tolist() == [[2, 1, 2], [2, 4, 1]]


def test_bad_options_are_reported() -> None:
    cases = [
        {"cv_t": -0.1},
        {"cv_t": 1.1},
        {"cv_t": float("nan")},
        {"sim_t": 2},
        {"C": 0},
        {"S": 0},
        {"C": 2.5},
        {"S": True},
        {"cv_clip_quantile": 0},
        {"cv_clip_quantile": 1.5},
        {"mic_scale": "rank"},
        {"alpha_mode": "mean"},
        {"threshold": "never"},
    ]
    for bad in cases:
        with named_case(bad):
            ((name, value),) = bad.items()
            with pytest.raises(ConfigError, match=rf"method\.{name}={str(value).lower()}"):
                FedSA(**bad)
