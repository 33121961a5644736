"""Seeded random streams: every purpose has its own, so that a new draw changes no other draw.

A stream is identified by (seed, purpose, phase, step, pid); steps are counted inside their phase.
With the same seed, two methods therefore see the same clients, batches and initial weights, with or
without a warm-up phase.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def integer(seed: int, purpose: str, phase: str = "", step: int = 0, pid: int = -1) -> int:
    """Return the stream's own seed, an integer in [0, 2**63)."""
    name = f"{seed}|{purpose}|{phase}|{step}|{pid}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "little") >> 1


def generator(
    seed: int, purpose: str, phase: str = "", step: int = 0, pid: int = -1
) -> np.random.Generator:
    """Return a numpy generator that is seeded by the stream."""
    return np.random.default_rng(integer(seed, purpose, phase, step, pid))


def torch_generator(
    seed: int, purpose: str, phase: str = "", step: int = 0, pid: int = -1
) -> torch.Generator:
    """Return a torch generator that is seeded by the stream.

    It is on the CPU, so that all devices see the same draws.
    """
    import torch

    return torch.Generator().manual_seed(integer(seed, purpose, phase, step, pid))
