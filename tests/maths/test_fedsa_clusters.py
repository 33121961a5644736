"""FedSA's clustering of the clients by their similarities."""

from __future__ import annotations

import torch
from maths.cases import named_case
from torch import Tensor

from fedhet.methods.fedsa import FedSA, aggregate_tensor, cluster


def similarities(seed: int, clients: int = 9, levels: int = 6) -> Tensor:
    """A symmetric matrix with many equal values."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(0, levels, (clients, clients), generator=g).double() / (levels - 1)
    upper = values.triu(1)
    return upper + upper.T + torch.eye(clients).double()


def test_every_client_is_in_one_cluster_or_in_none() -> None:
    for threshold in ["at_full", "always"]:
        for S in [1, 2, 4, 12]:
            for seed in range(8):
                with named_case(threshold, S, seed):
                    sim = similarities(seed)
                    clusters = cluster(sim, FedSA(S=S, sim_t=0.5, threshold=threshold))
                    clustered = [k for members in clusters for k in members]
                    assert len(clustered) == len({*clustered})
                    assert len(clusters) <= S and all(len(members) > 1 for members in clusters)
                    if threshold == "always":
                        for members in clusters:
                            for k in members:
                                others = [m for m in members if m != k]
                                assert float(sim[k, others].max()) > 0.5
                    elif len(clusters) < S:
                        assert sorted(clustered) == list(range(len(sim)))


def test_rounding_does_not_break_ties() -> None:
    """Similarities within 1e-12 are equal.

    The older of two clusters wins, and no similarity exceeds a sim_t that it equals.
    """
    sim = torch.eye(7).double()
    sim[0, 1] = sim[2, 3] = 0.9
    sim[[0, 1], 4] = 0.2
    sim[[2, 3], 4] = 0.2 + 1e-13
    sim = torch.maximum(sim, sim.T)
    assert cluster(sim, FedSA(S=2, sim_t=0.1)) == [[0, 1, 4], [2, 3]]
    assert cluster(sim, FedSA(S=2, sim_t=0.2)) == [[0, 1], [2, 3]]


def test_the_threshold_from_the_start() -> None:
    sim = torch.eye(4).double()
    sim[0, 1] = sim[1, 0] = 0.3
    assert cluster(sim, FedSA(S=4, sim_t=0.2, threshold="always")) == [[0, 1]]
    assert cluster(sim, FedSA(S=4, sim_t=0.3, threshold="always")) == []
    assert cluster(sim, FedSA(S=4, sim_t=0.3)) == [[0, 1, 2, 3]]


def test_a_threshold_that_no_pair_exceeds_gives_the_uniform_mean() -> None:
    W = torch.randn(9, 60, generator=torch.Generator().manual_seed(0)).double()
    unclustered = aggregate_tensor(W, FedSA(sim_t=1.0, threshold="always"))
    assert len(unclustered.high)
    assert torch.equal(unclustered.w, aggregate_tensor(W, FedSA(cv_t=1)).w)
