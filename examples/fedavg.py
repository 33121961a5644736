"""FedAvg (McMahan et al. 2017, algorithm 1) in plain torch, without fedhet.

Run it as `python examples/fedavg.py`: it trains on scikit-learn's digits, on clients with few
classes each, and prints the test accuracy. Given the same clients, initial weights and random
numbers, fedhet's FedAvg computes the same weights, bit for bit (tests/methods/test_fedavg.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Weights = dict[str, Tensor]


def client_update(
    model: nn.Module, x: Tensor, y: Tensor, epochs: int, size: int, lr: float, rng: torch.Generator
) -> Weights:
    """ClientUpdate(k, w): some epochs of SGD on mini-batches of `size` samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in torch.randperm(len(y), generator=rng).split(size):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return {name: t.clone() for name, t in model.state_dict().items()}


def weighted_mean(updates: Sequence[Weights], sizes: Sequence[int]) -> Weights:
    """sum_k (n_k / n) w_k, in float64 and in the order of the clients."""

    def mean(name: str) -> Tensor:
        total = sum(n * w[name].double() for n, w in zip(sizes, updates, strict=True))
        return (total / sum(sizes)).to(updates[0][name].dtype)

    return {name: mean(name) for name in updates[0]}


def fedavg(
    model: nn.Module,
    clients: Sequence[tuple[Tensor, Tensor]],
    sample: Callable[[int], Sequence[int]],
    generator: Callable[[int, int], torch.Generator],
    *,
    rounds: int,
    epochs: int,
    size: int,
    lr: float,
) -> None:
    """Server executes: train the model, which has no buffers, on the clients' data (x, y).

    `sample(t)` draws the participants of round t = 1, 2, ...; `generator(t, k)` has the random
    numbers by which client k shuffles its samples in that round.
    """
    for t in range(1, rounds + 1):
        w = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        participants = sample(t)
        updates = []
        for k in participants:
            model.load_state_dict(w)
            updates.append(client_update(model, *clients[k], epochs, size, lr, generator(t, k)))
        sizes = [len(clients[k][1]) for k in participants]
        model.load_state_dict(weighted_mean(updates, sizes))


def main() -> None:
    """100 rounds on 20 clients, each of which has two shards of the digits sorted by label."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16).float()
    y = torch.tensor(labels)
    test, train = torch.randperm(len(y)).tensor_split([len(y) // 5])
    shards = train[y[train].argsort(stable=True)].tensor_split(40)
    pairs = torch.randperm(40).view(20, 2).tolist()
    clients = [(x[own], y[own]) for own in (torch.cat([shards[i], shards[j]]) for i, j in pairs)]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def sample(t: int) -> list[int]:
        return torch.randperm(20)[:10].tolist()

    def generator(t: int, k: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * t + k)

    fedavg(model, clients, sample, generator, rounds=100, epochs=2, size=32, lr=0.1)
    hits = model(x[test]).argmax(1) == y[test]
    print(f"test accuracy {hits.float().mean():.3f}")


if __name__ == "__main__":
    main()
