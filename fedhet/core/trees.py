"""Algebra on weights, and splitting a model into its shared and its own tensors.

A tree is a dict of tensors by name, in state-dict order, on any device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Tree = dict[str, Tensor]
AnyTree = Mapping[str, Tensor]
Prepared = dict[str, Any]  # a tree of any depth: tensors, and dicts, lists and tuples of them

# The number of entries that a sum processes at a time. torch first copies them to float64; the
# copy of one block fits into the processor's cache.
SUM_BLOCK = 2**19
# The largest number that is accepted from another process. Its square still fits into float32.
LARGEST = 1e15
UNBOUNDED = f"holds NaN or infinite values, or values beyond {LARGEST:g}"


class Difference(Mapping[str, Tensor]):
    """The tree new - old. Each tensor is computed in float64 when it is read.

    The differences of K clients therefore need the memory of K float32 trees, not of K float64
    trees.
    """

    def __init__(self, new: AnyTree, old: AnyTree) -> None:
        self.new = new
        self.old = old

    def __getitem__(self, name: str) -> Tensor:
        # A copy, which can be changed in place.
        return self.new[name].to(torch.float64, copy=True).sub_(self.old[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.new)

    def __len__(self) -> int:
        return len(self.new)


class Sum:
    """A running weighted sum sum_k w_k t_k in float64; its memory is independent of K.

    Differences from the same old tree are summed as sum_k w_k new_k - (sum_k w_k) old, which
    halves the memory traffic. This applies to the old tree of the first summand.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._total: Tree = {}
        self._old: AnyTree = {}
        self._old_weight = 0.0  # the total weight of differences from `_old`

    def add(self, tree: AnyTree, weight: float) -> None:
        """Add w_k t_k.

        Raises:
            ValueError: the weight is negative or not finite.
        """
        if not 0 <= weight < math.inf:
            raise ValueError(f"a tree has the weight {weight}; weights must be finite and >= 0")
        if isinstance(tree, Difference) and (not self._total or tree.old is self._old):
            self._old = tree.old
            self._old_weight += weight
            tree = tree.new
        self.weight += weight
        if not self._total:
            copy: dict[str, Any] = {"copy": True, "memory_format": torch.contiguous_format}
            self._total = {n: tree[n].to(torch.float64, **copy).mul_(weight) for n in tree}
            return
        for name, total in self._total.items():
            if total.numel() <= SUM_BLOCK:
                total.add_(tree[name], alpha=weight)
                continue
            # In blocks, in the order of a contiguous tensor.
            parts = (t.flatten().split(SUM_BLOCK) for t in (total, tree[name]))
            for part, x in zip(*parts, strict=True):
                part.add_(x, alpha=weight)

    @property
    def tree(self) -> Tree:
        """The sum sum_k w_k t_k; empty if nothing was added."""
        if not self._old_weight:
            return self._total
        return {
            name: total.sub(self._old[name], alpha=self._old_weight)
            for name, total in self._total.items()
        }

    def mean(self, *, reuse: bool = False) -> Tree:
        """Return sum_k w_k t_k / sum_k w_k.

        Args:
            reuse: compute the mean in the memory of the sum. Do not use the sum afterwards.

        Raises:
            ValueError: the sum of the weights is not positive.
        """
        if not self.weight > 0:
            raise ValueError(f"a weighted mean needs a positive total weight, got {self.weight}")
        means = {
            name: total.div_(self.weight) if reuse else total / self.weight
            for name, total in self._total.items()
        }
        if self._old_weight:
            for name, mean in means.items():
                mean.sub_(self._old[name], alpha=self._old_weight / self.weight)
        return means


def mean(pairs: Iterable[tuple[AnyTree, float]], average: Any = None) -> Tree:
    """Return the weighted mean of (tree, weight) pairs in float64, summed in the order given.

    Args:
        pairs: the trees and their weights.
        average: another kind of average, an object with the functions `add` and `mean` of `Sum`.
    """
    total = Sum() if average is None else average
    for tree, weight in pairs:
        total.add(tree, weight)
    return total.mean(reuse=True)  # type: ignore[no-any-return]


def add(a: AnyTree, b: AnyTree, scale: float = 1.0) -> Tree:
    """Return a + scale b in float64."""
    return {name: a[name].to(torch.float64, copy=True).add_(b[name], alpha=scale) for name in a}


def map(f: Callable[[Tensor], Tensor], tree: AnyTree) -> Tree:
    """Return the tree of f(t) for every tensor t."""
    return {name: f(tree[name]) for name in tree}


def zeros(tree: AnyTree) -> Tree:
    """Return zeros of the tree's shapes in float64."""
    return map(lambda t: torch.zeros_like(t, dtype=torch.float64), tree)


def cast(tree: AnyTree, like: AnyTree) -> Tree:
    """Return the tree's values in the dtypes of `like`."""
    return {name: tree[name].to(like[name].dtype) for name in tree}


def columns(names: Iterable[str], *of: AnyTree) -> list[list[Tensor]]:
    """Return a list of the tensors of these names for each tree, for torch's _foreach functions."""
    in_order = list(names)
    return [[tree[name] for name in in_order] for tree in of]


def pick(tree: AnyTree, names: Iterable[str]) -> Tree:
    """Return the tensors of these names."""
    return {name: tree[name] for name in names}


