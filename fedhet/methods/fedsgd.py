"""FedSGD: one gradient per client and round, one step on the server (McMahan et al. 2017).

The paper is "Communication-efficient learning of deep networks from decentralized data", section 2.

    client: g_k = the gradient of its local loss at x, over all its samples
    server: x <- x - lr (sum_k p_k g_k + weight_decay x),  p_k = n_k / sum_j n_j

    down:          x
    up:            n_k, `fedsgd.g`; with batch norm: `fedsgd.buffers`
    client keeps:  nothing
    server keeps:  x

Up to rounding this is FedAvg with one epoch of one batch. The server takes the step, with client.lr
and client.weight_decay. client.epochs has no effect. client.momentum must be 0; for momentum, use
server_opt. Plug-ins change g_k as they change every gradient, then client.clip bounds it. The
method refuses plug-ins that need local steps, such as FedProx and FedNTD: their terms have no
gradient at x.

Options:

- `chunk` (1024) is the number of samples that go through the model at a time. The gradient is exact
  for any chunk, except with batch norm, which normalises each chunk separately. If a client's data
  fit into one chunk, batch norm normalises by all of the client's data.
- `batches=1` takes the gradient over one random mini-batch of client.batch_size samples. The
  default `full` takes it over all samples.

Deviations and choices: weight decay, clipping and batches=1 are additions. They are off by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedhet.core.authors import (
    AnyTree,
    Client,
    ClientContext,
    Expected,
    Merged,
    Message,
    Method,
    Result,
    State,
    Step,
    Tree,
    Update,
    Workspace,
    serves,
    setting,
    trees,
)
from fedhet.core.client import optimizers
from fedhet.core.server.merging import averaging_buffers


def server_step(x: AnyTree, gradient: AnyTree, lr: float, weight_decay: float = 0.0) -> Tree:
    """Return x - lr (gradient + weight_decay x), in float64."""
    return trees.add(x, trees.add(gradient, x, weight_decay), -lr)


class FedSGDClient(Client):
    """Sends the gradient of its local loss, and takes no step."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        # The order of FedAvg's first epoch, so batches=1 takes the first batch of FedAvg.
        order = torch.randperm(len(ctx.data), generator=ctx.stream("batches"))
        index, chunk = order.to(ctx.workspace.device), self.options.chunk
        if self.options.batches == "1":
            chunk = msg.local.batch_size
            index = index[:chunk]
        shape = min(chunk, len(ctx.data)), *ctx.data.x.shape[1:]
        ctx.workspace.limits.check_array(f"method.chunk={chunk}", *shape)
        g, after = ctx.gradient(msg.weights, index, chunk, scaled=True)
        if msg.local.clip is not None:
            optimizers.clip_norm(list(g.values()), msg.local.clip)
        buffers = trees.pick(after, sent_buffers(ctx.workspace))
        return Result(after, {"g": g, **({"buffers": buffers} if buffers else {})}), state


def sent_buffers(workspace: Workspace) -> list[str]:
    """Return the names of the buffers that clients send."""
    return [name for name in workspace.shared if name not in workspace.trained]


@dataclass(frozen=True, kw_only=True)
class FedSGD(Method):
    """Takes one step along the mean of the clients' gradients."""

    name = "fedsgd"
    client = FedSGDClient
    breaks = {
        "local steps": "a client computes one gradient",
        "weights": "a client sends a gradient instead",
    }

    batches: str = setting("full", allowed=("full", "1"))
    chunk: int = setting(1024, low=1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "batches", str(self.batches))  # 1 is a number in YAML
        super().__post_init__()

    def expects(self, step: Step) -> dict[str, Expected]:
        workspace = step.workspace
        sent = {"g": workspace.trained, "buffers": sent_buffers(workspace)}
        like = {key: trees.pick(workspace.initial, names) for key, names in sent.items() if names}
        return {name: Expected(like=tree) for name, tree in like.items()}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        buffers: Tree = {}
        passing = averaging_buffers(
            updates, step.average(), buffers, lambda u: u.extras.get("buffers", {})
        )
        gradient = step.mean((u["g"], u.weight) for u in passing)
        new = server_step(old, gradient, step.local.lr, step.local.weight_decay)
        return Merged(new, state, slots={"model": buffers})
