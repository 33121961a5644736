"""What a single reply may change under a mean, which one reply far from all others takes over.

A reply is refused before it is merged if its weights have changed by far more than those of the
phase's last step, unless most replies have: then the method itself diverges. In the first step of
a phase nothing is known yet; where the model's loss is not finite after a step, and one reply had
changed by far more than the others, the step is undone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, ClassVar

import torch

from fedhet.admission.gate import failure
from fedhet.admission.outcome import ends_run
from fedhet.checkpoint.values import Packer, put_back
from fedhet.errors import RunFailed
from fedhet.merging.mean import Mean
from fedhet.merging.norms import median_of, norms_of
from fedhet.messages import Failure, Update
from fedhet.replies import Step
from fedhet.trees import AnyTree, Difference

if TYPE_CHECKING:
    from fedhet.setting import Setting
    from fedhet.strategy import FedStrategy

log = logging.getLogger("fedhet")
ALIKE = 10.0  # times the median of the others: within it, all replies of a step diverge alike
KEPT = ("account", "jumps")  # what a step that is undone has released and measured remains


class Jumps:
    """Measures by how much the replies of a step change what they are about.

    Args:
        setting: `replies.max_jump` counts here, for the plain mean: other merges bound what a reply
            can change.

    Attributes:
        limit: the largest norm of a change, or of an extra, as a multiple of the median of the
            phase's last step; None for no limit.
        medians: phase -> kind -> the median norm of that kind in the phase's last step; 0 where
            fewer than three replies had one.
        undone: the last round that was undone; -1 for none.
    """

    memory: ClassVar[tuple[str, ...]] = ("medians", "undone")

    def __init__(self, setting: Setting) -> None:
        self.limit = setting.replies.max_jump if setting.merge.name == Mean.name else None
        self.medians: dict[str, dict[str, float]] = {}
        self.undone = -1
        self._norms: dict[int, dict[str, float]] = {}

    def begin(self, step: Step) -> None:
        """Forget the replies of the step before."""
        self._step = step
        self._norms = {}

    def far(self, update: Update) -> bool:
        """Whether the reply changes something by far more than those of the phase's last step."""
        if self.limit is None:
            return False
        self._norms[update.pid] = norms_of(update, self._step.sent, _norm)
        return bool(self._beyond(update.pid))

    def _beyond(self, pid: int) -> list[str]:
        """The kinds that are beyond the limit."""
        norms = self._norms[pid]
        limits = {kind: (self.limit or 0.0) * usual for kind, usual in self._usual.items()}
        return [kind for kind in norms if limits.get(kind) and norms[kind] > limits[kind]]

    @property
    def _usual(self) -> dict[str, float]:
        return self.medians.setdefault(self._step.entry.name, {})

    def cause(self, pid: int) -> str:
        """Why a reply is refused; it does not count in the medians any more."""
        kind, *_ = self._beyond(pid)
        return (
            f"the norm of its {kind} is {self._norms.pop(pid)[kind]:.3g}, more than"
            f" replies.max_jump={self.limit:g} times the median of the last step,"
            f" {self._usual[kind]:.3g}"
        )

    def end(self) -> None:
        """Keep the medians of the step."""
        for kind in {kind for norms in self._norms.values() for kind in norms}:
            held = (norms[kind] for norms in self._norms.values() if kind in norms)
            self._usual[kind] = median_of(held)

    def odd(self) -> Failure | None:
        """The failure of the reply with the largest change; None where all replies are alike."""
        changes = {pid: max(norms.values(), default=0.0) for pid, norms in self._norms.items()}
        pid = max(changes, key=changes.__getitem__, default=-1)
        others = [norm for other, norm in changes.items() if other != pid]
        if not others or not changes[pid] > ALIKE * median(others):
            return None
        cause = (
            f"the loss is not finite after this step, in which its norm is {changes[pid]:.3g}, and"
            f" the median of the others {median(others):.3g}"
        )
        return failure(self._step, pid, cause, "outlier")


class Undo:
    """Takes a step back after which the model's loss is not finite.

    That happens once in a row, and only where one reply had changed by far more than the others: a
    method that diverges by itself is a result.

    Args:
        strategy: the run's strategy, before the step is settled.
    """

    def __init__(self, strategy: FedStrategy) -> None:
        setting = strategy.setting
        self._strategy = strategy
        self.possible = strategy.jumps.limit is not None and strategy.current.entry.phase.evaluate
        packer = Packer()
        if self.possible and setting.on_failure == "skip":
            parts = strategy.parts.items()
            self._before = {name: packer.memory(part, name) for name, part in parts}
            for name in KEPT:
                del self._before["method"][name]
        self._tensors = {name: t.clone() for name, t in packer.tensors.items()}

    def __call__(self, report: Callable[[Failure], None]) -> bool:
        """Put back what was before the step, if one reply has spoilt it.

        Args:
            report: is given the failure of that reply's client.

        Raises:
            RunFailed: there is one, and `on_failure` is "stop".
        """
        strategy = self._strategy
        again = strategy.jumps.undone == strategy.current.round - 1
        failed = strategy.jumps.odd() if self.possible and not again else None
        if failed is None:
            return False
        report(failed)
        if ends_run(failed, strategy.setting):
            raise RunFailed(str(failed))
        log.warning("round %d is undone: %s", strategy.current.round, failed)
        for name, part in strategy.parts.items():
            put_back(part, self._before[name], self._tensors, strategy.site.device, name)
        strategy.current.accepted = 0
        strategy.jumps.undone = strategy.current.round
        return True


def _norm(tree: AnyTree) -> float:
    """As `trees.norm`, in fewer passes: only its order of magnitude matters here."""
    if isinstance(tree, Difference):
        tree = {name: tree.new[name] - tree.old[name] for name in tree}
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tree.values()]
    return float(torch.stack(norms).norm())
