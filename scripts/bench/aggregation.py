"""What the server's aggregation costs, next to fedhet's own float64 weighted mean of the same
trees.

    python scripts/bench/aggregation.py [--clients 20] [--reps 5] [--json PATH]

Trees of ResNet-18's 11.2 million trained parameters: one initialisation, plus noise of standard
deviation 0.01 per client. One thread; the pieces alternate. Times are noisy: read the ratios to the
mean, each the median over the repetitions.

"copy" is the plain copy of the same trees, one after another into one tree of their size: what the
memory itself costs. "fednorm" is what the plug-in adds to a mean, "fedadam" what the server
optimiser adds to any method.

Also prints the most memory that one aggregation takes, in a process of its own: the clients' trees
and all that is made of them, not the imports and the model, as a multiple of the clients' trees.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedhet import trees
from fedhet.messages import Extras, LocalSettings, Update
from fedhet.methods.fednorm import FedNormPlugin, Z
from fedhet.methods.fedsa import FedSA
from fedhet.models import ResNet18
from fedhet.server_opt import FedOpt
from fedhet.setting import Setting
from fedhet.site import Site
from fedhet.task import ClientData, Task


def server(clients: int) -> FedSA:
    """A strategy with ResNet-18; its clients never train."""
    data = [ClientData((torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64)))] * clients  # type: ignore[arg-type]
    task = Task(
        lambda: ResNet18(shape=(3, 32, 32), classes=10, norm="batch"),
        lambda output, y: output[:, 0],
        data,
        None,
        10,
    )
    return FedSA(Setting(Site(task, device=torch.device("cpu"), seed=0), LocalSettings(lr=0.1)))


def received(strategy: FedSA, clients: int) -> list[Update]:
    """A round's updates, as the inbox hands them on."""
    draw = torch.Generator().manual_seed(0)
    old = trees.pick(strategy.site.initial, strategy.site.trained)
    updates = []
    for pid in range(clients):
        weights = {
            name: torch.randn(t.shape, generator=draw).mul_(0.01).add_(t) for name, t in old.items()
        }
        latents: Extras = {Z: torch.rand(512, generator=draw)}
        updates.append(
            Update(
                pid, 1, weights, latents, weight=1 / clients, delta=trees.Difference(weights, old)
            )
        )
    return updates


def copying(updates: list[Update]) -> Callable[[], None]:
    """A plain copy of all their trees, into one tree."""
    tensors = [list((update.weights or {}).values()) for update in updates]
    copied = [t.clone() for t in tensors[0]]

    def copy() -> None:
        for each in tensors:
            torch._foreach_copy_(copied, each)

    return copy


def aggregations(strategy: FedSA, updates: list[Update]) -> dict[str, Callable[[], Any]]:
    """What needs all updates; each answers with what it has made of them."""
    old = strategy.site.initial
    fednorm = FedNormPlugin()
    return {
        "mean": lambda: trees.mean((update.change, update.weight) for update in updates),
        "fedsa": lambda: strategy.merge(iter(updates), trees.pick(old, strategy.site.trained)),
        "fednorm": lambda: fednorm.incoming(iter(updates), old),
    }


def memory(piece: str, clients: int) -> float:
    """Most resident memory during one aggregation, by the size of the clients' trees; in a process
    of its own."""
    code = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import aggregation, psutil, torch
from fedhet import trees
torch.set_num_threads(1)
clients = int(sys.argv[3])
strategy = aggregation.server(clients)
before = psutil.Process().memory_info().rss
updates = aggregation.received(strategy, clients)
made = aggregation.aggregations(strategy, updates)[sys.argv[2]]()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print((peak - before) / sum(trees.nbytes(update.weights) for update in updates))
"""
    command = [sys.executable, "-c", code, str(Path(__file__).parent), piece, str(clients)]
    return float(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # First: a child's peak starts from what its parent held when it was forked.
    peaks = {piece: memory(piece, args.clients) for piece in ("mean", "fedsa")}
    strategy = server(args.clients)
    updates = received(strategy, args.clients)
    moved = sum(trees.nbytes(update.weights or {}) for update in updates)
    measured = {"copy": copying(updates), **aggregations(strategy, updates)}
    adam, proposed = FedOpt(kind="adam"), measured["mean"]()
    measured["fedadam"] = lambda: adam.step(trees.zeros(proposed), proposed)
    spent: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(args.reps + 1):
        for name, piece in measured.items():
            began = time.perf_counter()
            piece()
            spent[name].append(time.perf_counter() - began)
    # the first fills caches and states
    seconds = {name: statistics.median(times[1:]) for name, times in spent.items()}

    def ratio(name: str, base: str) -> float:
        return statistics.median(
            a / b for a, b in zip(spent[name][1:], spent[base][1:], strict=True)
        )

    ratios, of_copy = {name: ratio(name, "mean") for name in measured}, ratio("mean", "copy")
    entries = sum(strategy.site.initial[name].numel() for name in strategy.site.trained)
    print(
        f"{args.clients} clients, {entries:,} entries, {strategy.report['frac_high']:.2%} of them"
        " of high dispersion"
    )
    for name in measured:
        peak = f"   peak memory {peaks[name]:.2f} x the clients' trees" if name in peaks else ""
        print(f"{name:8} {seconds[name]:.4f} s   {ratios[name]:.2f} x the mean{peak}")
    print(f"the mean takes {of_copy:.2f} x the plain copy of the same {moved:,} bytes")
    if args.json:
        found = {
            "seconds": seconds,
            "ratio": ratios,
            "of_copy": of_copy,
            "bytes": moved,
            "peak": peaks,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
