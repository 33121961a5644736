"""Classes that the benchmarks pass to fedhet by `_target_`; FEDHET_TRUST names this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from workloads import CLASSES, synthetic

from fedhet.core.client.context import ClientContext
from fedhet.core.kernel import Client, Message, Result, State, serves
from fedhet.core.task import Samples
from fedhet.data.dataset import Dataset
from fedhet.methods.fedavg import FedAvg


def dataset(*, name: str, data_dir: str, mean: Sequence[float], std: Sequence[float]) -> Dataset:
    """Return the synthetic samples as a data set; other processes can build it, too."""
    x, y = synthetic()
    x = x.reshape(-1, 1, 28, 28)
    test = Samples(x[:CLASSES], y[:CLASSES])
    classes = tuple(map(str, range(CLASSES)))
    return Dataset(name, x, y, test, classes, tuple(mean), tuple(std))


def many(
    *, name: str, data_dir: str, mean: Sequence[float], std: Sequence[float], n: int
) -> Dataset:
    """Return n synthetic samples of twenty numbers."""
    x = torch.rand(n, 20, generator=torch.Generator().manual_seed(0))
    y = torch.arange(n) % CLASSES
    classes, columns = (tuple(map(str, range(k))) for k in (CLASSES, 20))
    test = Samples(x[:CLASSES], y[:CLASSES])
    return Dataset(name, x, y, test, classes, tuple(mean), tuple(std), columns=columns)


class IdleClient(Client):
    """Loads the received weights into the model and sends them back."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        ctx.model(msg.weights)
        return Result(ctx.workspace.read([*msg.weights])), state


@dataclass(frozen=True, kw_only=True)
class Idle(FedAvg):
    """FedAvg with clients that return at once."""

    client = IdleClient
