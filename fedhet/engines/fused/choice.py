"""How many clients to train as one, of a network and a batch size (engine.fused=auto)."""

from __future__ import annotations

from torch import nn

from fedhet.core.errors import ConfigError
from fedhet.engines.fused.clients import obstacle
from fedhet.runs.job import Job

# Parameters of a network, at most -> the largest batch for which clients that train as one are
# faster than one after another, as measured by scripts/bench (docs/performance.md). Where memory or
# arithmetic is the limit they are not.
TABLE = {20_000: 128, 52_000: 32}
AT_ONCE = 60  # clients; more gain little
FEWEST = 3  # clients in a round; fewer are slower as one


def together(job: Job) -> int:
    """How many clients of a run train as one; 0 for one after another.

    Raises:
        ConfigError: the settings of the run do not fit together.
    """
    run = job.config.run
    engine, deadline = run.engine, run.replies.deadline
    if not engine.may_fuse or (deadline and engine.fused == "auto"):
        return 0
    if deadline:
        raise ConfigError(
            f"replies.deadline={deadline:g} with engine.fused={engine.fused}: clients that"
            " train as one have no seconds of their own"
        )
    if engine.fused != "auto":
        return int(engine.fused)
    clients = run.fraction * len(job.task.sizes)
    return suited(job.workspace.model, run.local.batch_size, clients)


def suited(model: nn.Module, batch_size: int, clients: float) -> int:
    """How many clients to train as one; 0 for one after another.

    It depends on nothing else, so that a run has the same bytes on every machine.

    Args:
        model: what they train.
        batch_size: of their local steps.
        clients: how many are in a round.
    """
    own = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    linear = all(isinstance(layer, nn.Linear) for layer in own)
    if clients < FEWEST or not linear or obstacle(model):
        return 0
    size = sum(p.numel() for p in model.parameters())
    return AT_ONCE if any(size <= most and batch_size <= b for most, b in TABLE.items()) else 0
