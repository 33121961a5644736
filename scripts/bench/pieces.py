"""Classes that the benchmarks pass to fedhet by `_target_`; FEDHET_TRUST names this module."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
from torch import Tensor
from workloads import CLASSES, synthetic

from fedhet.core import kernel, messages
from fedhet.core.client.site import Site
from fedhet.core.kernel import Client, Merged, Message, Result, State, Step, serves
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


class IdleClient(Client):
    """Loads the received weights into the model and sends them back."""

    @serves
    def train(self, msg: Message, state: State, site: Site) -> tuple[Result, State]:
        site.model(msg.weights)
        return Result(site.workspace.read([*msg.weights])), state


@dataclass(frozen=True, kw_only=True)
class Idle(FedAvg):
    """FedAvg with clients that return at once."""

    client = IdleClient


@dataclass(frozen=True, kw_only=True)
class Resident(FedAvg):
    """FedAvg that reports the resident memory after each round."""

    breaks = {}

    def merge(
        self, step: Step, state: State, old: Tree, updates: Iterator[kernel.Update]
    ) -> Merged:
        merged = super().merge(step, state, old, updates)
        return merged._replace(metrics={"rss": psutil.Process().memory_info().rss})


@dataclass(frozen=True, kw_only=True)
class Streaming(FedAvg):
    """FedAvg that reports how many clients' trees are alive in the server's process at once.

    Trees that wait for their turn in the sum are counted too.
    """

    breaks = {}

    def merge(
        self, step: Step, state: State, old: Tree, updates: Iterator[kernel.Update]
    ) -> Merged:
        alive = [0]

        def watched() -> Iterator[kernel.Update]:
            # One tensor of each tree; a tensor may outlive its message.
            known: dict[int, weakref.ref[Tensor]] = {}
            for update in updates:
                for each in gc.get_objects():
                    if type(each) is messages.Upload and each.weights:
                        first = next(iter(each.weights.values()))
                        if isinstance(first, Tensor):  # not a reference into shared memory
                            known[id(first)] = weakref.ref(first)
                alive.append(sum(ref() is not None for ref in known.values()))
                yield update

        merged = super().merge(step, state, old, watched())
        return merged._replace(metrics={"trees": float(max(alive))})
