"""The `merge` group: ways to combine the updates of a step.

The mean is the default. The other merges limit how much attackers among the clients can change it:

- median and trimmed mean of each entry (Yin, Chen, Ramchandran and Bartlett 2018, "Byzantine-robust
  distributed learning: towards optimal statistical rates", definitions 1 and 2)
- Krum (Blanchard, El Mhamdi, Guerraoui and Stainer 2017, "Machine learning with adversaries:
  Byzantine tolerant gradient descent", section 4)
- bounds on the norms of updates
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fedhet.core import trees
from fedhet.core.check import Checked, setting
from fedhet.core.errors import RunFailed, log
from fedhet.core.messages import Upload
from fedhet.core.server.phases import OpenStep
from fedhet.core.trees import AnyTree, Tree

AnyUpdate = TypeVar("AnyUpdate")  # an Upload of messages.py, or an Update of kernel.py
LEAST = 3  # the median of two values is their mean, so that one attacker could move it freely


class Collected:
    """An average that keeps all trees, and combines them at the end, a block at a time."""

    def __init__(self, combine: Callable[[Tensor], Tensor]) -> None:
        self._combine = combine
        self._trees: list[AnyTree] = []

    def add(self, tree: AnyTree, weight: float) -> None:
        self._trees.append(tree)

    def mean(self, *, reuse: bool = False) -> Tree:
        if not self._trees:
            raise ValueError("cannot average: no tree was added")
        block = max(1, trees.SUM_BLOCK // len(self._trees))
        means: Tree = {}
        for name, like in self._trees[0].items():
            rows = [tree[name].double().flatten().split(block) for tree in self._trees]
            parts = [self._combine(torch.stack(part)) for part in zip(*rows, strict=True)]
            means[name] = torch.cat(parts).view(like.shape)
        return means


Average = trees.Sum | Collected  # takes trees one by one, and then returns their average


@dataclass(frozen=True, kw_only=True, eq=False)
class Mean(Checked):
    """The weighted mean of the updates. Every hook leaves the updates unchanged.

    A step calls the hooks in this order: `admit` before it compares the number of updates with
    `replies.least`, `select` before any update takes effect, and `average` in the merge.

    Attributes:
        name: its name in the configuration.
        needs_words: the properties of the training (`fedhet.core.kernel.WORDS`) that it needs.
        breaks: the properties that it makes untrue, each with the reason.
    """

    name: ClassVar[str] = "mean"
    needs_words: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[dict[str, str]] = {}
    GROUP = "merge"

    def needs(self, sent: AnyTree, trained: Container[str]) -> int:
        """Return the smallest number of updates that a step needs for this merge.

        Updates that the merge itself refuses count, too.

        Args:
            sent: the weights that the clients receive in the step.
            trained: the names of the weights that are not buffers.
        """
        return 1

    def admit(self, step: OpenStep, updates: Iterator[Upload]) -> Iterator[Upload]:
        """Yield the updates that are accepted, and record each of the others as a failure."""
        return updates

    def select(self, step: OpenStep, updates: Iterator[Upload]) -> Iterator[Upload]:
        """Return the updates that take effect. The others do not count as failures."""
        return updates

    def average(self) -> Average:
        """Return a new average, to which trees are added one by one."""
        return trees.Sum()

    def mean(self, pairs: Iterable[tuple[AnyTree, float]]) -> Tree:
        """Return the average of (tree, weight) pairs."""
        return trees.mean(pairs, self.average())


def floating_of(buffers: AnyTree) -> Tree:
    """Return the buffers that are averaged: the floating-point ones."""
    return {name: t for name, t in buffers.items() if t.is_floating_point()}


# ---- all updates of a step around its merge
class Once(Iterator[AnyUpdate]):
    """The updates for a merge. A second reading raises an error instead of yielding nothing."""

    def __init__(self, updates: Iterator[AnyUpdate]) -> None:
        self._updates, self._ended = updates, False

    def __next__(self) -> AnyUpdate:
        for update in self._updates:
            return update
        if self._ended:
            raise TypeError("the updates of a step can be read once; list(updates) keeps them")
        self._ended = True
        raise StopIteration


def normalised(updates: list[Upload]) -> list[Upload]:
    """Scale the aggregation weights of the updates to the sum 1, and return the updates.

    Raises:
        RunFailed: an aggregation weight is negative, or their sum is not positive and finite.
    """
    weights = [update.weight for update in updates]
    total = sum(weights)
    if not 0 < total < float("inf") or any(weight < 0 for weight in weights):
        raise RunFailed(
            f"the aggregation weights {weights} must be >= 0 with a positive, finite sum"
        )
    for update in updates:
        update.weight /= total
    return updates


def averaging_buffers(
    updates: Iterable[AnyUpdate],
    average: Average,
    buffers: Tree,
    of: Callable[[Any], AnyTree] = lambda update: update.buffers,
) -> Iterator[AnyUpdate]:
    """Yield the updates for a merge, and combine their buffers meanwhile.

    A merge does not combine buffers, because `change` has none. Floating-point buffers are averaged
    by the run's `merge`, with the updates' final aggregation weights. Integer buffers (batch
    counters) become the maximum.

    Args:
        updates: the updates.
        average: an average of the run's `merge`.
        buffers: gets the combined buffers after every update has been read.
        of: returns the buffers of an update.
    """
    averaged = False
    for update in updates:
        own = of(update)
        if floating := floating_of(own):
            average.add(floating, update.weight)  # type: ignore[attr-defined]
            averaged = True
        for name in own.keys() - floating.keys():
            t = own[name]
            buffers[name] = torch.maximum(buffers.get(name, t), t)
        yield update
    if averaged:
        buffers |= average.mean()


# ---- averages of each entry by itself
def coordinate_median(values: Tensor) -> Tensor:
    """Return the median (...) of each entry over the K clients, given their values (K, ...).

    For an even K, it is the mean of the two middle values. The order of the clients does not
    matter, bit for bit.
    """
    ordered = values.sort(dim=0).values
    k = len(values)
    return (ordered[(k - 1) // 2] + ordered[k // 2]) / 2


def trimmed_mean(values: Tensor, share: float) -> Tensor:
    """Return the mean (...) of each entry without its largest and its smallest values.

    The order of the clients does not matter, bit for bit.

    Args:
        values: the values (K, ...) of K clients.
        share: the share of the clients that is left out at each end, in [0, .5). The number of
            clients is rounded down.
    """
    k = len(values)
    # `round` is needed because in floating point, .29 * 100 is slightly below 29.
    cut = int(round(share * k, 9))
    return values.sort(dim=0).values[cut : k - cut].mean(dim=0)


class Coordinates(Mean):
    """Replaces the mean by another average of each entry's values."""

    needs_words = frozenset({"means"})
    breaks = {"used weights": "it ignores the aggregation weights of the updates"}

    def combine(self, values: Tensor) -> Tensor:
        """Return the average (n,) of the values (K, n) of K clients."""
        raise NotImplementedError

    def average(self) -> Average:
        return Collected(self.combine)


