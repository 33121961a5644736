"""Several clients of this process trained as one, by torch.func.vmap over their parameters and
batches.

On a GPU the steps of a small model wait for kernel launches, and k clients then cost little more
than one. The result is that of one client after another up to rounding; on a CPU it is no faster
(docs/performance.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.dropout import _DropoutNd

from fedhet.client import FedClient
from fedhet.engines.couriers import LocalCourier
from fedhet.engines.functional import gradient
from fedhet.errors import ConfigError
from fedhet.messages import Broadcast, Failure, LocalSettings, Reply, Update
from fedhet.optimizers import SGD
from fedhet.plugin import active_hooks, overrides
from fedhet.server import Clock
from fedhet.site import Site
from fedhet.task import Samples
from fedhet.trees import AnyTree

if TYPE_CHECKING:
    from fedhet.job import Job
    from fedhet.state import Store

log = logging.getLogger("fedhet")
OWN = ("train", "train_model", "losses", "penalty", "objective", "gradient", "optimizer")
AUTO = 16  # clients at a time under engine.vectorize=auto


def obstacle(client: FedClient, local: LocalSettings) -> str | None:
    """Why such clients cannot train as one, or None."""
    for name in OWN:
        if overrides(client, FedClient, name):
            return f"{type(client).__name__} has its own {name}"
    for hook, found in active_hooks(client.plugins).items():
        if found:
            return f"plugin {found[0].__self__.name!r} has the hook {hook}"
    if next(client.site.model.buffers(), None) is not None:
        return "the model has buffers, which training may change (model.norm=group has none)"
    if client.site.task.augment is not None:
        return "augmentation draws for one client at a time (dataset.augment=none)"
    if any(
        isinstance(module, _DropoutNd) and module.p > 0 for module in client.site.model.modules()
    ):
        return "dropout would draw other numbers"
    if any(isinstance(module, nn.RNNBase) for module in client.site.model.modules()):
        return "torch.func.vmap computes recurrent layers one client after another, or not at all"
    return (
        f"client.optimizer={local.optimizer} (sgd can)"
        if local.optimizer != "sgd"
        else _refused(client.site)
    )


def _refused(site: Site) -> str | None:
    """Why torch cannot vectorise this model and criterion, found by one gradient of a client's
    first sample; or None."""
    first = site.train_data(max(range(len(site.task.sizes)), key=site.task.sizes.__getitem__))
    x, y = first.x[None, :1], first.y[None, :1]
    try:
        _vectorised(site)(
            [p[None] for p in site.parameters],
            dict(site.model.named_buffers()),
            x,
            y,
            torch.ones(1, 1, device=site.device),
        )
    # what vmap raises for what it has no rule for
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"torch says: {str(error).strip().splitlines()[0]}"
    return None


def _vectorised(site: Site) -> Callable[..., tuple[list[Tensor], Tensor, object]]:
    return vmap(gradient(site), in_dims=(0, None, 0, 0, 0), out_dims=(0, 0, None))  # type: ignore[no-any-return, arg-type]


@dataclass
class Member:
    """A client of a group: where it starts, its data, and the positions of each of its batches."""

    client: FedClient
    start: AnyTree
    data: Samples
    weights: Tensor | None
    batches: list[Tensor]

    def finish(self, parameters: list[Tensor], seconds: float) -> Update:
        """The reply, with these trained parameters."""
        client = self.client
        trained = dict(zip(client.site.trained, parameters, strict=True))
        client.model = client.site.load({**self.start, **trained})
        client.steps = len(self.batches)
        return client.finish(client.reply(), seconds)


class VectorCourier(LocalCourier):
    """Trains k clients at a time; every other phase, and evaluation, is served one by one."""

    def __init__(self, make: Callable[[], FedClient], k: int) -> None:
        super().__init__(make)
        self._k = k

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        if not plan[0].trains:
            yield from super().exchange(plan, clock)
            return
        for at in range(0, len(plan), self._k):
            with clock("clients"):
                replies = self._together(plan[at : at + self._k])
            yield from replies

    def _together(self, plan: list[Broadcast]) -> list[Reply]:
        """The replies of clients that are trained as one, in the order of their messages."""
        clients = [self._make() for _ in plan]
        opened = [
            client.attempt(msg, partial(member, client, msg))
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
                replies.append(one.client.attempt(msg, work))
            else:
                replies.append(one)
        return replies


def courier(job: Job, store: Store) -> LocalCourier:
    """The courier that engine.vectorize asks for; ConfigError where the number is given and the
    clients cannot train as one."""
    wanted, device = job.config.cfg.engine.vectorize, job.site.device
    k = (AUTO if device.type == "cuda" else 0) if wanted == "auto" else int(wanted)
    if k and (reason := obstacle(job.client(store), job.strategy.setting.local)):
        if wanted != "auto":
            raise ConfigError(
                f"engine.vectorize={wanted}: these clients cannot train as one: {reason}; use"
                " engine.vectorize=0 or auto"
            )
        log.info("engine.vectorize=auto: one client after another, because %s", reason)
        k = 0
    return (
        VectorCourier(lambda: job.client(store), k)
        if k > 1
        else LocalCourier(lambda: job.client(store))
    )


def member(client: FedClient, msg: Broadcast) -> Member:
    """The client, ready to train: `FedClient.train` up to its loop."""
    client.receive(msg)
    client.prepare()
    n = len(client.data)
    epochs = zip(client.local.epoch_sizes(n), client.orders(n), strict=False)  # orders never end
    batches = [
        batch for size, order in epochs for batch in order[:size].split(client.local.batch_size)
    ]
    weights = client.sample_weights(client.data)
    return Member(client, client.start(client.msg), client.data, weights, batches)


def train_together(members: list[Member]) -> list[list[Tensor]]:
    """The trained parameters of each member.

    All take their first step together; those with more batches go on without the others.
    """
    if not members:
        return []
    # Longest first, so that those that still train are always the first ones.
    order = sorted(range(len(members)), key=lambda i: -len(members[i].batches))
    group = [members[i] for i in order]
    site = group[0].client.site
    local = group[0].client.local
    values = [{**site.initial, **one.start} for one in group]
    params = [torch.stack([value[name] for value in values]) for name in site.trained]
    site.load(values[0])  # for what nobody trains
    buffers = dict(site.model.named_buffers())
    largest = max(len(one.data) for one in group)
    x = torch.stack([_padded(one.data.x, largest) for one in group])
    y = torch.stack([_padded(one.data.y, largest) for one in group])
    index, weights = _stacked_batches(group, site.device)
    lengths = [len(one.batches) for one in group]
    rows = torch.arange(len(group), device=site.device)[:, None]
    site.model.train()
    step = _vectorised(site)
    unclipped = replace(local, clip=None)
    momenta = [torch.zeros_like(p) for p in params]
    with torch.no_grad():
        for t in range(lengths[0]):
            a = sum(length > t for length in lengths)  # the members that still train
            w = [p[:a] for p in params]
            at = index[:a, t]
            grads, _, _ = step(w, buffers, x[rows[:a], at], y[rows[:a], at], weights[:a, t])
            if local.clip is not None:
                grads = _clip(grads, local.clip)
            SGD(w, unclipped, [m[:a] for m in momenta] if local.momentum else None).step(grads)
    row_of = {i: row for row, i in enumerate(order)}
    return [[p[row_of[i]] for p in params] for i in range(len(members))]


def _stacked_batches(group: list[Member], device: torch.device) -> tuple[Tensor, Tensor]:
    """(k, steps, batch size) positions of every batch, and the weights of its samples' losses."""
    width = max(len(batch) for one in group for batch in one.batches)
    index = torch.zeros(len(group), len(group[0].batches), width, dtype=torch.int64)
    weights = torch.zeros(index.shape, dtype=torch.float32)
    for row, one in enumerate(group):
        for t, batch in enumerate(one.batches):
            index[row, t, : len(batch)] = batch
            own = 1.0 if one.weights is None else one.weights[batch.to(device)].cpu()
            weights[row, t, : len(batch)] = own / len(batch)
    return index.to(device), weights.to(device)


def _padded(t: Tensor, n: int) -> Tensor:
    return t if len(t) == n else torch.cat([t, t.new_zeros(n - len(t), *t.shape[1:])])


def _clip(grads: list[Tensor], limit: float) -> list[Tensor]:
    """`optimizers.clip_norm` for stacked gradients; the norm is each client's own."""
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
    factor = (limit / (norms + 1e-6)).clamp(max=1.0)
    return [g * factor.view(-1, *[1] * (g.ndim - 1)) for g in grads]
