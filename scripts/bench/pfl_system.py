"""apple/pfl-research on a workload. Prints JSON.

    python scripts/bench/pfl_system.py rounds W1
        {"rounds": seconds of each timed round}

The run consists of `SimulatedBackend`, `FederatedAveraging` and `PyTorchModel` on resident tensors.
A round lasts from one call of the callback after a central iteration to the next; the first round
is not in "rounds".

How the run differs from fedhet's:

-   pfl never shuffles: every client sees its samples in the same order (two shards of one label
    each, one after the other) in each epoch. That is slightly less work, and the accuracy is not
    that of a shuffled run;
-   batches are views of resident tensors, cut anew for each client and round, as
    `FederatedDataset.from_slices` does;
-   the mean of the clients' updates is taken with equal weights (here all have 600 samples, so it
    is the same mean) and applied by a central `torch.optim.SGD` of rate 1;
-   pfl always evaluates in iteration 0 (`evaluation_frequency=0` divides by zero), before and after
    each client's training. A `metrics` function that computes nothing avoids that work; later
    iterations do not evaluate;
-   the model's `loss` does not call `train()` at each step, as pfl's own examples do: this favours
    pfl;
-   the cohorts are `workloads.cohort`, not fedhet's.
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
    order = iter([k for one in range(1, number + 1) for k in cohort(one)])
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
