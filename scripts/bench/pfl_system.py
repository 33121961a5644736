"""apple/pfl-research on a workload: `SimulatedBackend`, `FederatedAveraging` and `PyTorchModel` on
resident tensors. Prints JSON.

    python scripts/bench/pfl_system.py W1 [--workers 2] [--no-accuracy]

{"rounds": [seconds of each timed round], "total": seconds from process start to the end of
training, "accuracy": of the final model on all samples, computed after that}. A round lasts from
one call of the callback after a central iteration to the next; the first round is not in "rounds".
Two workers are two replicas under `torchrun` with gloo on the CPU, as pfl documents it: both draw
the same cohort, each trains its half, and an all-reduce sums the updates. Their "total" begins with
the command above, so it includes what `torchrun` takes. Exits with code 3 where pfl is absent.

How the run differs from fedhet's own:

-   pfl never shuffles: every client sees its samples in the same order (two shards of one label
    each, one after the other) in each epoch. That is a little less work, and other numbers: the
    accuracy is not that of a shuffled run;
-   batches are views of resident tensors, cut again for each client and round, as
    `FederatedDataset.from_slices` does;
-   the mean of the clients' updates is taken with equal weights (here all have 600 samples, so it
    is the same mean) and applied by a central `torch.optim.SGD` of rate 1;
-   pfl always evaluates in iteration 0 (`evaluation_frequency=0` divides by zero), before and after
    each client's training. A `metrics` function that computes nothing turns that off; later
    iterations do not evaluate;
-   the model's `loss` does not call `train()` at each step, as pfl's own examples do: this favours
    pfl;
-   the cohorts are `workloads.cohort`, not fedhet's own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Iterator

os.environ |= {"OMP_NUM_THREADS": "1", "PFL_PYTORCH_DEVICE": "cpu"}
if importlib.util.find_spec("pfl") is None:
    print("pfl is not installed: pip install -e .[bench]", file=sys.stderr)
    raise SystemExit(3)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=("W1", "W2"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--no-accuracy",
        action="store_true",
        help="leave it out: for W2 it takes as long as several rounds",
    )
    return parser.parse_args()


REPLICA = "TORCHELASTIC_RUN_ID" in os.environ
if (
    __name__ == "__main__" and not REPLICA and (workers := arguments().workers) > 1
):  # before the imports, which cost seconds
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
from workloads import COHORT, LR, WORKLOADS, Data, Workload, cohort, data  # noqa: E402


class Net(nn.Module):
    """The model of a workload with the two methods that pfl wants."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        return {}


class Clock(TrainingProcessCallback[PyTorchModel]):
    """Notes when each central iteration ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.ends.append(time.perf_counter())
        return False, Metrics()


class Cohorts:
    """pfl's user sampler, which it calls once per client: the clients of the first round, of the
    second, and so on.

    Every replica calls it for all clients, also those of the others, so that all replicas have the
    same rounds; that holds where the replicas divide the cohort."""

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


@torch.no_grad()
def accuracy(net: nn.Module, samples: Data) -> float:
    return sum(int((net(x).argmax(1) == y).sum()) for x, y in samples) / sum(
        len(y) for _, y in samples
    )


def main() -> None:
    args = arguments()
    if COHORT % pytorch_ops.distributed.world_size:
        raise SystemExit(f"--workers must divide the cohort of {COHORT}")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    workload = WORKLOADS[args.workload]
    samples = data(workload)
    rounds, net = run(workload, samples)
    # torchrun took the place of the first command
    process = psutil.Process(os.getppid()) if REPLICA else psutil.Process()
    total = time.time() - process.create_time()
    if pytorch_ops.distributed.global_rank == 0:
        found = {} if args.no_accuracy else {"accuracy": accuracy(net, samples)}
        print(json.dumps({"rounds": rounds, "total": total, **found}))
    if REPLICA:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
