"""apple/pfl-research on a workload. Prints JSON.

    python scripts/bench/pfl_system.py rounds W1
        {"rounds": seconds of each timed round}

The run consists of `SimulatedBackend`, `FederatedAveraging` and `PyTorchModel` on resident tensors.
A round lasts from one call of the callback after a central iteration to the next. The first round
is not in "rounds".

The run differs from fedhet's in these points:

-   pfl never shuffles: every client sees its samples in the same order (two shards of one label
    each, one after the other) in each epoch. This is slightly less work, and gives another accuracy
    than a shuffled run.
-   Batches are views of resident tensors. `FederatedDataset.from_slices` makes them again for each
    client and round.
-   The mean of the clients' updates has equal weights. Here it is the same mean, because all
    clients have 600 samples. A central `torch.optim.SGD` of rate 1 applies it.
-   pfl always evaluates in iteration 0 (`evaluation_frequency=0` divides by zero), before and after
    each client's training. A `metrics` function that computes nothing avoids this work. Later
    iterations do not evaluate.
-   pfl's own examples call `train()` in the model's `loss` at each step; this model does not. This
    favours pfl.
-   The cohorts are `workloads.cohort`, not fedhet's.
"""

from __future__ import annotations

import logging
import os
import time
from itertools import pairwise
from typing import Any

from harness import answer

os.environ |= {"OMP_NUM_THREADS": "1", "PFL_PYTORCH_DEVICE": "cpu"}

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional
from workloads import COHORT, LR, WORKLOADS, cohort, data


class Net(nn.Module):
    """The model of a workload with the two methods that pfl expects."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        return {}


class Clock(TrainingProcessCallback[PyTorchModel]):
    """Records when each central iteration ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.ends.append(time.perf_counter())
        return False, Metrics()


def rounds(name: str) -> dict[str, Any]:
    """Time the rounds of a workload."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    np.random.seed(0)
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    number = workload.rounds + 1
    module = Net(workload.model())
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    # pfl calls its sampler of users once per client.
    order = iter([k for step in range(1, number + 1) for k in cohort(step)])
    samples = dict(enumerate(data(workload)))
    training = FederatedDataset.from_slices(samples, lambda: next(order))
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=number,
            evaluation_frequency=number,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=training, val_data=training),
        model,
        NNTrainHyperParams(
            local_batch_size=workload.batch, local_num_epochs=1, local_learning_rate=LR
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    return {"rounds": [end - began for began, end in pairwise(clock.ends)]}


if __name__ == "__main__":
    answer(rounds)
