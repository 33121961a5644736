"""FedSGD (McMahan et al. 2017): one gradient per client and round.

    x <- x - lr (sum_k p_k g_k + weight_decay x),      g_k = the gradient of client k's local loss at x, over all its samples

    down: x, `fedsgd.chunk` (0: batches=1)      up: n_k, `fedsgd.g`, `fedsgd.buffers` (batch norm
    only) client keeps: nothing      server keeps: x

Without weight decay and momentum it is FedAvg with one epoch of one batch, to rounding. The step is
the server's: so are the rate (client.lr) and client.weight_decay, while client.epochs means
nothing; server_opt gives momentum. Plug-ins change g_k as they change any gradient, then
client.clip bounds it. `chunk` samples go through the model at a time: exact, but for batch norm,
whose statistics are then each chunk's; where a client's data fit into one chunk they are those of
all data. `batches=1` takes one random mini-batch of client.batch_size instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from fedhet import check, optimizers, trees
from fedhet.client import FedClient
from fedhet.errors import ConfigError
from fedhet.messages import Broadcast, Extras, Update
from fedhet.phases import Phase
from fedhet.setting import Setting
from fedhet.strategy import FedStrategy
from fedhet.trees import AnyTree, Tree

CHUNK, GRADIENT, BUFFERS = "fedsgd.chunk", "fedsgd.g", "fedsgd.buffers"


def server_step(
    x: AnyTree, gradients: Iterable[tuple[AnyTree, float]], lr: float, weight_decay: float = 0.0
) -> Tree:
    """x - lr (sum_k p_k g_k / sum_k p_k + weight_decay x) of (g_k, p_k), in float64."""
    return trees.add(x, trees.add(trees.mean(gradients), x, weight_decay), -lr)


class FedSGDClient(FedClient):
    """Computes a gradient and takes no step."""

    def train(self, msg: Broadcast) -> Update:
        self.model = self.site.load(self.start(msg))
        draws = self.generator("batches")
        # the batches that FedAvg would draw
        index = torch.randperm(len(self.data), generator=draws).to(self.site.device)
        chunk = msg.integer(CHUNK)
        if not chunk:
            chunk = self.local.batch_size
            index = index[:chunk]
        grads = self.full_gradient(self.model, self.data, index, chunk)
        with torch.no_grad():
            self.apply_gradient_hooks(grads)
            if self.local.clip is not None:
                optimizers.clip_norm(grads, self.local.clip)
        update = self.reply({GRADIENT: dict(zip(self.site.trained, grads, strict=True))})
        buffers = {name: t for name, t in update.weights.items() if name not in self.site.trained}
        update.weights = {}  # x itself, which the server has
        if buffers:
            update.extras[BUFFERS] = buffers
        return update


class FedSGD(FedStrategy):
    """One step down the mean gradient."""

    name = "fedsgd"
    client_cls = FedSGDClient

    def __init__(self, setting: Setting, *, batches: str | int = "full", chunk: int = 1024) -> None:
        self.batches = check.one_of("method.batches", str(batches), ("full", "1"))
        self.chunk = check.integer("method.chunk", chunk, low=1)
        local = setting.local
        if local.optimizer != "sgd" or local.momentum:
            raise ConfigError(
                f"client.optimizer={local.optimizer}, client.momentum={local.momentum}:"
                " method=fedsgd takes its steps on the server; use client=sgd with"
                " client.momentum=0, and server_opt=fedavgm or another one"
            )
        if local.steps is not None:
            raise ConfigError(f"client.steps={local.steps}: method=fedsgd takes no local step")
        super().__init__(setting)
        self._like = trees.pick(self.site.initial, self.site.trained)
        self._buffers = trees.pick(
            self.site.initial, [name for name in self.site.shared if name not in self._like]
        )

    def phases(self) -> list[Phase]:
        # gradients come instead of weights
        return [replace(phase, uploads=False) for phase in super().phases()]

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {CHUNK: self.chunk if self.batches == "full" else 0}

    def check(self, update: Update) -> None:
        update.tree(GRADIENT, self._like)
        if self._buffers:
            # beside every merge, as if they had come with weights
            update.buffers = update.tree(BUFFERS, self._buffers)

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        gradients = ((update.tree(GRADIENT, self._like), update.weight) for update in updates)
        return server_step(old, gradients, self.local.lr, self.local.weight_decay)