def first_nonfinite(tree: AnyTree) -> str | None:
    """Return the first name whose tensor holds a NaN or an infinity, or None."""
    floating = {name: tree[name] for name in tree if tree[name].is_floating_point()}
    if not floating:
        return None
    # Summing all entries takes one pass and gives one answer for all tensors. If the sum is not
    # finite, the tensors are checked one by one, because a sum of finite entries can overflow.
    total = torch.stack([t.sum().double() for t in floating.values()]).sum()
    if torch.isfinite(total):
        return None
    return next((name for name, t in floating.items() if not torch.isfinite(t).all()), None)


def first_negative(tree: AnyTree) -> str | None:
    """Return the first name whose tensor contains a negative value, or None."""
    return next((name for name in tree if bool((tree[name] < 0).any())), None)


def first_unbounded(tree: AnyTree) -> str | None:
    """Return the first name whose tensor holds a NaN or a number beyond LARGEST, or None."""
    numbers = {n: tree[n] for n in tree if tree[n].dtype != torch.bool and tree[n].numel()}
    if not numbers:
        return None
    extremes = [torch.stack(torch.aminmax(t.detach())).double() for t in numbers.values()]
    bounded = (torch.stack(extremes).abs() <= LARGEST).all(dim=1)  # a NaN is not
    return None if bounded.all() else list(numbers)[bounded.tolist().index(False)]


def norm(tree: AnyTree) -> float:
    """Return the Euclidean norm over all entries, in float64."""
    return math.sqrt(sum(float(tree[name].double().square().sum()) for name in tree))


def nbytes(tree: AnyTree) -> int:
    """Return the size of all tensors in bytes."""
    return sum(tree[name].numel() * tree[name].element_size() for name in tree)


def sha256(slots: Mapping[str, AnyTree]) -> str:
    """Return the hash over (slot, name, dtype, shape, bytes) of every slot, in name order."""
    digest = hashlib.sha256()
    for slot in sorted(slots):
        for name in sorted(slots[slot]):
            t = slots[slot][name].detach().cpu().contiguous()
            dtype = str(t.dtype).removeprefix("torch.")
            digest.update(f"{slot}|{name}|{dtype}|{tuple(t.shape)}|".encode())
            digest.update(t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else b"")
    return digest.hexdigest()


def as_tree(value: Any) -> Any:
    """Return the value if it is a tree; if it is not, a tree that has it under ""."""
    return value if isinstance(value, Mapping) else {"": value}


def kind(value: object) -> str:
    """Describe the value for an error message: "a torch.float32 tensor of shape (3,)", "a list"."""
    if isinstance(value, Tensor):
        return f"a {value.dtype!s} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def check_form(what: str, tree: Mapping[str, Any], like: AnyTree) -> None:
    """Refuse a tree that differs from `like` in names, shapes or dtypes.

    Raises:
        ValueError: the tree differs; the message begins with `what` and names the tensor.
    """
    if set(tree) != set(like):
        missing = [name for name in like if name not in tree]
        unexpected = [name for name in tree if name not in like]
        raise ValueError(
            f"{what}: names differ: missing {missing[:3]}, unexpected {unexpected[:3]}"
        )
    for name in like:
        if (given := kind(tree[name])) != (expected := kind(like[name])):
            raise ValueError(f"{what}, tensor {name!r}: {given}; expected {expected}")


def check_like(what: str, tree: AnyTree, like: AnyTree) -> None:
    """Refuse a tree that differs from `like` in names, shapes or dtypes, or has too large values.

    Raises:
        ValueError: one of them; the message begins with `what` and names the tensor.
    """
    check_form(what, tree, like)
    if bad := first_unbounded(tree):
        raise ValueError(f"{what}, tensor {bad!r}: {UNBOUNDED}")


def shown(value: object) -> str:
    """Return the value as a short text for an error message; of tensors, only type and shape."""
    tensors = isinstance(value, Tensor) or (
        isinstance(value, dict) and any(isinstance(t, Tensor) for t in value.values())
    )
    text = kind(value) if tensors else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


# ---- models in two parts: the tensors that all clients share, and the tensors of one client
def own_tensors(module: nn.Module, model: nn.Module, common: AnyTree) -> Tree:
    """Return copies of the tensors of `module` that `common` lacks, or has with other values.

    Args:
        module: the model, or a module around it.
        model: the model; `common` uses its names.
        common: the shared values.
    """
    shared = _prefixed(module, model, common)
    return {
        name: t.detach().clone()
        for name, t in module.state_dict().items()
        if name not in shared or not torch.equal(t, shared[name])
    }


def whole_module(module: nn.Module, model: nn.Module, common: AnyTree, own: AnyTree) -> Tree:
    """Return the whole state of the module; the inverse of `own_tensors`.

    Raises:
        ValueError: the two parts do not make up a state of this module.
    """
    whole: Tree = {**_prefixed(module, model, common), **own}
    check_form(f"{type(module).__name__} (personal_module)", whole, module.state_dict())
    return whole


def _prefixed(module: nn.Module, model: nn.Module, common: AnyTree) -> Tree:
    """Return the shared values under their names in the module."""
    path = next((path for path, part in module.named_modules() if part is model), "")
    prefix = f"{path}." if path else ""
    return {f"{prefix}{name}": common[name] for name in common}
