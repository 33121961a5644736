"""The floor: a plain loop that does only the local steps and the weighted sum. Prints JSON.

    python scripts/bench/floor.py rounds W1
        {"rounds": seconds of each timed round}

It uses resident tensors, one model, one gather per epoch, `autograd.grad`, an in-place step and a
running weighted sum.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from harness import answer
from torch import Tensor, nn
from torch.nn import functional
from workloads import COHORT, LR, WORKLOADS, Data, cohort, data


def train(
    model: nn.Module,
    x: Sequence[Tensor],
    samples: Data,
    total: Sequence[Tensor],
    batch: int,
    lr: float,
    *,
    share: float,
    epochs: int = 1,
) -> None:
    """Train clients from the same weights, one after another, and add up their models.

    Args:
        model: the model to train; its present weights do not count.
        x: the weights that the clients receive.
        samples: the samples of each client.
        total: gets the weighted sum of the clients' models.
        batch: samples per batch.
        lr: the learning rate.
        share: the weight of each client's model.
        epochs: local epochs.
    """
    params = list(model.parameters())
    torch._foreach_zero_(total)
    for inputs, targets in samples:
        with torch.no_grad():
            torch._foreach_copy_(params, x)
        for _ in range(epochs):
            order = torch.randperm(len(targets)).to(targets.device, non_blocking=True)
            batches = zip(inputs[order].split(batch), targets[order].split(batch), strict=True)
            for images, labels in batches:
                loss = functional.cross_entropy(model(images), labels)
                grads = torch.autograd.grad(loss, params)
                with torch.no_grad():
                    torch._foreach_add_(params, grads, alpha=-lr)
        with torch.no_grad():
            torch._foreach_add_(total, params, alpha=share)


def rounds(name: str) -> dict[str, Any]:
    """Time the rounds of a workload."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    samples = data(workload)
    model = workload.model()
    x = [p.detach().clone() for p in model.parameters()]
    total = [torch.zeros_like(t) for t in x]
    seconds = []
    for number in range(1, workload.rounds + 2):
        began = time.perf_counter()
        own = [samples[k] for k in cohort(number)]
        train(model, x, own, total, workload.batch, LR, share=1 / COHORT)
        torch._foreach_copy_(x, total)
        seconds.append(time.perf_counter() - began)
    return {"rounds": seconds[1:]}


if __name__ == "__main__":
    answer(rounds)
