"""Models in two parts: the tensors that all clients share, and those of one client."""

from __future__ import annotations

import torch
from torch import nn

from fedhet.core.trees import AnyTree, Tree, check_form


def own_tensors(module: nn.Module, model: nn.Module, common: AnyTree) -> Tree:
    """Return copies of the tensors of `module` that are not in `common`, or differ from it there.

    Args:
        module: the model, or a module around it.
        model: the model whose names `common` has.
        common: the shared values.
    """
    shared = _prefixed(module, model, common)
    return {
        name: t.detach().clone()
        for name, t in module.state_dict().items()
        if name not in shared or not torch.equal(t, shared[name])
    }


def joined(module: nn.Module, model: nn.Module, common: AnyTree, own: AnyTree) -> Tree:
    """The inverse of `own_tensors`: the whole state of the module.

    Raises:
        ValueError: the parts together are not a state of this module.
    """
    whole: Tree = {**_prefixed(module, model, common), **own}
    check_form(f"{type(module).__name__} (personal_module)", whole, module.state_dict())
    return whole


def _prefixed(module: nn.Module, model: nn.Module, common: AnyTree) -> Tree:
    """The shared values under the names that they have in the module."""
    path = next((path for path, part in module.named_modules() if part is model), "")
    prefix = f"{path}." if path else ""
    return {f"{prefix}{name}": common[name] for name in common}
