"""How many clients to train as one, of a network and a batch size (engine.fused=auto)."""

from __future__ import annotations

from torch import nn

from fedhet.fused.clients import obstacle

# Parameters of a network, at most -> how many clients at a time.
TABLE = {10_000: 60, 60_000: 20}


def suited(model: nn.Module, batch_size: int) -> int:
    """How many clients to train as one; 0 for one after another.

    It depends on nothing else, so that a run has the same bytes on every machine.
    """
    if obstacle(model):
        return 0
    size = sum(p.numel() for p in model.parameters())
    return next((k for most, k in TABLE.items() if size <= most), 0)
