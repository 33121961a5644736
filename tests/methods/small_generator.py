"""FedGen's options for a small generator, and the draws that a step makes for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedhet.core import streams
from fedhet.core.trees import AnyTree
from fedhet.methods.fedgen import NoiseSource

SMALL = {"noise_dim": 3, "hidden": 6, "server_steps": 3, "server_batch_size": 8}
SERVER = -1  # in place of a client's number


def source(
    run: Any, generator: AnyTree, step: int, pid: int, *, law: Tensor, noise: str = "normal"
) -> NoiseSource:
    """The noise and labels of training step `step`, at client `pid` or at the server."""
    stream = streams.torch_generator(run.workspace.seed, "fedgen", "train", step, pid)
    return NoiseSource(generator, stream, law=law, noise=noise)
