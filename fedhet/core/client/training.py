"""The parts of local training: a batch, the result of training, and the effect of terms on a step.

`ClientContext.fit` (context.py) trains with the loop in descent.py. FedGen's server trains its
generator with a small loop of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.core import trees
from fedhet.core.kernel import KINDS, Term
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.core.workspace import Workspace

Columns = tuple[Tensor, ...]  # x, y and positions of samples; and weights, if samples have them


@dataclass(slots=True)
class Batch:
    """One mini-batch during training.

    Attributes:
        x: inputs (B, ...), ready for the model.
        y: targets (B, ...).
        index: (B,) positions in the training set.
        features: (B, d) the input of the head; None if the model lacks features(x) or head(f).
        logits: the model's output.
        workspace: has the task's criterion, `teacher` and `autocast`.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    features: Tensor | None
    logits: Tensor
    workspace: Workspace

    @property
    def z(self) -> Tensor:
        """The features (B, d). Raise ValueError if the model has none."""
        if self.features is None:
            raise ValueError("the model has no features(x) and head(f)")
        return self.features


class Fitted(NamedTuple):
    """The result of training.

    Attributes:
        params: all tensors of the model after training.
        steps: the number of steps that were taken.
        records: the tensors that the terms recorded, by name, in the order of the batches.
        start: the model's tensors before the first training for the message.
        beside: the parameters that were trained in addition to the model's.
        momentum: the momentum buffers of SGD after training, if `fit` was given initial ones.
    """

    params: AnyTree
    steps: int
    records: Mapping[str, Tensor]
    start: AnyTree
    beside: AnyTree = {}
    momentum: Tree = {}


def joined(recorded: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Concatenate the tensors that the batches recorded, by name, in the order of the batches."""
    return {name: torch.cat(parts) for name, parts in recorded.items()}


def value(term: Term, params: Tree, batch: Batch, own: Prepared, records: Tree) -> Tensor:
    """Return the value of a loss or penalty term, and add its recorded tensors to `records`.

    Raises:
        TypeError: the value does not have the shape that the term's kind requires.
    """
    given = term.f(params, batch, own)
    result, recorded = given if isinstance(given, tuple) else (given, {})
    expected = () if term.kind == "penalty" else (len(batch.y),)
    if getattr(result, "shape", None) != expected:
        raise TypeError(
            f"the {term.kind} {named(term.f)[1]} returned {trees.kind(result)}; expected a tensor"
            f" of shape {expected} (kind {term.kind!r}: {KINDS[term.kind]})"
        )
    records.update(recorded)
    return result  # type: ignore[no-any-return]


def alter(term: Term, grads: Tree, params: AnyTree, own: Prepared) -> None:
    """Change the gradients in place by a term.

    A "gradient" term adds `factor` times its value; a "scale" term multiplies by its value.
    """
    if found := term.f(params, None, own):
        columns = trees.columns(found, grads, found)
        if term.kind == "scale":
            torch._foreach_mul_(*columns)
        else:
            torch._foreach_add_(*columns, alpha=term.factor)


def named(f: Callable[..., Any] | None) -> tuple[str, str]:
    """Return the module and name of a function, to compare functions of different clients.

    Two bound methods with the same module and name run the same code. Only the options of their
    objects can differ.
    """
    return getattr(f, "__module__", ""), getattr(f, "__qualname__", "")


@contextmanager
def only(model: nn.Module, names: Container[str]) -> Iterator[None]:
    """Make only these parameters of the model trainable while the context lasts.

    Args:
        model: the model.
        names: names of parameters.
    """
    before = {p: p.requires_grad for p in model.parameters()}
    try:
        for name, p in model.named_parameters():
            p.requires_grad_(name in names)
        yield
    finally:
        for p, trains in before.items():
            p.requires_grad_(trains)


def norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the model's batch norms, identified by type."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def usable(model: nn.Module, n: int, size: int) -> int:
    """Return how many of n samples training uses in batches of this size.

    Batch norm cannot train on one sample. If the model has batch norm, a single sample after the
    last full batch is left out.
    """
    left_out = bool(norms(model)) and n % size == 1 and n > 1 and size > 1
    return n - left_out
