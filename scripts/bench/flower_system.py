"""Stock Flower on a workload, written as Flower's own users do it. Prints JSON.

    python scripts/bench/flower_system.py rounds W1 [WORKERS]
        {"rounds": seconds of each timed round, "total": seconds from the start of the process until
        Ray has ended}

The run consists of `NumPyClient`, `FedAvg` and `run_simulation` on Ray. A round lasts from the end
of one `aggregate_fit` to the end of the next. So it includes the strategy, the engine and the
transport in both directions. In the first round the actors load the data; this round is not in
"rounds".

The run differs from fedhet's in these points:

-   Flower's engine trains every client. Parameters travel as NumPy arrays in messages through Ray
    to one of WORKERS actors and back. Each call builds a `Net()`. The server keeps all replies
    until the last has arrived.
-   Local steps are the plain loop (`torch.optim.SGD`, `backward`) on index batches of a permutation
    per epoch. There is no `DataLoader`, and the samples stay in the actor process. So this is
    already faster than Flower's quickstart.
-   The cohorts are Flower's own. Each actor's generator gives the order of samples.
-   Flower's engine sends messages and collects replies every 0.1 s, so the seconds of a round
    grow in steps of this length.
"""

from __future__ import annotations

import logging
import os
import time
from itertools import pairwise
from typing import Any

from harness import answer

# This must happen before torch, Flower and Ray are imported.
os.environ |= {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

import psutil
import torch
from flwr.client import Client, ClientApp, NumPyClient
from flwr.common import (
    Context,
    FitRes,
    NDArrays,
    Parameters,
    Scalar,
    ndarrays_to_parameters,
)
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn import functional
from workloads import (
    CLIENTS,
    COHORT,
    LR,
    WORKLOADS,
    Data,
    data,
)

CACHE: dict[str, Data] = {}  # the samples of an actor process


def get_weights(net: nn.Module) -> NDArrays:
    """Return the model's state as arrays."""
    return [value.cpu().numpy() for value in net.state_dict().values()]


def set_weights(net: nn.Module, arrays: NDArrays) -> None:
    """Load the arrays of `get_weights` into the model."""
    names = net.state_dict()
    net.load_state_dict({n: torch.from_numpy(a) for n, a in zip(names, arrays, strict=True)})


class FlowerClient(NumPyClient):
    """Trains a client for one epoch."""

    def __init__(self, name: str, number: int) -> None:
        torch.set_num_threads(1)
        workload = WORKLOADS[name]
        if name not in CACHE:
            CACHE[name] = data(workload)
        self.samples = CACHE[name][number]
        self.batch = workload.batch
        self.net = workload.model()

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        set_weights(self.net, parameters)
        x, y = self.samples
        optimizer = torch.optim.SGD(self.net.parameters(), lr=LR)
        for batch in torch.randperm(len(y)).split(self.batch):
            optimizer.zero_grad()
            functional.cross_entropy(self.net(x[batch]), y[batch]).backward()
            optimizer.step()
        return get_weights(self.net), len(y), {}


class Timed(FedAvg):
    """FedAvg that records when each round ended."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.ends: list[float] = []

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        if failures or len(results) != COHORT:
            raise RuntimeError(
                f"round {server_round}: {len(results)} replies, {len(failures)} failures"
            )
        merged = super().aggregate_fit(server_round, results, failures)
        self.ends.append(time.perf_counter())
        return merged


def rounds(name: str, workers: int = 1) -> dict[str, Any]:
    """Time the rounds of a workload."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    # The minimum is needed: the fraction refers to the nodes that are connected when the first
    # round begins, and these may be few.
    strategy = Timed(
        fraction_fit=COHORT / CLIENTS,
        min_fit_clients=COHORT,
        fraction_evaluate=0.0,
        min_available_clients=CLIENTS,
        initial_parameters=ndarrays_to_parameters(get_weights(workload.model())),
    )

    def client_fn(context: Context) -> Client:
        return FlowerClient(name, int(context.node_config["partition-id"])).to_client()

    def server_fn(_: Context) -> ServerAppComponents:
        config = ServerConfig(num_rounds=workload.rounds + 1)
        return ServerAppComponents(strategy=strategy, config=config)

    init = {
        "num_cpus": workers,
        "address": "local",
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    run_simulation(
        ServerApp(server_fn=server_fn),
        ClientApp(client_fn=client_fn),
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": init},
    )
    total = time.time() - psutil.Process().create_time()
    return {"rounds": [end - began for began, end in pairwise(strategy.ends)], "total": total}


if __name__ == "__main__":
    # Ray would send the functions of `__main__` by value, and actors would lose their cache.
    import flower_system

    answer(flower_system.rounds)
