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

from fedhet import trees
from fedhet.admission.outcome import ends_run
from fedhet.checkpoint.values import Packer, put_back
from fedhet.errors import RunFailed
from fedhet.merging.mean import Mean
from fedhet.messages import Failure, Update
from fedhet.replies import Step

if TYPE_CHECKING:
    from fedhet.setting import Setting
    from fedhet.strategy import FedStrategy

log = logging.getLogger("fedhet")
ALIKE = 10.0  # times the median of the others: within it, all replies of a step diverge alike
KEPT = ("account", "jumps")  # what a step that is undone has released and measured remains


class Jumps:
    """Measures by how much the replies of a step have changed the weights.

    Args:
        setting: `replies.max_jump` counts here, for the plain mean: other merges bound what a reply
            can change.

    Attributes:
        limit: the largest norm of a change, as a multiple of the median of the phase's last step;
            None for no limit.
        medians: phase -> the median norm of the changes in its last step.
        undone: the last round that was undone; -1 for none.
    """

    memory: ClassVar[tuple[str, ...]] = ("medians", "undone")

    def __init__(self, setting: Setting) -> None:
        self.limit = setting.replies.max_jump if setting.merge.name == Mean.name else None
        self.medians: dict[str, float] = {}
        self.undone = -1
        self._norms: dict[int, float] = {}

    def begin(self, step: Step) -> None:
        """Forget the replies of the step before."""
        self._step = step
        self._norms = {}

    def far(self, update: Update) -> bool:
        """Whether the reply's change is far larger than those of the phase's last step."""
        if self.limit is None or not update.weights:
            return False
        norm = self._norms[update.pid] = _norm(update.weights, self._step.sent)
        usual = self.medians.get(self._step.entry.name, 0.0)
        return bool(usual) and norm > self.limit * usual

    def cause(self, update: Update) -> str:
        """Why a reply that is far from all others is refused; it does not count in the median."""
        norm, usual = self._norms.pop(update.pid), self.medians[self._step.entry.name]
        return (
            f"its weights have changed by {norm:.3g} (norm), more than {self.limit:g}"
            f" (replies.max_jump) times {usual:.3g}, the median of the step before"
        )

    def end(self) -> None:
        """Keep the median of the step."""
        if self._norms:
            self.medians[self._step.entry.name] = median(self._norms.values())

    def odd(self) -> Failure | None:
        """The failure of the reply with the largest change; None where all replies are alike."""
        pid = max(self._norms, key=self._norms.__getitem__, default=-1)
        others = [norm for other, norm in self._norms.items() if other != pid]
        if not others or not self._norms[pid] > ALIKE * median(others):
            return None
        cause = (
            f"the loss is not finite after this step, in which its weights have changed by"
            f" {self._norms[pid]:.3g} (norm) and those of the others by {median(others):.3g}"
        )
        return Failure(pid, self._step.entry.name, self._step.step, cause, "outlier")


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
        self._parts: dict[str, object] = {"method": strategy}
        self._parts |= {f"plugin.{plugin.name}": plugin for plugin in strategy.plugins}
        if setting.server_opt is not None:
            self._parts["server_opt"] = setting.server_opt
        self.possible = strategy.jumps.limit is not None and strategy.current.entry.phase.evaluate
        packer = Packer()
        if self.possible and setting.on_failure == "skip":
            self._before = {name: packer.memory(part, name) for name, part in self._parts.items()}
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
        for name, part in self._parts.items():
            put_back(part, self._before[name], self._tensors, strategy.site.device, name)
        strategy.current.accepted = 0
        strategy.jumps.undone = strategy.current.round
        return True


def _norm(weights: trees.Tree, sent: trees.Tree) -> float:
    """The norm of the change of all floating tensors, buffers included."""
    norms = [
        torch.linalg.vector_norm(t - sent[name], dtype=torch.float64)
        for name, t in weights.items()
        if t.is_floating_point()
    ]
    return float(torch.stack(norms).norm()) if norms else 0.0
