"""A model, and the gradient of its loss, as pure functions of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from fedhet.core.trees import AnyTree, Tree

if TYPE_CHECKING:
    from fedhet.core.workspace import Workspace


class Frozen:
    """A module as a function of its tensors, in eval mode by default.

    `frozen(values).features(x)` computes the same as torch.func.functional_call, but works for any
    method of the module and takes less time. `values` has all parameters and persistent buffers by
    name. The returned module has these values until the next call. The given module belongs to this
    object from then on.
    """

    def __init__(self, module: nn.Module, *, training: bool = False) -> None:
        self._module = module.train(training)
        self._places = []
        for name in list(module.state_dict()):
            path, _, key = name.rpartition(".")
            holder = module.get_submodule(path)
            delattr(holder, key)  # a plain tensor cannot take the place of a registered parameter
            self._places.append((name, vars(holder), key))

    def __call__(self, values: AnyTree) -> nn.Module:
        for name, attributes, key in self._places:
            attributes[key] = values[name]
        return self._module


def compiled(workspace: Workspace) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, list[Tensor]]]:
    """Return the gradient of the batch loss of the workspace's model as a compiled function.

    torch.compile compiles it on first use, and again if the model's mode has changed (dropout,
    frozen norms). Each further batch size would need a compilation; therefore use it for full
    batches only.

    Returns:
        A function from the columns of a batch to (the loss times the number of samples, the
        gradients). It changes the model's buffers as an eager step does.
    """
    model, criterion = workspace.model, workspace.task.criterion
    parameters = {
        n: p.detach() for n, p in zip(workspace.trained, workspace.parameters, strict=True)
    }
    buffers = dict(model.named_buffers())

    def loss(
        parameters: Tree, buffers: Tree, x: Tensor, y: Tensor, w: Tensor | None
    ) -> tuple[Tensor, Tree]:
        after = {name: t.clone() for name, t in buffers.items()}
        with workspace.autocast():
            losses = criterion(functional_call(model, {**parameters, **after}, (x,)), y)
        return losses.mean() if w is None else (losses * w).sum(), after

    f = torch.compile(grad_and_value(loss, has_aux=True), dynamic=False)

    @torch.no_grad()
    def quick(columns: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        x, y, _, *weight = columns
        grads, (value, after) = f(parameters, buffers, x, y, weight[0] / len(y) if weight else None)
        if after:
            torch._foreach_copy_(list(buffers.values()), list(after.values()))
        return value * len(y), list(grads.values())

    return quick
