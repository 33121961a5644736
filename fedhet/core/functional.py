"""The gradient of a batch loss as a pure function of the parameters.

In this form it can be compiled, or vectorised over clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value

from fedhet.core.trees import Tree

if TYPE_CHECKING:
    from fedhet.core.workspace import Site

Gradient = Callable[
    [list[Tensor], Tree, Tensor, Tensor, Tensor | None], tuple[list[Tensor], Tensor, Tree]
]


def gradient(site: Site) -> Gradient:
    """Return the gradient function of the site's model in its present mode.

    It maps (parameters, buffers, x, y, w) to (gradients, loss, buffers after the batch), and
    changes none of its arguments. The loss is mean_b losses_b, or sum_b w_b losses_b if the
    weights w (B,) are not None.
    """
    names = site.trained
    model = site.model
    criterion = site.task.criterion

    def loss(
        parameters: list[Tensor], buffers: Tree, x: Tensor, y: Tensor, w: Tensor | None
    ) -> tuple[Tensor, Tree]:
        after = {name: t.clone() for name, t in buffers.items()}
        state = {**dict(zip(names, parameters, strict=True)), **after}
        with site.autocast():
            losses = criterion(functional_call(model, state, (x,)), y)
        return losses.mean() if w is None else (losses * w).sum(), after

    gradients_and_loss = grad_and_value(loss, has_aux=True)

    def f(
        parameters: list[Tensor], buffers: Tree, x: Tensor, y: Tensor, w: Tensor | None
    ) -> tuple[list[Tensor], Tensor, Tree]:
        grads, (value, after) = gradients_and_loss(parameters, buffers, x, y, w)
        return list(grads), value, after

    return f


class Compiled:
    """`gradient`, compiled by torch.compile, for full batches.

    It is compiled when it is first used, and again after the model's mode has changed (dropout,
    frozen norms). Every other batch size would be compiled, too; hence full batches only.
    """

    def __init__(self, site: Site) -> None:
        self._f: Gradient = torch.compile(gradient(site), dynamic=False)
        self._parameters = [p.detach() for p in site.parameters]  # they share the model's memory
        self._buffers = dict(site.model.named_buffers())

    def __call__(self, x: Tensor, y: Tensor, w: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the gradients of the model, and update its buffers.

        The buffers change as they do in an eager step.

        Args:
            x: (B, ...) model inputs.
            y: (B, ...) targets.
            w: (B,) the samples' weights, or None for the mean.
        """
        with torch.no_grad():
            grads, loss, after = self._f(self._parameters, self._buffers, x, y, w)
            if after:
                torch._foreach_copy_([self._buffers[name] for name in after], list(after.values()))
        return loss, grads
