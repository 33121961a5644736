"""Algebra on weights. A tree is a dict name -> tensor, in state-dict order, on any device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

Tree = dict[str, Tensor]
AnyTree = Mapping[str, Tensor]

# entries that a sum takes at a time: torch makes float64 copies of them first, which so stay in the
# cache
BLOCK = 2**19


class Difference(Mapping[str, Tensor]):
    """new - old, formed in float64 one tensor at a time, when it is read: K clients cost K float32
    trees, not K float64 ones."""

    def __init__(self, new: AnyTree, old: AnyTree) -> None:
        self.new, self.old = new, old

    def __getitem__(self, name: str) -> Tensor:
        return self.new[name].double() - self.old[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.new)

    def __len__(self) -> int:
        return len(self.new)


class Sum:
    """A running weighted sum in float64: sum_k w_k t_k. Its memory does not depend on the number of
    trees.

    Differences from the first one's old tree are summed as sum_k w_k new_k - (sum_k w_k) old: half
    of the memory traffic."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._total: Tree = {}
        self._old: AnyTree = {}
        self._moved = 0.0  # the weight of the differences from `_old`

    def add(self, tree: AnyTree, weight: float) -> None:
        """Add w_k t_k; ValueError where the weight is negative or not finite."""
        if not 0 <= weight < math.inf:
            raise ValueError(f"a tree has the weight {weight}; weights are finite and >= 0")
        if isinstance(tree, Difference) and (not self._total or tree.old is self._old):
            self._old, self._moved, tree = tree.old, self._moved + weight, tree.new
        if not self._total:
            self._total = map(
                lambda t: t.to(
                    torch.float64, copy=True, memory_format=torch.contiguous_format
                ).mul_(weight),
                tree,
            )
        else:
            for name, total in self._total.items():
                for part, x in zip(_blocks(total), _blocks(tree[name]), strict=True):
                    part.add_(x, alpha=weight)
        self.weight += weight

    @property
    def tree(self) -> Tree:
        """sum_k w_k t_k; empty where nothing was added."""
        if not self._moved:
            return self._total
        return {
            name: total.sub(self._old[name], alpha=self._moved)
            for name, total in self._total.items()
        }

    def mean(self, *, reuse: bool = False) -> Tree:
        """sum_k w_k t_k / sum_k w_k; `reuse` makes it in the sum's own memory: the sum is used
        up."""
        if not self.weight > 0:
            raise ValueError(f"a weighted mean needs a positive total weight, got {self.weight}")
        means = {
            name: total.div_(self.weight) if reuse else total / self.weight
            for name, total in self._total.items()
        }
        return (
            {
                name: t.sub_(self._old[name], alpha=self._moved / self.weight)
                for name, t in means.items()
            }
            if self._moved
            else means
        )


def _blocks(t: Tensor) -> Sequence[Tensor]:
    """The entries in pieces of at most BLOCK, in the order of a contiguous tensor."""
    return (t,) if t.numel() <= BLOCK else t.flatten().split(BLOCK)


def mean(pairs: Iterable[tuple[AnyTree, float]]) -> Tree:
    """The weighted mean in float64 of (tree, weight) pairs, summed in the order given."""
    total = Sum()
    for tree, weight in pairs:
        total.add(tree, weight)
    return total.mean(reuse=True)


def add(a: AnyTree, b: AnyTree, scale: float = 1.0) -> Tree:
    """a + scale b, in float64."""
    return {
        name: (
            a[name].double().add_(b[name], alpha=scale)
            if a[name].dtype != torch.float64
            else a[name].add(b[name], alpha=scale)
        )
        for name in a
    }


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
    # A sum is one pass, and one answer for all tensors; it can overflow on finite values, so only
    # then is each entry looked at.
    if not floating or torch.isfinite(
        torch.stack([t.sum().double() for t in floating.values()]).sum()
    ):
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
            h.update(
                f"{slot}|{name}|{str(t.dtype).removeprefix('torch.')}|{tuple(t.shape)}|".encode()
            )
            h.update(t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return h.hexdigest()
