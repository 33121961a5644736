"""The floor: a plain loop that does the local steps and the weighted sum only. Prints JSON.

    python scripts/bench/floor.py W1 [--workers 2]

Resident tensors, one model per worker, one gather per epoch, `autograd.grad`, an in-place step, a
running weighted sum. Two workers are two processes with shared memory between them, each with half
of the cohort.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.nn import functional
from workloads import COHORT, LR, WORKLOADS, Data, Workload, arguments, cohort, data

# (received weights, clients, sum of their models, weight of each model)
Train = Callable[[list[Tensor], list[int], list[Tensor], float], None]


def trainer(workload: Workload, samples: Data) -> Train:
    """A function that trains some clients from the same weights and adds up their models.

    Args:
        workload: the model and its batch size.
        samples: the samples of all clients.
    """
    model = workload.model()
    params: list[Tensor] = list(model.parameters())
    size = workload.batch

    def train(x: list[Tensor], clients: list[int], total: list[Tensor], share: float) -> None:
        for k in clients:
            with torch.no_grad():
                torch._foreach_copy_(params, x)
            inputs, targets = samples[k]
            order = torch.randperm(len(targets))
            inputs, targets = inputs[order], targets[order]
            for at in range(0, len(targets), size):
                output = model(inputs[at : at + size])
                loss = functional.cross_entropy(output, targets[at : at + size])
                grads = torch.autograd.grad(loss, params)
                with torch.no_grad():
                    torch._foreach_add_(params, grads, alpha=-LR)
            with torch.no_grad():
                torch._foreach_add_(total, params, alpha=share)

    return train


def work(
    workload: Workload, samples: Data, x: list[Tensor], total: list[Tensor], pipe: Connection
) -> None:
    """Serve the messages of a worker process: lists of clients, then None."""
    torch.set_num_threads(1)
    train = trainer(workload, samples)
    while (clients := pipe.recv()) is not None:
        torch._foreach_zero_(total)
        train(x, clients, total, 1 / COHORT)
        pipe.send(None)


def run(workload: Workload, workers: int) -> list[float]:
    """Seconds of each timed round."""
    torch.manual_seed(0)
    samples = data(workload)
    x = [p.detach().clone() for p in workload.model().parameters()]
    pipes: list[Connection] = []
    if workers > 1:
        x = [t.share_memory_() for t in x]
        totals = [[torch.zeros_like(t).share_memory_() for t in x] for _ in range(workers)]
        context = multiprocessing.get_context("fork")
        for total in totals:
            here, there = multiprocessing.Pipe()
            arguments = (workload, samples, x, total, there)
            context.Process(target=work, args=arguments, daemon=True).start()
            pipes.append(here)
    else:
        totals = [[torch.zeros_like(t) for t in x]]
        train = trainer(workload, samples)
    seconds = []
    for number in range(1, workload.rounds + 2):
        began = time.perf_counter()
        clients = cohort(number)
        if pipes:
            for at, pipe in enumerate(pipes):
                pipe.send(clients[at::workers])
            for pipe in pipes:
                pipe.recv()
        else:
            torch._foreach_zero_(totals[0])
            train(x, clients, totals[0], 1 / COHORT)
        torch._foreach_copy_(x, totals[0])
        for total in totals[1:]:
            torch._foreach_add_(x, total)
        seconds.append(time.perf_counter() - began)
    for pipe in pipes:
        pipe.send(None)
    return seconds[1:]


if __name__ == "__main__":
    args = arguments(__doc__, WORKLOADS)
    torch.set_num_threads(1)
    print(json.dumps({"rounds": run(WORKLOADS[args.workload], args.workers)}))
