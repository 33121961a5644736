"""The gradient of a batch loss as a pure function of the parameters: what can be compiled, or
vectorised over clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value

from fedhet.trees import Tree

if TYPE_CHECKING:
    from fedhet.site import Site

Gradient = Callable[
    [list[Tensor], Tree, Tensor, Tensor, Tensor | None], tuple[list[Tensor], Tensor, Tree]
]


def gradient(site: Site) -> Gradient:
    """f(parameters, buffers, x, y, w) -> (gradients, loss, buffers after the batch), for the site's
    model in its present mode.

    The loss is mean_b losses_b, or sum_b w_b losses_b where weights are given. Nothing that goes in
    is changed."""
    names, model, criterion = site.trained, site.model, site.task.criterion

    def loss(
        parameters: list[Tensor], buffers: Tree, x: Tensor, y: Tensor, w: Tensor | None
    ) -> tuple[Tensor, Tree]:
        after = {name: t.clone() for name, t in buffers.items()}
        with site.autocast():
            losses = criterion(
                functional_call(
                    model, {**dict(zip(names, parameters, strict=True)), **after}, (x,)
                ),
                y,
            )
        return losses.mean() if w is None else (losses * w).sum(), after

    derived = grad_and_value(loss, has_aux=True)

    def f(
        parameters: list[Tensor], buffers: Tree, x: Tensor, y: Tensor, w: Tensor | None
    ) -> tuple[list[Tensor], Tensor, Tree]:
        grads, (value, after) = derived(parameters, buffers, x, y, w)
        return list(grads), value, after

    return f


class Compiled:
    """`gradient` by torch.compile, for full batches: each other batch size would be compiled anew.

    It is built when it is first used, and again after the model's mode has changed (dropout, frozen
    norms)."""

    def __init__(self, site: Site) -> None:
        self._f: Gradient = torch.compile(gradient(site), dynamic=False)
        self._parameters = [p.detach() for p in site.parameters]  # the same memory
        self._buffers = dict(site.model.named_buffers())

    def __call__(self, x: Tensor, y: Tensor, w: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """(loss, gradients) of the model as it stands; its buffers move on as in an eager step."""
        with torch.no_grad():
            grads, loss, after = self._f(self._parameters, self._buffers, x, y, w)
            if after:
                torch._foreach_copy_([self._buffers[name] for name in after], list(after.values()))
        return loss, grads
