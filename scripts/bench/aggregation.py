"""What the server's aggregation costs, relative to fedhet's float64 weighted mean.

    python scripts/bench/aggregation.py [--clients 20] [--reps 5]

The trees have ResNet-18's 11.2 million trained parameters: one initialisation, plus noise of
standard deviation 0.01 per client. One thread; the pieces alternate. Times are noisy, so read the
ratios to the mean, each of which is the median over the repetitions.

"copy" copies the same trees, one after another, into one tree of their size: the cost of the memory
traffic itself. "fednorm" is what the plug-in adds to a mean, "fedadam" what the server optimiser
adds to any method.

The script also prints the most memory that one aggregation takes, measured in a separate process:
the clients' trees and everything computed from them, without the imports and the model, as a
multiple of the clients' trees. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import timed

from fedhet.core import trees
from fedhet.core.messages import LocalSettings, Update
from fedhet.core.server_opt import FedOpt
from fedhet.core.setting import Setting
from fedhet.core.task import ClientData, Samples, Task
from fedhet.core.workspace import Workspace
from fedhet.methods.fednorm import FedNormPlugin, Z
from fedhet.methods.fedsa import FedSA
from fedhet.models import ResNet18


def server(clients: int) -> FedSA:
    """A strategy with ResNet-18, whose clients never train."""
    sample = Samples(torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64))
    task = Task(
        model=lambda: ResNet18(shape=(3, 32, 32), classes=10, norm="batch"),
        criterion=lambda output, y: output[:, 0],
        clients=[ClientData(sample)] * clients,
        test=None,
        classes=10,
    )
    return FedSA(
        Setting(Workspace(task, device=torch.device("cpu"), seed=0), LocalSettings(lr=0.1))
    )


def received(strategy: FedSA, clients: int) -> list[Update]:
    """The updates of a round, as they are after the server's checks."""
    draw = torch.Generator().manual_seed(0)
    old = trees.pick(strategy.workspace.initial, strategy.workspace.trained)
    updates = []
    for pid in range(clients):
        weights = {}
        for name, t in old.items():
            weights[name] = torch.randn(t.shape, generator=draw).mul_(0.01).add_(t)
        latents = torch.rand(512, generator=draw)
        update = Update(pid, 1, weights, weight=1 / clients, extras={Z: latents})
        update.change = trees.Difference(weights, old)
        updates.append(update)
    return updates


def copying(updates: list[Update]) -> Callable[[], None]:
    """A plain copy of all their trees, into one tree."""
    tensors = [list(update.weights.values()) for update in updates]
    target = [t.clone() for t in tensors[0]]

    def copy() -> None:
        for each in tensors:
            torch._foreach_copy_(target, each)

    return copy


def aggregations(strategy: FedSA, updates: list[Update]) -> dict[str, Callable[[], Any]]:
    """The pieces that read all updates; each returns its result."""
    old = trees.pick(strategy.workspace.initial, strategy.workspace.trained)
    fednorm = FedNormPlugin()
    return {
        "mean": lambda: trees.mean((update.change, update.weight) for update in updates),
        "fedsa": lambda: strategy.merge(iter(updates), old),
        "fednorm": lambda: fednorm.incoming(iter(updates), old),
    }


def peak_memory(piece: str, clients: int) -> float:
    """The most memory of one aggregation, relative to the clients' trees; in a new process."""
    code = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import aggregation, psutil, torch
from fedhet.core import trees
torch.set_num_threads(1)
clients = int(sys.argv[3])
strategy = aggregation.server(clients)
before = psutil.Process().memory_info().rss
updates = aggregation.received(strategy, clients)
result = aggregation.aggregations(strategy, updates)[sys.argv[2]]()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print((peak - before) / sum(trees.nbytes(update.weights) for update in updates))
"""
    command = [sys.executable, "-c", code, str(Path(__file__).parent), piece, str(clients)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(process.stdout.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # First, because a child's peak starts from what its parent held when it was forked.
    peaks = {piece: peak_memory(piece, args.clients) for piece in ("mean", "fedsa")}
    strategy = server(args.clients)
    updates = received(strategy, args.clients)
    moved = sum(trees.nbytes(update.weights) for update in updates)
    pieces = {"copy": copying(updates), **aggregations(strategy, updates)}
    adam = FedOpt(kind="adam")
    proposed = pieces["mean"]()
    pieces["fedadam"] = lambda: adam.step(trees.zeros(proposed), proposed)
    times = timed(pieces, args.reps)

    def ratio(name: str, base: str) -> float:
        pairs = zip(times[name], times[base], strict=True)
        return statistics.median(a / b for a, b in pairs)

    of_copy = ratio("mean", "copy")
    entries = sum(strategy.workspace.initial[name].numel() for name in strategy.workspace.trained)
    high = strategy.recorded["frac_high"]
    print(f"{args.clients} clients, {entries:,} entries, {high:.2%} of them of high dispersion")
    for name in pieces:
        peak = f"   peak memory {peaks[name]:.2f} x the clients' trees" if name in peaks else ""
        seconds = statistics.median(times[name])
        print(f"{name:8} {seconds:.4f} s   {ratio(name, 'mean'):.2f} x the mean{peak}")
    print(f"the mean takes {of_copy:.2f} x the plain copy of the same {moved:,} bytes")
    fedsa = ratio("fedsa", "mean")
    print(json.dumps({"of_copy": of_copy, "fedsa": fedsa, "bytes": moved, "peak": peaks}))


if __name__ == "__main__":
    main()
