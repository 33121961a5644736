"""On a GPU the operations of a step become a CUDA graph, which is launched as one.

A small network's operations take less time there than their launches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("fedhet")
WARM_UP = 3  # calls before the capture, in which libraries choose their kernels
Function = Callable[..., Any]


@cache
def _pool() -> Any:
    # All graphs share it: each is replayed only after what the last one gave has been used.
    return torch.cuda.graph_pool_handle()


@cache
def _say(reason: str) -> None:
    log.warning("steps are no CUDA graphs, because one could not be captured: %s", reason)


def captured(f: Function, given: tuple[Tensor, ...]) -> Function:
    """The function as a CUDA graph, or f itself where that is not possible.

    What it returns is overwritten when it, or another one, is called next.

    Args:
        f: a pure function of tensors on the GPU, which reads no others and waits for none.
        given: its arguments, whose shapes are those of all calls.
    """
    inputs = [t.clone() for t in given]
    try:
        # As torch's documentation of CUDA graphs demands: first on another stream.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                f(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_pool()):
            outputs = f(*inputs)
    except RuntimeError as error:
        _say(str(error).strip().partition("\n")[0])
        return f

    def replayed(*given: Tensor) -> Any:
        torch._foreach_copy_(inputs, list(given))
        graph.replay()
        return outputs

    return torch.no_grad()(replayed)
