"""The gradient of a batch loss, and a model without gradients, as pure functions of tensors.

In this form the one can be compiled, and the other is evaluated with any values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from fedhet.core.trees import AnyTree, Tree

if TYPE_CHECKING:
    from fedhet.core.workspace import Workspace

Gradient = Callable[
    [list[Tensor], Tree, Tensor, Tensor, Tensor | None], tuple[list[Tensor], Tensor, Tree]
]


def gradient(workspace: Workspace) -> Gradient:
    """Return the gradient function of the workspace's model in its present mode.

    It maps (parameters, buffers, x, y, w) to (gradients, loss, buffers after the batch), and
    changes none of its arguments. The loss is mean_b losses_b, or sum_b w_b losses_b if the
    weights w (B,) are not None.
    """
    names = workspace.trained
    model = workspace.model
    criterion = workspace.task.criterion

    def loss(
        parameters: list[Tensor], buffers: Tree, x: Tensor, y: Tensor, w: Tensor | None
    ) -> tuple[Tensor, Tree]:
        after = {name: t.clone() for name, t in buffers.items()}
        state = {**dict(zip(names, parameters, strict=True)), **after}
        with workspace.autocast():
            losses = criterion(functional_call(model, state, (x,)), y)
        return losses.mean() if w is None else (losses * w).sum(), after

    gradients_and_loss = grad_and_value(loss, has_aux=True)

    def f(
        parameters: list[Tensor], buffers: Tree, x: Tensor, y: Tensor, w: Tensor | None
    ) -> tuple[list[Tensor], Tensor, Tree]:
        grads, (value, after) = gradients_and_loss(parameters, buffers, x, y, w)
        return list(grads), value, after

    return f


class Frozen:
    """A module as a function of its tensors, in eval mode unless told otherwise.

    `frozen(values).features(x)` is what torch.func.functional_call computes, for any method of the
    module and in less time. The values, by name, are all of its parameters and lasting buffers;
    the module that is returned has them until the next call. The module that is given belongs to
    this object from then on.
    """

    def __init__(self, module: nn.Module, *, training: bool = False) -> None:
        self._module = module.train(training)
        self._places = []
        for name in list(module.state_dict()):
            path, _, key = name.rpartition(".")
            holder = module.get_submodule(path)
            delattr(holder, key)  # where a parameter is registered, no plain tensor may be
            self._places.append((name, vars(holder), key))

    def __call__(self, values: AnyTree) -> nn.Module:
        for name, attributes, key in self._places:
            attributes[key] = values[name]
        return self._module


class Compiled:
    """`gradient`, compiled by torch.compile, for full batches.

    It is compiled when it is first used, and again after the model's mode has changed (dropout,
    frozen norms). Every other batch size would be compiled, too; hence full batches only.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._f: Gradient = torch.compile(gradient(workspace), dynamic=False)
        self._parameters = [
            p.detach() for p in workspace.parameters
        ]  # they share the model's memory
        self._buffers = dict(workspace.model.named_buffers())

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
