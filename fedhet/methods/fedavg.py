"""FedAvg (McMahan et al. 2017): the defaults of FedStrategy and FedClient.

    x <- sum_k (n_k / sum n) w_k, over the round's participants

    down: x      up: w_k, n_k      client keeps: nothing      server keeps: x

FedAvgM, FedAdam, FedYogi and FedAdagrad are this method with a server optimiser
(fedhet/server_opt.py)."""

from __future__ import annotations

from fedhet.client import FedClient
from fedhet.strategy import FedStrategy


class FedAvgClient(FedClient):
    """E epochs of local SGD from the received weights."""


class FedAvg(FedStrategy):
    """The n_k-weighted mean of the clients' weights."""

    name = "fedavg"
    client_cls = FedAvgClient
