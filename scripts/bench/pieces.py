"""Classes that the benchmarks pass to fedhet by `_target_`; FEDHET_TRUST names this module."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence

import psutil
from torch import Tensor
from workloads import CLASSES, synthetic

from fedhet.core.client import FedClient
from fedhet.core.messages import Broadcast, Update
from fedhet.core.task import Samples
from fedhet.core.trees import Tree
from fedhet.data.dataset import Dataset
from fedhet.methods.fedavg import FedAvg


def dataset(*, name: str, data_dir: str, mean: Sequence[float], std: Sequence[float]) -> Dataset:
    """The synthetic samples as a data set, for engines that build the task in other processes."""
    x, y = synthetic()
    x = x.reshape(-1, 1, 28, 28)
    test = Samples(x[:CLASSES], y[:CLASSES])
    classes = tuple(map(str, range(CLASSES)))
    return Dataset(name, x, y, test, classes, tuple(mean), tuple(std))


class IdleClient(FedClient):
    """Loads the received weights into the model and sends them back."""

    def train(self, msg: Broadcast) -> Update:
        self.workspace.load(self.start(msg))
        return self.reply()


class Idle(FedAvg):
    """FedAvg with clients that return at once."""

    client_cls = IdleClient


class Resident(FedAvg):
    """FedAvg that reports the resident memory after each round."""

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        new = super().merge(updates, old)
        self.recorded = {"rss": psutil.Process().memory_info().rss}
        return new


class Streaming(FedAvg):
    """FedAvg that reports how many clients' trees are alive in the server's process at once.

    Trees that wait for their turn in the sum are counted too.
    """

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        self._most = 0
        new = super().merge(self._watched(updates), old)
        self.recorded = {"trees": float(self._most)}
        return new

    def _watched(self, updates: Iterator[Update]) -> Iterator[Update]:
        # One tensor of each tree; a tensor may outlive its message.
        known: dict[int, weakref.ref[Tensor]] = {}
        for update in updates:
            for each in gc.get_objects():
                if type(each) is Update and each.weights:
                    first = next(iter(each.weights.values()))
                    if isinstance(first, Tensor):  # not a reference into shared memory
                        known[id(first)] = weakref.ref(first)
            self._most = max(self._most, sum(ref() is not None for ref in known.values()))
            yield update
