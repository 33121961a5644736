"""Algebra on weights. A tree is a dict name -> tensor, in state-dict order, on any device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

Tree = dict[str, Tensor]
AnyTree = Mapping[str, Tensor]


class Difference(Mapping[str, Tensor]):
    """new - old, formed in float64 one tensor at a time, when it is read: K clients cost K float32 trees, not K float64 ones."""

    def __init__(self, new: AnyTree, old: AnyTree) -> None:
        self.new, self.old = new, old

    def __getitem__(self, name: str) -> Tensor:
        return self.new[name].double() - self.old[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.new)

    def __len__(self) -> int:
        return len(self.new)


class Sum:
    """A running weighted sum in float64: sum_k w_k t_k. Its memory does not depend on the number of trees.

    Differences from one old tree are summed as sum_k w_k new_k - (sum_k w_k) old: half of the memory traffic.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._total: Tree = {}
        self._old: AnyTree | None = None

    def add(self, tree: AnyTree, weight: float) -> None:
        """Add w_k t_k; ValueError where the weight is negative or not finite, or a difference is from another old tree."""
        if not 0 <= weight < math.inf:
            raise ValueError(f"a tree has the weight {weight}; weights are finite and >= 0")
        new, old = (tree.new, tree.old) if isinstance(tree, Difference) else (tree, None)
        if not self._total:
            self._total, self._old = {name: new[name].double() * weight for name in new}, old
        elif old is not self._old:
            raise ValueError("the differences of one sum must be from the same old tree")
        else:
            for name, total in self._total.items():
                total.add_(new[name], alpha=weight)
        self.weight += weight

    @property
    def tree(self) -> Tree:
        """sum_k w_k t_k; empty where nothing was added."""
        if self._old is None:
            return self._total
        return {name: total.sub(self._old[name], alpha=self.weight) for name, total in self._total.items()}

    def mean(self) -> Tree:
        """sum_k w_k t_k / sum_k w_k."""
        if not self.weight > 0:
            raise ValueError(f"a weighted mean needs a positive total weight, got {self.weight}")
        means = {name: total / self.weight for name, total in self._total.items()}
        return means if self._old is None else {name: t.sub_(self._old[name]) for name, t in means.items()}


def mean(pairs: Iterable[tuple[AnyTree, float]]) -> Tree:
    """The weighted mean in float64 of (tree, weight) pairs, summed in the order given."""
    total = Sum()
    for tree, weight in pairs:
        total.add(tree, weight)
    return total.mean()


def add(a: AnyTree, b: AnyTree, scale: float = 1.0) -> Tree:
    """a + scale b, in float64."""
    return {name: a[name].double().add_(b[name], alpha=scale) if a[name].dtype != torch.float64
            else a[name].add(b[name], alpha=scale) for name in a}


def map(f: Callable[[Tensor], Tensor], tree: AnyTree) -> Tree:
    return {name: f(tree[name]) for name in tree}


def zeros(tree: AnyTree) -> Tree:
    """Zeros of the tree's shapes, in float64."""
    return map(lambda t: torch.zeros_like(t, dtype=torch.float64), tree)


def cast(tree: AnyTree, like: AnyTree) -> Tree:
    """The tree's values in the dtypes of `like`."""
    return {name: tree[name].to(like[name].dtype) for name in tree}


def pick(tree: AnyTree, names: Iterable[str]) -> Tree:
    return {name: tree[name] for name in names}


def finite(tree: AnyTree) -> str | None:
    """The first name that holds a NaN or an infinity, or None."""
    floating = {name: tree[name] for name in tree if tree[name].is_floating_point()}
    # A sum is one pass, and one answer for all tensors; it can overflow on finite values, so only then is each entry looked at.
    if not floating or torch.isfinite(torch.stack([t.sum().double() for t in floating.values()]).sum()):
        return None
    return next((name for name, t in floating.items() if not torch.isfinite(t).all()), None)


def nbytes(tree: AnyTree) -> int:
    return sum(tree[name].numel() * tree[name].element_size() for name in tree)


def sha256(slots: Mapping[str, AnyTree]) -> str:
    """The hash over (slot, name, dtype, shape, bytes) of every slot, in name order."""
    h = hashlib.sha256()
    for slot in sorted(slots):
        for name in sorted(slots[slot]):
            t = slots[slot][name].detach().cpu().contiguous()
            h.update(f"{slot}|{name}|{str(t.dtype).removeprefix('torch.')}|{tuple(t.shape)}|".encode())
            h.update(t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return h.hexdigest()
