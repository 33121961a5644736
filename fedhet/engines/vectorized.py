"""Several clients of this process trained as one, by torch.func.vmap over parameters and batches.

On a GPU the steps of a small model wait for kernel launches, and k clients then take little longer
than one. The result is that of one client after another, up to rounding. On a CPU nothing is gained
(docs/performance.md).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.dropout import _DropoutNd

from fedhet.core.client import FedClient
from fedhet.core.errors import ConfigError
from fedhet.core.functional import gradient
from fedhet.core.loop import Clock
from fedhet.core.messages import Broadcast, Failure, LocalSettings, Reply, Update
from fedhet.core.optimizers import SGD
from fedhet.core.plugin import STEP_HOOKS, Plugin, overrides
from fedhet.core.state import Store
from fedhet.core.task import Samples
from fedhet.core.trees import AnyTree
from fedhet.core.workspace import Workspace
from fedhet.engines.couriers import LocalCourier

if TYPE_CHECKING:
    from fedhet.job import Job

log = logging.getLogger("fedhet")
# Methods of a client that this module replaces, so that none of them may be overridden.
REPLACED = ("train", "train_model", "losses", "penalty", "objective", "gradient", "optimizer")
AUTO = 16  # clients at a time under engine.vectorize=auto on a GPU


# ---- whether clients can train as one
def clients_together(job: Job, make: Callable[[], FedClient]) -> int:
    """How many clients train as one (engine.vectorize); 0 for one after another.

    Raises:
        ConfigError: engine.vectorize is a number, but the clients cannot train as one.
    """
    wanted = job.config.run.engine.vectorize
    k = AUTO if wanted == "auto" else int(wanted)
    if not k or (wanted == "auto" and job.workspace.device.type != "cuda"):
        return 0
    reason = obstacle(make(), job.strategy.setting.local)
    if reason is None:
        return k
    if wanted != "auto":
        raise ConfigError(
            f"engine.vectorize={wanted}: these clients cannot train as one: {reason}; use"
            " engine.vectorize=0 or auto"
        )
    log.info("engine.vectorize=auto: one client after another, because %s", reason)
    return 0


def obstacle(client: FedClient, local: LocalSettings) -> str | None:
    """Why such clients cannot train as one; None where they can."""
    for name in REPLACED:
        if overrides(client, FedClient, name):
            return f"{type(client).__name__} has its own {name}"
    for plugin in client.plugins:
        for hook in STEP_HOOKS:
            if overrides(plugin, Plugin, hook):
                return f"plugin {plugin.name!r} has the hook {hook}"
    model = client.workspace.model
    if next(model.buffers(), None) is not None:
        return "the model has buffers, which training may change (model.norm=group has none)"
    if client.workspace.task.augment is not None:
        return "augmentation draws for one client at a time (dataset.augment=none)"
    if any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules()):
        return "dropout would draw other numbers"
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return "torch.func.vmap computes recurrent layers one client after another, or not at all"
    if local.optimizer != "sgd":
        return f"client.optimizer={local.optimizer} (sgd can)"
    return _refusal(client.workspace)


def _refusal(workspace: Workspace) -> str | None:
    """Why torch cannot vectorise this model and criterion; None where it can.

    One gradient is tried, on the first sample of the largest client.
    """
    sizes = workspace.task.sizes
    data = workspace.train_data(sizes.index(max(sizes)))
    parameters = [p[None] for p in workspace.parameters]
    buffers = dict(workspace.model.named_buffers())
    weights = torch.ones(1, 1, device=workspace.device)
    try:
        _vectorised(workspace)(parameters, buffers, data.x[None, :1], data.y[None, :1], weights)
    # what vmap raises for an operation that it has no rule for
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"torch says: {str(error).strip().splitlines()[0]}"
    return None


def _vectorised(workspace: Workspace) -> Callable[..., tuple[list[Tensor], Tensor, object]]:
    """`functional.gradient` over a further first dimension, the client, of all but the buffers."""
    return vmap(gradient(workspace), in_dims=(0, None, 0, 0, 0), out_dims=(0, 0, None))  # type: ignore[no-any-return, arg-type]


# ---- one client of a group
@dataclass
class Member:
    """A client of a group: where it starts, its data, and the positions of each of its batches."""

    client: FedClient
    start: AnyTree
    data: Samples
    weights: Tensor | None
    batches: list[Tensor]

    @classmethod
    def ready(cls, client: FedClient, msg: Broadcast) -> Member:
        """The client, ready to train: `FedClient.handle` and `train` up to the loop."""
        client.receive(msg)
        client.begin()
        data = client.data
        batches: list[Tensor] = []
        orders = client.orders(len(data))
        for size in client.local.epoch_sizes(len(data)):
            batches += next(orders)[:size].split(client.local.batch_size)
        return cls(client, client.start(client.msg), data, client.sample_weights(data), batches)

    def finish(self, parameters: list[Tensor], seconds: float) -> Update:
        """The reply, with these trained parameters."""
        client = self.client
        trained = dict(zip(client.workspace.trained, parameters, strict=True))
        client.model = client.workspace.load({**self.start, **trained})
        client.steps = len(self.batches)
        return client.finish(client.reply(), seconds)


# ---- the group
class VectorCourier(LocalCourier):
    """Trains k clients at a time. Other phases, and evaluation, are served one client at a time.

    Args:
        make: makes the client of one message.
        store: where the clients that it makes keep their states.
        k: how many clients train as one.
    """

    def __init__(self, make: Callable[[], FedClient], store: Store, k: int) -> None:
        super().__init__(make, store)
        self._k = k

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        if not plan[0].trains:
            yield from super().exchange(plan, clock)
            return
        for first in range(0, len(plan), self._k):
            with clock("clients"):
                replies = self._together(plan[first : first + self._k])
            yield from replies

    def _together(self, plan: list[Broadcast]) -> list[Reply]:
        """The replies of clients that are trained as one, in the order of their messages."""
        clients = [self._make() for _ in plan]
        opened = [
            client.handle(msg, partial(Member.ready, client, msg))
            for client, msg in zip(clients, plan, strict=True)
        ]
        members = [one for one in opened if isinstance(one, Member)]
        began = time.perf_counter()
        try:
            trained = train_together(members)
        except Exception as error:  # it concerns all of them: their arithmetic is one
            log.debug("clients %s", [one.client.pid for one in members], exc_info=True)
            cause = f"{type(error).__name__}: {error}"
            cause += f" (in a group of {len(members)}, engine.vectorize)"
            return [
                one if isinstance(one, Failure) else Failure(msg.pid, msg.phase, msg.step, cause)
                for one, msg in zip(opened, plan, strict=True)
            ]
        seconds = (time.perf_counter() - began) / max(1, len(members))
        parameters = iter(trained)
        replies: list[Reply] = []
        for one, msg in zip(opened, plan, strict=True):
            if isinstance(one, Member):
                work = partial(one.finish, next(parameters), seconds)
                replies.append(one.client.handle(msg, work))
            else:
                replies.append(one)
        return replies


def train_together(members: list[Member]) -> list[list[Tensor]]:
    """The trained parameters of each member.

    All take their first step together; those with more batches continue without the others.
    """
    if not members:
        return []
    # Longest first, so that the members that still train are always the first ones.
    order = sorted(range(len(members)), key=lambda i: -len(members[i].batches))
    group = [members[i] for i in order]
    workspace = group[0].client.workspace
    local = group[0].client.local
    values = [{**workspace.initial, **one.start} for one in group]
    params = [torch.stack([value[name] for value in values]) for name in workspace.trained]
    workspace.load(values[0])  # for the tensors that are not trained
    buffers = dict(workspace.model.named_buffers())
    largest = max(len(one.data) for one in group)
    x = torch.stack([_padded(one.data.x, largest) for one in group])
    y = torch.stack([_padded(one.data.y, largest) for one in group])
    index, weights = _stacked_batches(group, workspace.device)
    lengths = [len(one.batches) for one in group]
    rows = torch.arange(len(group), device=workspace.device)[:, None]
    workspace.model.train()
    gradients = _vectorised(workspace)
    momenta = [torch.zeros_like(p) for p in params]
    with torch.no_grad():
        for t in range(lengths[0]):
            k = sum(length > t for length in lengths)  # the members that still train
            w = [p[:k] for p in params]
            batch = rows[:k], index[:k, t]
            grads, _, _ = gradients(w, buffers, x[batch], y[batch], weights[:k, t])
            if local.clip is not None:
                grads = _clip(grads, local.clip)
            SGD(w, local, [m[:k] for m in momenta] if local.momentum else None).step(grads)
    row_of = {i: row for row, i in enumerate(order)}
    return [[p[row_of[i]] for p in params] for i in range(len(members))]


def _stacked_batches(group: list[Member], device: torch.device) -> tuple[Tensor, Tensor]:
    """(k, steps, batch size) positions of every batch, and the weights of its samples' losses."""
    width = max(len(batch) for one in group for batch in one.batches)
    index = torch.zeros(len(group), len(group[0].batches), width, dtype=torch.int64)
    weights = torch.zeros(index.shape, dtype=torch.float32)
    for row, one in enumerate(group):
        own = None if one.weights is None else one.weights.cpu()
        for t, batch in enumerate(one.batches):
            index[row, t, : len(batch)] = batch
            weights[row, t, : len(batch)] = (1.0 if own is None else own[batch]) / len(batch)
    return index.to(device), weights.to(device)


def _padded(t: Tensor, n: int) -> Tensor:
    """The tensor with n rows; those that it lacks are zeros."""
    return t if len(t) == n else torch.cat([t, t.new_zeros(n - len(t), *t.shape[1:])])


def _clip(grads: list[Tensor], limit: float) -> list[Tensor]:
    """`optimizers.clip_norm` for stacked gradients, by the norm of each client's own gradient."""
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
    factor = (limit / (norms + 1e-6)).clamp(max=1.0)
    return [g * factor.view(-1, *[1] * (g.ndim - 1)) for g in grads]
