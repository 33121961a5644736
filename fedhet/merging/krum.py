"""merge=krum: the mean of the updates that are nearest to others (Blanchard et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedhet import check, trees
from fedhet.maths import robust
from fedhet.merging.mean import Mean, floating_buffers

if TYPE_CHECKING:
    from fedhet.messages import Update
    from fedhet.replies import Step


class Krum(Mean):
    """Selects whole updates by the distances between them, and takes the mean of those.

    The score of an update is the sum of its squared distances to the K - attackers - 2 nearest of
    the others, among K updates. The `keep` updates with the lowest scores take effect, with their
    weights; of equal scores those of the clients with the lowest numbers. keep = 1 is Krum, a
    larger number is Multi-Krum. `keep` is meant for a step in which the whole cohort replies; for
    each missing reply one update less takes effect, so that as many are left out. Distances
    are those of the weights that a reply carries, buffers included; what else it carries is not
    compared.

    Args:
        attackers: the number of attackers that a step may have, >= 0; a step needs 2 attackers + 3
            updates at least.
        keep: how many updates take effect, >= 1; None for all but `attackers`.
    """

    name = "krum"
    compares: ClassVar[bool] = True

    def __init__(self, *, attackers: int = 2, keep: int | None = None) -> None:
        self.attackers = check.integer("merge.attackers", attackers, low=0)
        self.keep = check.optional(check.integer, "merge.keep", keep, low=1)
        super().__init__()

    @property
    def least(self) -> int:
        return 2 * self.attackers + 3

    def select(self, step: Step, updates: Iterator[Update]) -> Iterator[Update]:
        received = list(updates)
        if any(not update.weights for update in received):
            return iter(received)  # a phase whose replies carry no weights
        scores = robust.krum_scores(distances(received), self.attackers).tolist()
        best = sorted(zip(scores, (update.pid for update in received), strict=True))
        left_out_of_all = len(step.cohort) - self.keep if self.keep else self.attackers
        kept = {pid for _, pid in best[: max(1, len(received) - left_out_of_all)]}
        left_out = [update.pid for update in received if update.pid not in kept]
        self.report = {"left_out": torch.tensor(left_out), "kept": len(kept)}
        return iter([update for update in received if update.pid in kept])


def distances(updates: list[Update]) -> Tensor:
    """(K, K) the squared distances between the weights of the updates, buffers included."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    buffers = [floating_buffers(update) for update in updates]
    for name in dict.fromkeys([*updates[0].change, *buffers[0]]):
        # A change is computed when it is read: here of one tensor at a time.
        of = [
            own if name in own else update.change
            for update, own in zip(updates, buffers, strict=True)
        ]
        rows = [tree[name].double().flatten() for tree in of]
        block = max(1, trees.SUM_BLOCK // len(rows))
        for part in zip(*(row.split(block) for row in rows), strict=True):
            total += robust.squared_distances(torch.stack(part)).cpu()
    return total
