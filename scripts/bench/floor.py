"""The physical floor: a plain loop that does only the local steps and the sum. Prints JSON.

    python scripts/bench/floor.py W1 [--workers 2] [--rounds N]

Resident tensors, one model for each worker, one gather for each epoch, `autograd.grad`, an in-place
step, a running weighted sum. Two workers are two processes with shared memory between them, each
with half of the cohort."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.nn import functional
from workloads import LR, WORKLOADS, Data, Workload, cohort, data

Extra = Callable[[list[Tensor], list[Tensor]], object]
Loss = Callable[[Any, Tensor, Tensor], Tensor]  # of model, inputs, targets


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def trainer(
    workload: Workload, samples: Data, extra: Extra | None = None, loss: Loss = plain
) -> Any:
    """A function that adds the models that some clients make of `x` to `total`; `extra` gets
    parameters and gradients in each step."""
    model = workload.model()
    params: list[Tensor] = list(model.parameters())

    def train(x: list[Tensor], clients: list[int], total: list[Tensor], share: float) -> None:
        for k in clients:
            with torch.no_grad():
                torch._foreach_copy_(params, x)
            inputs, targets = samples[k]
            order = torch.randperm(len(targets))
            inputs, targets = inputs[order], targets[order]
            for at in range(0, len(targets), workload.batch):
                found = loss(
                    model, inputs[at : at + workload.batch], targets[at : at + workload.batch]
                )
                grads = torch.autograd.grad(found, params)
                with torch.no_grad():
                    if extra:
                        extra(params, list(grads))
                    torch._foreach_add_(params, grads, alpha=-LR)
            with torch.no_grad():
                torch._foreach_add_(total, params, alpha=share)

    return train


def work(
    workload: Workload, samples: Data, x: list[Tensor], total: list[Tensor], pipe: Any
) -> None:
    torch.set_num_threads(1)
    train = trainer(workload, samples)
    while (clients := pipe.recv()) is not None:
        torch._foreach_zero_(total)
        train(x, clients, total, 1 / 10)
        pipe.send(None)


def run(workload: Workload, workers: int, rounds: int) -> list[float]:
    """Seconds of each timed round."""
    torch.manual_seed(0)
    samples, seconds = data(workload), []
    x = [p.detach().clone() for p in workload.model().parameters()]
    if workers > 1:
        x = [t.share_memory_() for t in x]
        totals = [[torch.zeros_like(t).share_memory_() for t in x] for _ in range(workers)]
        pipes = []
        for total in totals:
            here, there = multiprocessing.Pipe()
            multiprocessing.get_context("fork").Process(
                target=work, args=(workload, samples, x, total, there), daemon=True
            ).start()
            pipes.append(here)
    else:
        train, totals = trainer(workload, samples), [[torch.zeros_like(t) for t in x]]
    for number in range(1, rounds + 2):
        began = time.perf_counter()
        clients = cohort(number)
        if workers > 1:
            for at, pipe in enumerate(pipes):
                pipe.send(clients[at::workers])
            for pipe in pipes:
                pipe.recv()
        else:
            torch._foreach_zero_(totals[0])
            train(x, clients, totals[0], 1 / 10)
        torch._foreach_copy_(x, totals[0])
        for total in totals[1:]:
            torch._foreach_add_(x, total)
        seconds.append(time.perf_counter() - began)
    for pipe in pipes if workers > 1 else []:
        pipe.send(None)
    return seconds[1:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="timed rounds; the workload's own by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    workload = WORKLOADS[args.workload]
    print(json.dumps({"rounds": run(workload, args.workers, args.rounds or workload.rounds)}))
