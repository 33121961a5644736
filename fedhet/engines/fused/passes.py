"""Forward passes, and evaluations, of several models in one batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedhet.core.client.functional import Frozen
from fedhet.core.metrics import FORWARD_BATCH, scored, tallied
from fedhet.core.targets import Scores, Tally
from fedhet.core.task import Samples, Task
from fedhet.engines.fused import stacks
from fedhet.engines.fused.stacks import at_rows
from fedhet.engines.fused.steps import width

RECURRENT = "torch.func.vmap computes recurrent layers one model after another, or not at all"

_TENSORS: WeakKeyDictionary[nn.Module, list[Tensor]] = WeakKeyDictionary()


def padded(t: Tensor, n: int) -> Tensor:
    """Return the tensor padded with zeros to n rows."""
    return t if len(t) == n else torch.cat([t, t.new_zeros(n - len(t), *t.shape[1:])])


@dataclass
class Pass:
    """One client's request for a forward pass: its model's outputs for x, in eval mode.

    Attributes:
        module: the model.
        x: the inputs (n, ...).
        part: the method of the module to call, such as "features" or "forward".
    """

    module: nn.Module
    x: Tensor
    part: str = "forward"

    @cached_property
    def form(self) -> Hashable:
        """The key that passes must share to be computed in one batch."""
        x = self.x
        return stacks.layers(self.module), self.part, x.shape[1:], x.dtype, x.device

    def alone(self) -> Tensor:
        """Return the outputs (n, ...), computed without other passes."""
        return torch.cat([getattr(self.module, self.part)(x) for x in self.x.split(FORWARD_BATCH)])

    @staticmethod
    @torch.no_grad()
    def perform(requests: Sequence[Pass]) -> list[Tensor]:
        """Return the outputs (n, ...) of each pass; a pass without inputs left drops out.

        Raises:
            ValueError: the model has recurrent layers.
        """
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].x))
        passes = [requests[i] for i in order]
        if any(isinstance(layer, nn.RNNBase) for layer in passes[0].module.modules()):
            raise ValueError(RECURRENT)
        module = Frozen(deepcopy(passes[0].module))
        states = [each.module.state_dict() for each in passes]
        values = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        part = passes[0].part

        def output(values: dict[str, Tensor], x: Tensor) -> Tensor:
            return getattr(module(values), part)(x)  # type: ignore[no-any-return]

        parts: list[list[Tensor]] = [[] for _ in passes]
        for start in range(0, len(passes[0].x), FORWARD_BATCH):
            batches = [p.x[start : start + FORWARD_BATCH] for p in passes if len(p.x) > start]
            widths = [width(len(batch), FORWARD_BATCH) for batch in batches]
            for n in set(widths):
                first = widths.index(n)  # equal widths are adjacent
                rows = slice(first, first + widths.count(n))
                x = torch.stack([padded(batch, n) for batch in batches[rows]])
                found = vmap(output)(at_rows(values, rows), x)
                for batch, done, outputs_ in zip(batches[rows], parts[rows], found, strict=True):
                    done.append(outputs_[: len(batch)])
        outputs = [torch.cat(each) if len(each) > 1 else each[0] for each in parts]
        return [outputs[order.index(i)] for i in range(len(requests))]


@dataclass
class Assessment:
    """One client's request to evaluate its model on sets of samples.

    Attributes:
        module: the model, in eval mode.
        parts: the sets, ready for the model; at least one.
        task: has the criterion and the target.
    """

    module: nn.Module
    parts: Sequence[Samples]
    task: Task

    @cached_property
    def form(self) -> Hashable:
        """The key that evaluations must share to be computed in one batch."""
        x, y = self.parts[0].x, self.parts[0].y
        return stacks.layers(self.module), x.shape[1:], x.dtype, x.device, y.shape[1:], y.dtype

    @staticmethod
    @torch.no_grad()
    def perform(requests: Sequence[Assessment]) -> list[list[tuple[Scores, Tally]]]:
        """Return what `fedhet.core.metrics.assess` returns for each request.

        If all clients of a run have the same values, one forward pass serves them all. The outputs
        may then differ from a client's own by rounding.
        """
        runs: dict[int, list[int]] = {}  # the requests of each run, by its task
        for i, request in enumerate(requests):
            runs.setdefault(id(request.task), []).append(i)
        passes = []
        for members in runs.values():
            own = [requests[i] for i in members]
            every = zip(*(_tensors(each.module) for each in own), strict=True) if own[1:] else ()
            unequal = [(torch.stack(tensors) != tensors[0]).any() for tensors in every]
            same = not unequal or not torch.stack(unequal).any()  # one wait for an accelerator
            for group in [own] if same else [[each] for each in own]:
                x = torch.cat([part.x for each in group for part in each.parts])
                passes.append(Pass(group[0].module, x))
        outputs = Pass.perform(passes) if len(passes) > 1 else [passes[0].alone()]
        output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        results: list[list[tuple[Scores, Tally]]] = [[] for _ in requests]
        for members in runs.values():
            task, parts = requests[members[0]].task, [requests[i].parts for i in members]
            sizes = [len(part) for part in chain(*parts)]
            y = torch.cat([part.y for part in chain(*parts)])
            own_output, output = output[: len(y)], output[len(y) :]
            found = iter(scored(*tallied(own_output, y, sizes, task), sizes, task))
            for i in members:
                results[i] = [*islice(found, len(requests[i].parts))]
        return results


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module, which keeps its tensor objects."""
    if module not in _TENSORS:
        _TENSORS[module] = [*module.parameters(), *module.buffers()]
    return _TENSORS[module]