class Median(Coordinates):
    """The coordinate-wise median."""

    name = "median"
    combine = staticmethod(coordinate_median)

    def needs(self, sent: AnyTree, trained: Container[str]) -> int:
        return LEAST


@dataclass(frozen=True, kw_only=True, eq=False)
class TrimmedMean(Coordinates):
    """The coordinate-wise mean without the extreme values.

    Args:
        share: the share of the values that is left out at each end, in [0, .5).
    """

    name = "trimmed_mean"

    share: float = setting(0.2, low=0, open_high=0.5)

    def needs(self, sent: AnyTree, trained: Container[str]) -> int:
        """Return 1 / share, rounded up: with fewer updates, no value would be left out."""
        return math.ceil(round(1 / self.share, 9)) if self.share else 1

    def combine(self, values: Tensor) -> Tensor:
        return trimmed_mean(values, self.share)


# ---- selection of whole updates by their distances
def squared_distances(values: Tensor) -> Tensor:
    """Return the squared Euclidean distances (K, K) between the rows of the values (K, n)."""
    # Scalar products would lose the digits in which close rows differ.
    return torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist").square()


def krum_scores(distances: Tensor, attackers: int) -> Tensor:
    """Return the score of each update, (K,): the sum of its K - attackers - 2 smallest distances.

    `distances` has the squared distances (K, K). The distance of an update to itself does not
    count. Small scores are good.

    Raises:
        ValueError: K is less than 2 attackers + 3, which the paper's proposition 1 requires.
    """
    k = len(distances)
    if k < 2 * attackers + 3:
        raise ValueError(
            f"Krum with {attackers} attackers needs at least {2 * attackers + 3} updates, got {k}"
        )
    others = distances[~torch.eye(k, dtype=torch.bool, device=distances.device)].view(k, k - 1)
    return others.sort(dim=1).values[:, : k - attackers - 2].sum(dim=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Krum(Mean):
    """Selects updates by the distances between them, and takes the weighted mean of the selected.

    The score of one of K updates is the sum of its squared distances to the K - attackers - 2
    nearest other updates. The `keep` updates with the lowest scores take effect. If scores are
    equal, clients with lower numbers come first. keep = 1 is Krum, a larger number is Multi-Krum.

    `keep` counts for a step in which the whole cohort replies. For each missing reply, one update
    less takes effect, so the number of left-out updates stays the same. Distances compare the
    weights in the replies, buffers included, and no extras.

    Args:
        attackers: the number of attackers that a step may have, >= 0. A step needs at least
            2 attackers + 3 updates.
        keep: the number of updates that take effect, >= 1; None for all except `attackers`.
    """

    name = "krum"
    needs_words = frozenset({"weights"})

    attackers: int = setting(2, low=0)
    keep: int | None = setting(None, low=1)

    def needs(self, sent: AnyTree, trained: Container[str]) -> int:
        return 2 * self.attackers + 3

    def select(self, step: OpenStep, updates: Iterator[Upload]) -> Iterator[Upload]:
        received = list(updates)
        if any(not update.weights for update in received):
            return iter(received)  # the replies of this phase carry no weights to compare
        scores = krum_scores(distances(received), self.attackers).tolist()
        best = sorted(zip(scores, (update.pid for update in received), strict=True))
        left_out_of_all = len(step.cohort) - self.keep if self.keep else self.attackers
        kept = {pid for _, pid in best[: max(1, len(received) - left_out_of_all)]}
        left_out = [update.pid for update in received if update.pid not in kept]
        step.note(self.name, {"left_out": torch.tensor(left_out), "kept": len(kept)})
        return iter([update for update in received if update.pid in kept])


def distances(updates: list[Upload]) -> Tensor:
    """Return the squared distances (K, K) between the updates' weights, buffers included."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    buffers = [floating_of(update.buffers) for update in updates]
    for name in dict.fromkeys([*updates[0].change, *buffers[0]]):
        # A change is computed when it is read. So only one tensor at a time is in memory.
        of = [
            own if name in own else update.change
            for update, own in zip(updates, buffers, strict=True)
        ]
        rows = [tree[name].double().flatten() for tree in of]
        block = max(1, trees.SUM_BLOCK // len(rows))
        for part in zip(*(row.split(block) for row in rows), strict=True):
            total += squared_distances(torch.stack(part)).cpu()
    return total


# ---- bounds on the norms of updates
@dataclass(frozen=True, kw_only=True, eq=False)
class NormFilter(Mean):
    """Refuses updates with a norm above a multiple of the step's median, and averages the others.

    It compares the change of the weights, the change of the buffers, and each floating-point extra
    separately, in every phase. If fewer than three norms are not 0, it has nothing to compare them
    with, and refuses these updates. A refused update is a failure of its client, with the reason
    "outlier".

    Args:
        factor: the multiple, >= 1.
    """

    name = "norm_filter"

    factor: float = setting(3.0, low=1)

    def needs(self, sent: AnyTree, trained: Container[str]) -> int:
        return LEAST

    def admit(self, step: OpenStep, updates: Iterator[Upload]) -> Iterator[Upload]:
        """Yield the updates within the bounds, and record all others as failures.

        Raises:
            RunFailed: an update exceeds a bound, and `on_failure` is "stop".
        """
        received = list(updates)
        if len(received) < LEAST and step.entry.phase.compared:
            yield from received  # the step has too few replies, and changes nothing
            return
        norms = [norms_of(update, step.sent) for update in received]
        medians = {
            name: median_of(own[name] for own in norms if name in own)
            for name in {name for own in norms for name in own}
        }
        for update, own in zip(received, norms, strict=True):
            beyond = sorted(n for n, norm in own.items() if norm > self.factor * medians[n])
            if not beyond:
                yield update
                continue
            kind, usual = beyond[0], medians[beyond[0]]
            why = f"but merge={self.name} can compare it only if {LEAST} norms are above 0"
            if usual:
                why = f"more than merge.factor={self.factor:g} times the median of this step"
                why = f"{why}, {usual:.4g}"
            cause = f"the norm of its {kind} is {own[kind]:.4g}, {why}"
            step.record(step.failure(update.pid, cause, "outlier"))


@dataclass(frozen=True, kw_only=True, eq=False)
class NormClip(Mean):
    """Scales updates with a norm above a bound down to the bound, and averages all updates.

    It bounds the change of the weights and the change of the buffers separately. If fewer than
    three norms are not 0, there is nothing to compare, and the step leaves the weights, or the
    buffers, unchanged.

    Args:
        factor: the bound as a multiple of the step's median norm, > 0.
        norm: an absolute bound on the change of the weights, > 0, instead of `factor`; None uses
            `factor`. For averaged buffers, the bound is always `factor`.
    """

    name = "norm_clip"
    needs_words = frozenset({"weights", "weights alone"})

    factor: float = setting(1.0, open_low=0)
    norm: float | None = setting(None, open_low=0)

    def needs(self, sent: AnyTree, trained: Container[str]) -> int:
        """Return 3 if the norms of changes are compared, and else 1.

        Norms of averaged buffers are always compared. Norms of the other weights are compared
        unless `norm` is set.
        """
        buffers = any(sent[name].is_floating_point() for name in sent if name not in trained)
        return LEAST if self.norm is None or buffers else 1

    def select(self, step: OpenStep, updates: Iterator[Upload]) -> Iterator[Upload]:
        received = list(updates)
        if any(not update.weights for update in received):
            return iter(received)  # the replies of this phase carry no weights
        changes = [update.change for update in received]
        clipped = self._clip("weights", step, received, changes, self.norm)
        buffers = [_buffer_change(update, step.sent) for update in received]
        clipped |= self._clip("buffers", step, received, buffers, None)
        pids = torch.tensor(sorted(clipped))
        step.note(self.name, {"clipped": len(clipped), "clipped_pids": pids})
        return iter(received)

    def _clip(
        self,
        kind: str,
        step: OpenStep,
        updates: list[Upload],
        changes: list[AnyTree],
        bound: float | None,
    ) -> set[int]:
        """Scale down the changes above the bound, and return the clients that sent them."""
        norms = [trees.norm(change) for change in changes]
        bound = self.factor * median_of(norms) if bound is None else bound
        if not bound and any(norms):
            changing = sum(norm > 0 for norm in norms)
            log.warning(
                "round %d: merge=%s leaves the %s unchanged: %d of %d updates change them, but at"
                " least %d are needed to compare their norms",
                *(step.round, self.name, kind, changing, len(norms), LEAST),
            )
        clipped = set()
        for update, change, norm in zip(updates, changes, norms, strict=True):
            if norm > bound:
                _shorten(update, change, step, bound / norm)
                clipped.add(update.pid)
        return clipped


def median_of(norms: Iterable[float]) -> float:
    """Return the median of the norms that are not 0, or 0 if these are fewer than three.

    If norms of 0 counted, a step in which most clients change nothing would bound all clients by 0.
    If one or two norms were enough, an attacker could be its own median.
    """
    compared = [norm for norm in norms if norm]
    return median(compared) if len(compared) >= LEAST else 0.0


def _shorten(update: Upload, change: AnyTree, step: OpenStep, factor: float) -> None:
    """Scale a part of an update's change, and adapt all fields of the update."""
    new = trees.add(trees.pick(step.sent, change), change, factor)
    update.weights = {**update.weights, **trees.cast(new, step.sent)}
    update.change = trees.Difference(trees.pick(update.weights, step.old), step.old)
    update.buffers = {name: update.weights[name] for name in update.buffers}


def _buffer_change(update: Upload, sent: Tree) -> AnyTree:
    buffers = floating_of(update.buffers)
    return trees.Difference(buffers, trees.pick(sent, buffers))


def norms_of(
    update: Upload, sent: Tree, norm: Callable[[AnyTree], float] = trees.norm
) -> dict[str, float]:
    """Return the norms of an update: of both changes, and of every floating-point extra."""
    norms = {"change": norm(update.change)} if update.change else {}
    if update.weights and floating_of(update.buffers):
        norms["buffers"] = norm(_buffer_change(update, sent))
    for name, value in update.extras.items():
        tensors = {n: t for n, t in trees.as_tree(value).items() if isinstance(t, Tensor)}
        if found := {n: t for n, t in tensors.items() if t.is_floating_point() and t.numel()}:
            norms[name] = norm(found)
    return norms
