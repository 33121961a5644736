"""FedSGD: one gradient per client and round, one step on the server (McMahan et al. 2017).

The paper is "Communication-efficient learning of deep networks from decentralized data", section 2.

    client: g_k = the gradient of its local loss at x, over all its samples
    server: x <- x - lr (sum_k p_k g_k + weight_decay x),  p_k = n_k / sum_j n_j

    down:          x, `fedsgd.chunk` (0 for batches=1)
    up:            n_k, `fedsgd.g`; with batch norm: `fedsgd.buffers`
    client keeps:  nothing
    server keeps:  x

Up to rounding this is FedAvg with one epoch of one batch. The step is the server's, and so are
client.lr and client.weight_decay; client.epochs has no effect. client.momentum must be 0:
server_opt gives momentum. Plug-ins change g_k as they change every gradient, then client.clip
bounds it. A plug-in that needs local steps is refused, such as FedProx and FedNTD, whose terms have
no gradient at x.

Options:

- `chunk` (1024) is the number of samples that go through the model at a time. The gradient is exact
  all the same, except for batch norm, which normalises each chunk separately; where a client's data
  fit into one chunk, its statistics are those of all data.
- `batches=1` replaces all samples by one random mini-batch of client.batch_size; the default is
  `full`.

Deviations and choices: weight decay, clipping and batches=1 are additions; all are off by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from fedhet.core import check, optimizers, trees
from fedhet.core.client import FedClient
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.training import trained
from fedhet.core.trees import AnyTree, Tree

CHUNK = "fedsgd.chunk"
GRADIENT = "fedsgd.g"
BUFFERS = "fedsgd.buffers"


def server_step(x: AnyTree, gradient: AnyTree, lr: float, weight_decay: float = 0.0) -> Tree:
    """x - lr (gradient + weight_decay x) in float64."""
    direction = trees.add(gradient, x, weight_decay)
    return trees.add(x, direction, -lr)


class FedSGDClient(FedClient):
    """Sends the gradient of its local loss; it takes no step."""

    def train(self, msg: Broadcast) -> Update:
        self.model = self.workspace.load(self.start(msg))
        # The order of FedAvg's first epoch, so that batches=1 takes the first of its batches.
        index = next(self.orders(len(self.data))).to(self.workspace.device)
        chunk = msg.integer(CHUNK)
        if not chunk:
            chunk = self.local.batch_size
            index = index[:chunk]
        self._check_batch("method.chunk", chunk, self.data)
        grads = self.full_gradient(self.model, self.data, index, chunk)
        with torch.no_grad():
            self.apply_gradient_hooks(grads, trained(self.model))
            if self.local.clip is not None:
                optimizers.clip_norm(list(grads.values()), self.local.clip)
        update = self.reply({GRADIENT: grads})
        buffers = [name for name in update.weights if name not in self.workspace.trained]
        if buffers:
            update.extras[BUFFERS] = trees.pick(update.weights, buffers)
        update.weights = {}  # the parameters are still x, which the server has
        return update


class FedSGD(FedStrategy):
    """Takes one step along the mean of the clients' gradients."""

    name = "fedsgd"
    client_cls = FedSGDClient
    only_means = True
    takes_steps = False
    sends_weights = False

    def __init__(self, setting: Setting, *, batches: str | int = "full", chunk: int = 1024) -> None:
        self.batches = check.one_of("method.batches", str(batches), ("full", "1"))
        self.chunk = check.integer("method.chunk", chunk, low=1)
        super().__init__(setting)

    def setup(self) -> None:
        workspace = self.workspace
        buffers = [name for name in workspace.shared if name not in workspace.trained]
        self._like = trees.pick(workspace.initial, workspace.trained)
        self._buffers = trees.pick(workspace.initial, buffers)
        self.releases = 2 if any(t.is_floating_point() for t in self._buffers.values()) else 1

    def phases(self) -> list[Phase]:
        # Clients send gradients instead of weights.
        return [replace(phase, uploads=False) for phase in super().phases()]

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {CHUNK: self.chunk if self.batches == "full" else 0}

    def check(self, update: Update) -> None:
        update.tree(GRADIENT, self._like)
        if self._buffers:
            # The server averages them beside the merge, as it does when they come with weights.
            update.buffers = update.tree(BUFFERS, self._buffers)

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        gradients = ((update.tree(GRADIENT), update.weight) for update in updates)
        gradient = self.setting.merge.mean(gradients)
        return server_step(old, gradient, self.local.lr, self.local.weight_decay)
