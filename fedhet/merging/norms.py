"""merge=norm_clip and merge=norm_filter: bounds on the norms of updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import TYPE_CHECKING, ClassVar

import torch

from fedhet import check, trees
from fedhet.admission.gate import failure, record
from fedhet.merging.mean import LEAST, Mean, floating_buffers
from fedhet.trees import AnyTree, Tree

if TYPE_CHECKING:
    from fedhet.messages import Update
    from fedhet.replies import Step
    from fedhet.setting import Setting

log = logging.getLogger("fedhet")


class NormFilter(Mean):
    """Refuses updates whose norm exceeds a multiple of the step's median, and averages the others.

    That holds for the change of the weights, for the change of the buffers, and for every floating
    extra, each by itself, in every phase. Where fewer than three norms are not 0, there is nothing
    to compare, and those updates are refused. A refused update is a failure of its client, with the
    reason "outlier".

    Args:
        factor: the multiple, >= 1.
    """

    name = "norm_filter"

    def __init__(self, *, factor: float = 3.0) -> None:
        self.factor = check.number("merge.factor", factor, low=1)
        super().__init__()

    @property
    def least(self) -> int:
        return LEAST

    def admit(self, step: Step, updates: Iterator[Update], setting: Setting) -> Iterator[Update]:
        """The updates within the bounds.

        Raises:
            RunFailed: one is not, and `setting.on_failure` is "stop".
        """
        received = list(updates)
        if len(received) < LEAST and step.entry.phase.compared:
            yield from received  # the step has too few replies, and changes nothing
            return
        norms = [norms_of(update, step.sent) for update in received]
        medians = {
            name: median_of(one[name] for one in norms if name in one)
            for name in {name for one in norms for name in one}
        }
        for update, own in zip(received, norms, strict=True):
            beyond = sorted(n for n, norm in own.items() if norm > self.factor * medians[n])
            if beyond:
                cause = self._cause(beyond[0], own[beyond[0]], medians[beyond[0]])
                if setting.on_failure == "stop":
                    cause += "; on_failure=skip leaves such updates out, and the run goes on"
                record(step, failure(step, update.pid, cause, "outlier"), setting)
            else:
                yield update

    def _cause(self, name: str, norm: float, median: float) -> str:
        """Why an update is refused."""
        said = f"the norm of its {name} is {norm:.4g}"
        if not median:
            return f"{said}, and a step needs {LEAST} that are not 0 to compare them"
        bound = f"merge.factor={self.factor:g} times the median of this step"
        return f"{said}, more than {bound}, {median:.4g}"


class NormClip(Mean):
    """Shortens updates whose norm exceeds a bound to the bound, and averages all of them.

    That holds for the change of the weights, and for the change of the buffers by itself. Where
    fewer than three norms are not 0, there is nothing to compare, and the step leaves the weights,
    or the buffers, as they are.

    Args:
        factor: the bound as a multiple of the step's median norm, > 0.
        norm: the bound on the change of the weights itself, > 0, in place of the multiple; None for
            `factor`. Averaged buffers are bounded by `factor` in any case.
    """

    name = "norm_clip"
    rescales: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __init__(self, *, factor: float = 1.0, norm: float | None = None) -> None:
        self.factor = check.number("merge.factor", factor, open_low=0)
        self.norm = check.optional(check.number, "merge.norm", norm, open_low=0)
        super().__init__()

    @property
    def least(self) -> int:
        return LEAST if self.norm is None else 1

    @property
    def least_with_buffers(self) -> int:
        """Buffers are compared with those of others in any case."""
        return LEAST

    def select(self, step: Step, updates: Iterator[Update]) -> Iterator[Update]:
        received = list(updates)
        if any(not update.weights for update in received):
            return iter(received)  # a phase whose replies carry no weights
        changes = [update.change for update in received]
        clipped = self._clip("weights", step, received, changes, self.norm)
        buffers = [_buffer_change(update, step.sent) for update in received]
        clipped |= self._clip("buffers", step, received, buffers, None)
        self.report = {"clipped": len(clipped), "clipped_pids": torch.tensor(sorted(clipped))}
        return iter(received)

    def _clip(
        self,
        kind: str,
        step: Step,
        updates: list[Update],
        changes: list[AnyTree],
        bound: float | None,
    ) -> set[int]:
        """Shorten the changes beyond the bound; return whose they were."""
        norms = [trees.norm(change) for change in changes]
        bound = self.factor * median_of(norms) if bound is None else bound
        if not bound and any(norms):
            changing = sum(norm > 0 for norm in norms)
            log.warning(
                "round %d: merge=%s leaves the %s as they are: %d of %d updates change them, and it"
                " takes %d to compare them",
                *(step.round, self.name, kind, changing, len(norms), LEAST),
            )
        clipped = set()
        for update, change, norm in zip(updates, changes, norms, strict=True):
            if norm > bound:
                _shorten(update, change, step, bound / norm)
                clipped.add(update.pid)
        return clipped


def median_of(norms: Iterable[float]) -> float:
    """The median of the norms that are not 0; 0 if these are too few to be compared.

    With the others, a step in which most clients change nothing would bound all of them by 0. One
    or two among many zeros are no measure either: an attacker would be its own median.
    """
    compared = [norm for norm in norms if norm]
    return median(compared) if len(compared) >= LEAST else 0.0


def _shorten(update: Update, change: AnyTree, step: Step, factor: float) -> None:
    """Scale these changes of an update, in all of its forms."""
    new = trees.add(trees.pick(step.sent, change), change, factor)
    update.weights = {**update.weights, **trees.cast(new, step.sent)}
    update.change = trees.Difference(trees.pick(update.weights, step.old), step.old)
    update.buffers = {name: update.weights[name] for name in update.buffers}


def _buffer_change(update: Update, sent: Tree) -> AnyTree:
    buffers = floating_buffers(update)
    return trees.Difference(buffers, trees.pick(sent, buffers))


def norms_of(
    update: Update, sent: Tree, norm: Callable[[AnyTree], float] = trees.norm
) -> dict[str, float]:
    """The norms of what the update carries: of both changes, and of every floating extra."""
    norms = {"change": norm(update.change)} if update.change else {}
    if update.weights and floating_buffers(update):
        norms["buffers"] = norm(_buffer_change(update, sent))
    for name, value in update.extras.items():
        tree = {"": value} if isinstance(value, torch.Tensor) else value
        floating = tree if isinstance(tree, dict) else {}
        floating = {key: t for key, t in floating.items() if t.is_floating_point() and t.numel()}
        if floating:
            norms[name] = norm(floating)
    return norms
