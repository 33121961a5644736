"""apple/pfl-research on a workload. Prints JSON.

    python scripts/bench/pfl_system.py W1 [--workers 2] [--no-accuracy]

{"rounds": [seconds of each timed round], "total": seconds from the start of the process to the end
of training, "accuracy": of the final model on all samples, computed after that; --no-accuracy skips
it, which for W2 saves several rounds' time}. The run consists
of `SimulatedBackend`, `FederatedAveraging` and `PyTorchModel` on resident tensors. A round lasts
from one call of the callback after a central iteration to the next; the first round is not in
"rounds". Two workers are two replicas under `torchrun` with gloo on the CPU, as pfl documents it:
both draw the same cohort, each trains its half, and an all-reduce sums the updates. Their "total"
begins with the command above, so it includes the start of `torchrun`. The exit code is 3 if pfl is
not installed.

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

import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Iterator

from harness import ABSENT

os.environ |= {"OMP_NUM_THREADS": "1", "PFL_PYTORCH_DEVICE": "cpu"}
if importlib.util.find_spec("pfl") is None:
    print("pfl is not installed: pip install -e .[bench]", file=sys.stderr)
    raise SystemExit(ABSENT)


REPLICA = "TORCHELASTIC_RUN_ID" in os.environ
if __name__ == "__main__" and not REPLICA:  # before the imports, which take seconds
    workers = sys.argv[sys.argv.index("--workers") + 1] if "--workers" in sys.argv else "1"
    if workers != "1":
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # noqa: E402
from pfl.internal.ops import pytorch_ops  # noqa: E402
from pfl.metrics import Metrics  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from workloads import (  # noqa: E402
    COHORT,
    LR,
    WORKLOADS,
    Data,
    Workload,
    accuracy,
    arguments,
    cohort,
    data,
)


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


class Cohorts:
    """pfl's user sampler, which pfl calls once per client.

    It returns the clients of the first round, then those of the second, and so on. Every replica
    calls it for all clients, including those that other replicas train, so that all replicas have
    the same rounds; this holds if the number of replicas divides the cohort.
    """

    def __init__(self, rounds: int) -> None:
        self.clients: Iterator[int] = iter(
            [k for number in range(1, rounds + 1) for k in cohort(number)]
        )

    def __call__(self) -> int:
        return next(self.clients)


def run(workload: Workload, samples: Data) -> tuple[list[float], nn.Module]:
    """Seconds of each timed round, and the final model."""
    rounds = workload.rounds + 1
    np.random.seed(0)
    torch.manual_seed(0)
    net = workload.model()
    module = Net(net)
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    training = FederatedDataset.from_slices(dict(enumerate(samples)), Cohorts(rounds))
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,
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
    return [end - began for began, end in zip(clock.ends, clock.ends[1:], strict=False)], net


def main() -> None:
    """Run the workload and print its seconds."""
    args = arguments(__doc__, ("W1", "W2"), "--no-accuracy")
    if COHORT % pytorch_ops.distributed.world_size:
        raise SystemExit(f"--workers must divide the cohort of {COHORT}")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    workload = WORKLOADS[args.workload]
    samples = data(workload)
    rounds, net = run(workload, samples)
    # A replica's parent is torchrun, which has replaced the process of the command.
    process = psutil.Process(os.getppid()) if REPLICA else psutil.Process()
    figures = {"rounds": rounds, "total": time.time() - process.create_time()}
    if pytorch_ops.distributed.global_rank == 0:
        if not args.no_accuracy:
            figures["accuracy"] = accuracy(net, samples)
        print(json.dumps(figures))
    if REPLICA:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
