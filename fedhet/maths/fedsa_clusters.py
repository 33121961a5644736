"""FedSA's clustering of the clients by the similarities of equation 10."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fedhet.maths.fedsa import Options

TIE = 1e-12  # similarities that differ by less are treated as equal


def cluster(sim: Tensor, options: Options) -> tuple[list[list[int]], list[int]]:
    """Return the clusters in the order of their creation, and the clients that are in none.

    As long as there are fewer than S clusters, the most similar pair of all is taken: a free
    client joins a cluster, or two free clients form a new one. With S clusters, each remaining
    client joins the cluster most similar to it if that similarity exceeds sim_t, and otherwise
    stays alone. threshold=always requires every pair to exceed sim_t, also before there are S
    clusters.

    The similarity between a client and a cluster is the mean over the cluster's members. Among
    equal pairs, one of a client and a cluster comes first, then the one with the lower index.

    Args:
        sim: (K, K) the similarities.
        options: FedSA's options.

    Raises:
        ValueError: `sim` is not a square matrix of finite values.
    """
    if sim.ndim != 2 or sim.shape[0] != sim.shape[1] or not torch.isfinite(sim).all():
        raise ValueError(
            f"similarities of shape {tuple(sim.shape)}; expected a square matrix of finite values"
        )
    clients = len(sim)
    clusters: list[list[int]] = []
    pairs = sim.double().masked_fill(torch.ones_like(sim, dtype=torch.bool).tril(), -math.inf)
    free = torch.ones(clients, dtype=torch.bool, device=sim.device)

    def to_clusters() -> Tensor:
        """Return the similarities to the clusters, (K, clusters), -inf for clients not free."""
        if not clusters:
            return sim.new_empty(clients, 0).double()
        means = [sim[:, members].double().mean(1) for members in clusters]
        return torch.stack(means, 1).masked_fill(~free[:, None], -math.inf)

    while free.any() and len(clusters) < options.S:
        joins = to_clusters()
        opens = pairs.where(free & free[:, None], -math.inf)
        values = torch.cat([joins.flatten(), opens.flatten()])
        best = float(values.max())
        if best == -math.inf or (options.threshold == "always" and best <= options.sim_t + TIE):
            break
        position = int((values >= best - TIE).nonzero()[0])
        if position < joins.numel():
            client, home = divmod(position, len(clusters))
            clusters[home].append(client)
            joined = [client]
        else:
            joined = list(divmod(position - joins.numel(), clients))
            clusters.append(joined)
        free[joined] = False
    if len(clusters) == options.S:
        # Compare with the clusters as they are now, so that the order of the remaining clients
        # does not matter.
        joins = to_clusters()
        for client in free.nonzero().flatten().tolist():
            best = float(joins[client].max())
            if best > options.sim_t + TIE:
                clusters[int((joins[client] >= best - TIE).nonzero()[0])].append(client)
                free[client] = False
    return [sorted(members) for members in clusters], free.nonzero().flatten().tolist()
