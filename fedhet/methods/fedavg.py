"""FedAvg: local SGD, then the mean of the weights by number of samples (McMahan et al. 2017).

The paper is "Communication-efficient learning of deep networks from decentralized data".

    client: w <- w - lr g(w) over E epochs of mini-batches, from w = x     (algorithm 1)
    server: x <- sum_k p_k w_k,  p_k = n_k / sum_j n_j

    down:          x
    up:            w_k, n_k
    client keeps:  nothing
    server keeps:  x

The sums run over the participants of the round. They are the defaults of FedClient and FedStrategy,
so that both classes below are empty; examples/fedavg.py is the whole algorithm in plain torch.
FedAvgM, FedAdam, FedYogi and FedAdagrad are this method with a server optimiser
(fedhet/core/server_opt.py).

Deviations from the paper: none. The optimiser starts afresh in each round, and the last batch of an
epoch may be smaller than the others.
"""

from __future__ import annotations

from fedhet.core.client import FedClient
from fedhet.core.strategy import FedStrategy


class FedAvgClient(FedClient):
    """Trains by local SGD from the received weights."""


class FedAvg(FedStrategy):
    """Averages the clients' weights, each weighted by its number of training samples."""

    name = "fedavg"
    client_cls = FedAvgClient
