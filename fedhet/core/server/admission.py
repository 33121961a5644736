"""Checks of replies before the merge, and what happens if a client failed.

The server leaves out a reply as a whole if it fails a check. Under `merge=mean`, one huge reply
could take over the model. There, the server also compares the norms of replies (`Outliers`):

1. It refuses a reply if a norm exceeds `replies.max_jump` times the median of the phase's previous
   step.
2. If most replies exceed this bound, it accepts all of them, because then the method itself
   diverges.
3. If the phase has no previous step to compare with, it compares the replies of the step with each
   other, and repeats the step without the outliers.
4. It undoes a step if the loss is not finite after it, and the norm of one reply is far larger than
   the others' (`Backup`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from statistics import median
from typing import TYPE_CHECKING

import torch

from fedhet.core import messages, trees
from fedhet.core.errors import RunFailed, log
from fedhet.core.kernel import State
from fedhet.core.messages import Failure, Reply, Upload
from fedhet.core.owners import check_extras, prefixed
from fedhet.core.server.merging import Mean, median_of, norms_of
from fedhet.core.server.phases import OpenStep, locate
from fedhet.core.trees import AnyTree, Difference

if TYPE_CHECKING:
    from fedhet.core.server.run_setup import RunSetup
    from fedhet.core.server.strategy import FedStrategy

REFUSED = "refused"  # the kind under which all bytes of a refused reply are counted


def checked(strategy: FedStrategy, step: OpenStep, replies: Iterable[Reply]) -> Iterator[Upload]:
    """Yield the updates that pass every check, and fill in their fields for the aggregation.

    Every other reply is recorded as a failure of its client. If `on_failure` is "skip", the server
    continues as if this client had not taken part.

    Raises:
        RunFailed: a client failed and `on_failure` is "stop".
    """
    phase = step.entry.phase
    for reply in replies:
        if isinstance(reply, Upload):
            sizes = messages.payload(phase.slot, reply.weights, reply.extras)
            try:
                _complete(step, reply, strategy.sizes[reply.pid], strategy.workspace.variances)
                unexpected = set(reply.extras)
                for component in step.components:
                    expected = step.expected[component.GROUP]
                    check_extras(component.name, expected, reply, step.shapes)
                    unexpected -= prefixed(component.name, expected).keys()
                if unexpected:  # these extras would only use the server's memory
                    raise ValueError(
                        f"unexpected extras {trees.shown(sorted(unexpected))}; a reply may have"
                        " only the extras that the method and the plug-ins declare in `expects`"
                    )
                reply.weight = strategy.weight(step, reply)
            except ValueError as error:
                reply = step.failure(reply.pid, str(error), "refused")
                # The client has chosen the names of its extras, so the record leaves them out.
                sizes = {REFUSED: sum(sizes.values())}
            step.count("up", sizes)
        if isinstance(reply, Failure):
            step.record(reply)
        else:
            yield reply


def _complete(step: OpenStep, update: Upload, declared: int, variances: Sequence[str]) -> None:
    """Check the parts that every update has, and compute its `change` and `buffers`."""
    n, metrics = update.num_examples, update.metrics
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= declared:
        raise ValueError(
            f"num_examples is {trees.shown(n)}; expected: a whole number from 1 to {declared}, the"
            " number of the client's training samples"
        )
    numbers = isinstance(metrics, dict) and all(
        isinstance(value, int | float) for value in metrics.values()
    )
    if not numbers:
        raise ValueError(f"metrics are {trees.shown(metrics)}; expected: a dict of numbers by name")
    for name, value in metrics.items():
        if name.startswith(("seconds.", "bytes.")) and not 0 <= value <= trees.LARGEST:
            raise ValueError(f"metric {name!r} is {trees.shown(value)}; a number >= 0 is expected")
    update.extras = {
        name: messages.on_device(value, step.device) for name, value in update.extras.items()
    }
    if not update.weights and not (step.sent and step.entry.phase.uploads):
        return
    update.weights = {name: t.to(step.device) for name, t in update.weights.items()}
    trees.check_like("weights", update.weights, step.sent)
    held = trees.pick(update.weights, [name for name in variances if name in update.weights])
    if bad := trees.first_negative(held):
        raise ValueError(f"weights {bad!r} hold negative values; variances are >= 0")
    update.change = trees.Difference(trees.pick(update.weights, step.old), step.old)
    update.buffers = {name: t for name, t in update.weights.items() if name not in step.old}


# ---- how many replies a step needs
def quorum(
    setup: RunSetup, step: OpenStep, states: dict[str, State], admitted: Iterator[Upload]
) -> Iterator[Upload] | None:
    """Return the updates of the step, or None if there are too few: then the step changes nothing.

    Args:
        setup: gives `replies.least`, `replies.bad_steps` and `merge`.
        step: the step.
        states: its "quorum" gets the number of consecutive steps with too few updates.
        admitted: the updates that have passed all checks.

    Raises:
        RunFailed: too many consecutive steps had too few updates; or the phase does not train the
            model, and so cannot continue without these updates.
    """
    phase, limits, merge = step.entry.phase, setup.replies, setup.merge
    needed_to_compare = merge.needs(step.sent, step.old) if phase.compared else 1
    least = max(limits.least, needed_to_compare)
    needed = list(islice(admitted, least))
    # The merge has compared the replies that it refused as outliers. So these count towards
    # `needed_to_compare`, too.
    outliers = sum(failure.reason == "outlier" for failure in step.failures)
    if len(needed) >= limits.least and len(needed) + outliers >= needed_to_compare:
        states["quorum"] = {"in_row": 0}
        return chain(needed, admitted)
    in_row = states.get("quorum", {}).get("in_row", 0) + 1
    states["quorum"] = {"in_row": in_row}
    causes = "; ".join(map(str, step.failures)) or f"{len(step.cohort)} clients take part"
    reason = "replies.least" if limits.least >= needed_to_compare else f"merge={merge.name}"
    if in_row > limits.bad_steps or not phase.trains:
        few = f"{len(needed)} of at least {least} replies accepted ({reason}): "
        raise RunFailed(f"{few if least > 1 else ''}{causes}")
    log.warning(
        "round %d changes nothing: %d replies accepted, %d needed (%s): %s",
        step.round,
        len(needed),
        least,
        reason,
        causes,
    )
    return None


# ---- what a single reply may change
OUTLIERS = "outliers"  # the owner of a state
# A reply can make the server undo a step only if its norm is above this multiple of the other
# replies' median. Below it, all replies diverge alike, and no client is to blame.
UNDO_FACTOR = 10.0
# If the phase has no previous step to compare with, this is the limit of a norm, as a multiple of
# the step's own median. A smaller `replies.max_jump` takes its place.
FIRST_STEP_FACTOR = 30.0


class TakenAgain(Exception):
    """Ends a step that the server repeats without the clients that failed in it."""


class Outliers:
    """Refuses replies with norms far above the usual ones.

    Args:
        setup: gives `replies.max_jump`, which applies to the plain mean only: other merges limit
            by themselves how much a reply can change.

    Attributes:
        limit: the largest allowed norm of a change, or of an extra, as a multiple of the median of
            the phase's previous step; None for no limit.
    """

    def __init__(self, setup: RunSetup) -> None:
        self.limit = setup.replies.max_jump if setup.merge.name == Mean.name else None

    @staticmethod
    def medians(states: dict[str, State]) -> dict[str, dict[str, float]]:
        """Return the median norms in the last step of each phase: a dict by phase, then by kind.

        A median is 0 if fewer than three replies had a norm above 0.
        """
        return states.get(OUTLIERS, {}).get("medians", {})  # type: ignore[no-any-return]

    def refuse(
        self,
        step: OpenStep,
        states: dict[str, State],
        updates: Iterable[Upload],
        *,
        repeats: bool = False,
    ) -> Iterator[Upload]:
        """Yield the updates within the bound, and record all others as failures of their clients.

        If most updates exceed the bound, the method itself diverges. Then all of them are yielded.

        Args:
            step: the step.
            states: has the medians of each phase's previous step, and gets the medians of this
                step.
            updates: the updates that have passed all other checks.
            repeats: whether the server can repeat the step.

        Raises:
            RunFailed: an update is an outlier, and `on_failure` is "stop".
            TakenAgain: the medians of the step show that it has outliers, which were yielded
                before the medians were known.
        """
        if self.limit is None:
            yield from updates
            return
        norms, phase = step.norms, step.entry.name
        last = self.medians(states).get(phase, {})
        last = last if any(last.values()) else {}  # medians of 0 are nothing to compare with
        refused: list[tuple[Upload, str]] = []
        for update in updates:
            norms[update.pid] = norms_of(update, step.sent, _norm)
            if cause := self._beyond(norms[update.pid], self.limit, last, "the last"):
                refused.append((update, cause))
            else:
                yield update
        if len(refused) > max(len(norms) - len(refused), 1):
            yield from (update for update, _ in refused)
        else:
            for update, cause in refused:
                del norms[update.pid]  # refused replies do not count in the medians
                step.record(step.failure(update.pid, cause, "outlier"))
        kinds = sorted({kind for own in norms.values() for kind in own})
        medians = {k: median_of(n[k] for n in norms.values() if k in n) for k in kinds}
        if repeats and not last:
            factor = min(FIRST_STEP_FACTOR, self.limit)
            beyond = {pid: self._beyond(norms[pid], factor, medians, "this") for pid in norms}
            failures = [step.failure(pid, why, "outlier") for pid, why in beyond.items() if why]
            for failed in failures:
                step.record(failed)
            if failures:
                log.warning("round %d is repeated without its outliers", step.round)
                raise TakenAgain
        every = self.medians(states)
        states[OUTLIERS] = {
            **states.get(OUTLIERS, {}),
            "medians": {**every, phase: {**every.get(phase, {}), **medians}},
        }

    def _beyond(
        self, norms: dict[str, float], factor: float, usual: dict[str, float], which: str
    ) -> str:
        """Return an error text for the first bound that a reply exceeds; "" if it exceeds none."""
        for kind, norm in norms.items():
            if usual.get(kind) and norm > factor * usual[kind]:
                return (
                    f"the norm of its {kind} is {norm:.3g}, more than {factor:g} times the median"
                    f" of {which} step, {usual[kind]:.3g} (replies.max_jump={self.limit:g}; at most"
                    f" {FIRST_STEP_FACTOR:g} if there is no previous step to compare with)"
                )
        return ""

    @staticmethod
    def found(step: OpenStep) -> list[Failure]:
        """Return the failure of the step's outlier, for a step after which the loss is not finite.

        The outlier is the client with the largest norm. The list is empty if this norm is not above
        UNDO_FACTOR times the median of the other clients' norms.
        """
        changes = {pid: max(norms.values(), default=0.0) for pid, norms in step.norms.items()}
        pid = max(changes, key=changes.__getitem__, default=-1)
        others = [norm for other, norm in changes.items() if other != pid]
        if not others or not changes[pid] > UNDO_FACTOR * median(others):
            return []
        cause = (
            f"the loss is not finite after this step, and this client's norm, {changes[pid]:.3g},"
            f" is more than {UNDO_FACTOR:g} times the median of the other clients' norms,"
            f" {median(others):.3g}"
        )
        return [step.failure(pid, cause, "outlier")]


class Backup:
    """The state of the run before a step, which the server restores if the step had an outlier.

    The server never undoes two steps in a row: if a method diverges by itself, that is a result.

    Args:
        strategy: the run's strategy, before the step is planned.
        server_round: the number of the step.

    Attributes:
        possible: whether the step can be undone after its evaluation.
    """

    def __init__(self, strategy: FedStrategy, server_round: int) -> None:
        self._strategy, self._before = strategy, strategy.run
        index, _ = locate(strategy.timetable, server_round) or (-1, 0)
        limited = strategy.outliers.limit is not None
        self.possible = limited and strategy.phases[index].phase.evaluate

    def plan_again(self, spent: OpenStep) -> OpenStep:
        """Restore the state of the run before the step, and plan the step again.

        The new plan keeps the failures, bytes and seconds of the spent step.
        """
        self._strategy.run = self._before
        opened = self._strategy.plan(spent.round)
        return replace(opened, failures=spent.failures, bytes=spent.bytes, seconds=spent.seconds)

    def undo(self, opened: OpenStep, note: Callable[[Failure], None]) -> OpenStep | None:
        """Undo a step after which the loss is not finite, if it had an outlier.

        Restore the state of the run before the step, but keep the step's number and the median
        norms that it has measured.

        Args:
            opened: the step.
            note: is called with the failure of the outlier's client.

        Returns:
            The step without its replies. None if nothing was undone, because the step had no
            outlier, the previous step was undone, or the step cannot be undone (`possible`).

        Raises:
            RunFailed: the step had an outlier, and `on_failure` is "stop".
        """
        strategy = self._strategy
        measured = strategy.run.states.get(OUTLIERS, {})
        undone_before = measured.get("undone", -1) == opened.round - 1
        failures = Outliers.found(opened) if self.possible and not undone_before else []
        for failed in failures:
            note(failed)
            strategy.setup.survive(failed)
            log.warning("round %d is undone: %s", opened.round, failed)
        if not failures:
            return None
        spent = self.plan_again(opened)
        outliers = {**measured, "undone": opened.round}
        strategy.run = replace(
            self._before, states={**self._before.states, OUTLIERS: outliers}, round=opened.round
        )
        return spent


def _norm(tree: AnyTree) -> float:
    """Return the norm of a tree, in fewer passes and less exactly than `trees.norm`.

    Only the order of magnitude matters here.
    """
    if isinstance(tree, Difference):
        tree = {name: tree.new[name] - tree.old[name] for name in tree}
    values = list(tree.values())
    norm = float(torch.stack([each.double() for each in torch._foreach_norm(values)]).norm())
    # Squares of float32 can overflow or vanish.
    return norm if 0 < norm < math.inf else trees.norm(tree)
