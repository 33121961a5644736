"""Chooses how many clients to train in one batch (engine.fused=auto)."""

from __future__ import annotations

from torch import nn

from fedhet.core.errors import ConfigError
from fedhet.engines.fused.clients import obstacle
from fedhet.runs.job import Job

# Largest number of a model's parameters -> the largest batch size with which fused training of such
# a model is faster than training one client after another, as scripts/bench has measured
# (docs/performance.md). If memory or arithmetic is the limit, fused training is not faster.
TABLE = {20_000: 128, 52_000: 32}
AT_ONCE = 60  # the number of clients in one batch; more clients gain little
FEWEST = 3  # with fewer clients in a round, fused training is slower


def together(job: Job) -> int:
    """Return how many clients of a run train in one batch; 0 for one after another.

    Raises:
        ConfigError: the settings of the run contradict each other.
    """
    run = job.config.run
    engine, deadline = run.engine, run.replies.deadline
    if not engine.may_fuse or (deadline and engine.fused == "auto"):
        return 0
    if deadline:
        raise ConfigError(
            f"replies.deadline={deadline:g} with engine.fused={engine.fused}: clients that train in"
            " one batch cannot be timed one by one; leave one of the two settings out"
        )
    if engine.fused != "auto":
        return int(engine.fused)
    clients = run.fraction * len(job.task.sizes)
    return suited(job.workspace.model, run.local.batch_size, clients)


def suited(model: nn.Module, batch_size: int, clients: float) -> int:
    """Return how many clients to train in one batch; 0 for one after another.

    The result depends only on the arguments, so that a run has the same bytes on every machine.

    Args:
        model: the clients' model.
        batch_size: the batch size of their local steps.
        clients: the number of clients in a round.
    """
    own = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    linear = all(isinstance(layer, nn.Linear) for layer in own)
    if clients < FEWEST or not linear or obstacle(model):
        return 0
    size = sum(p.numel() for p in model.parameters())
    return AT_ONCE if any(size <= most and batch_size <= b for most, b in TABLE.items()) else 0
