"""What a reply must meet before it is merged, and what becomes of a client that failed.

A reply that fails a check is left out as a whole. Under a mean, which a single outlier would take
over, a reply is also refused if the norm of what it changes is beyond a bound: a multiple of the
median in the phase's last step. Where most replies are beyond it, none is refused, because the
method itself diverges. A step without such a last one, as is a phase's first, shows in the end what
was usual, and is taken again without the replies that were outliers. A step is undone if the
model's loss is not finite after it, and one reply had changed by far more than the others.
"""

from __future__ import annotations

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

REFUSED = "refused"  # the kind of all bytes of a reply that has failed a check


def checked(strategy: FedStrategy, step: OpenStep, replies: Iterable[Reply]) -> Iterator[Upload]:
    """The updates that pass every check, completed by the server's part.

    Every other reply is a failure of its client. With `on_failure` "skip" it is left out as a
    whole, as if the client had not taken part.

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
                if unexpected:  # they would only occupy the server
                    raise ValueError(
                        f"unexpected extras {trees.shown(sorted(unexpected))}; what a method"
                        " expects, its `expects` names"
                    )
                reply.weight = strategy.weight(step, reply)
            except ValueError as error:
                reply = step.failure(reply.pid, str(error), "refused")
                sizes = {REFUSED: sum(sizes.values())}  # the client has chosen the names
            step.count("up", sizes)
        if isinstance(reply, Failure):
            step.record(reply)
        else:
            yield reply


def _complete(step: OpenStep, update: Upload, declared: int, variances: Sequence[str]) -> None:
    """Check what every update has against what was sent, and form its `change` and `buffers`."""
    n, metrics = update.num_examples, update.metrics
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= declared:
        raise ValueError(
            f"num_examples is {trees.shown(n)}; a whole number from 1 to {declared}, the client's"
            " training samples, is expected"
        )
    numbers = isinstance(metrics, dict) and all(
        isinstance(value, int | float) for value in metrics.values()
    )
    if not numbers:
        raise ValueError(f"metrics are {trees.shown(metrics)}; numbers by name are expected")
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
    """The updates of the step, or None if they are too few to change something.

    Args:
        setting: `replies.least`, `replies.bad_steps` and `merge` count here.
        step: the step.
        states: "quorum" gets the number of steps in a row with too few updates.
        admitted: the updates that were accepted.

    Raises:
        RunFailed: too many steps in a row had too few updates, or the phase is not one of training
            and cannot be continued without them.
    """
    phase, limits, merge = step.entry.phase, setup.replies, setup.merge
    compared = merge.needs(step.sent, step.old) if phase.compared else 1
    least = max(limits.least, compared)
    needed = list(islice(admitted, least))
    # What the merge has refused was compared with the others all the same.
    outliers = sum(failure.reason == "outlier" for failure in step.failures)
    if len(needed) >= limits.least and len(needed) + outliers >= compared:
        states["quorum"] = {"in_row": 0}
        return chain(needed, admitted)
    in_row = states.get("quorum", {}).get("in_row", 0) + 1
    states["quorum"] = {"in_row": in_row}
    causes = "; ".join(map(str, step.failures)) or f"{len(step.cohort)} clients take part"
    reason = "replies.least" if limits.least >= compared else f"merge={merge.name}"
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
ALIKE = 10.0  # times the median of the others: within it, all replies of a step diverge alike
FIRST = 30.0  # times the median of the step itself, where the phase has no last step


class TakenAgain(Exception):
    """Ends a step that is to be taken again, without the clients that have failed in it."""


class Outliers:
    """Refuses replies that change the model, or an extra, by far more than is usual.

    Args:
        setting: `replies.max_jump` counts here, for the plain mean: other merges bound what a reply
            can change.

    Attributes:
        limit: the largest norm of a change, or of an extra, as a multiple of the median of the
            phase's last step; None for no limit.
    """

    def __init__(self, setup: RunSetup) -> None:
        self.limit = setup.replies.max_jump if setup.merge.name == Mean.name else None

    @staticmethod
    def medians(states: dict[str, State]) -> dict[str, dict[str, float]]:
        """Phase -> kind -> the median norm of that kind in the phase's last step.

        It is 0 where fewer than three replies had one.
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
        """The updates within the bound; each of the others is a failure of its client.

        Where most are beyond it, the method itself diverges, and all of them go on.

        Args:
            step: the step.
            states: the medians of last steps are in it, and those of this step become so.
            updates: what has passed all other checks.
            repeats: whether the step can be taken again.

        Raises:
            RunFailed: an update is an outlier, and `on_failure` is "stop".
            TakenAgain: updates that have gone on were outliers, as the step itself has shown.
        """
        if self.limit is None:
            yield from updates
            return
        norms, phase = step.norms, step.entry.name
        last = self.medians(states).get(phase, {})  # says nothing where no kind has a median
        last = last if any(last.values()) else {}
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
                del norms[update.pid]  # it does not count in the medians
                step.record(step.failure(update.pid, cause, "outlier"))
        kinds = sorted({kind for own in norms.values() for kind in own})
        medians = {k: median_of(n[k] for n in norms.values() if k in n) for k in kinds}
        if repeats and not last:
            factor = min(FIRST, self.limit)
            beyond = {pid: self._beyond(norms[pid], factor, medians, "this") for pid in norms}
            failures = [step.failure(pid, why, "outlier") for pid, why in beyond.items() if why]
            for failed in failures:
                step.record(failed)
            if failures:
                log.warning("round %d is taken again without its outliers", step.round)
                raise TakenAgain
        every = self.medians(states)
        states[OUTLIERS] = {
            **states.get(OUTLIERS, {}),
            "medians": {**every, phase: {**every.get(phase, {}), **medians}},
        }

    def _beyond(
        self, norms: dict[str, float], factor: float, usual: dict[str, float], which: str
    ) -> str:
        """Which bound a reply is beyond, for an error; "" for none."""
        for kind, norm in norms.items():
            if usual.get(kind) and norm > factor * usual[kind]:
                return (
                    f"the norm of its {kind} is {norm:.3g}, more than {factor:g} times the median"
                    f" of {which} step, {usual[kind]:.3g} (replies.max_jump={self.limit:g})"
                )
        return ""

    @staticmethod
    def found(step: OpenStep) -> list[Failure]:
        """The failure of the outlier in a step after which the loss is not finite.

        There is none where all replies are alike.
        """
        changes = {pid: max(norms.values(), default=0.0) for pid, norms in step.norms.items()}
        pid = max(changes, key=changes.__getitem__, default=-1)
        others = [norm for other, norm in changes.items() if other != pid]
        if not others or not changes[pid] > ALIKE * median(others):
            return []
        cause = (
            f"the loss is not finite after this step, in which its norm is {changes[pid]:.3g}, and"
            f" the median of the others {median(others):.3g}"
        )
        return [step.failure(pid, cause, "outlier")]


class Backup:
    """The run before a step, to which the server returns if the step had an outlier.

    A step is undone once in a row: a method that diverges by itself is a result.

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
        """Put back what was before the step, and begin it once more.

        Its failures, its bytes and its seconds remain.
        """
        self._strategy.run = self._before
        opened = self._strategy.plan(spent.round)
        return replace(opened, failures=spent.failures, bytes=spent.bytes, seconds=spent.seconds)

    def undo(self, opened: OpenStep, note: Callable[[Failure], None]) -> OpenStep | None:
        """Put back what was before a step after which the loss is not finite, if it had an outlier.

        What the step has measured of the replies' norms remains. Returned is the step as it is
        without its replies, or None where it had no outlier.

        Args:
            opened: the step.
            note: is given the failure of that reply's client.

        Raises:
            RunFailed: there is one, and `on_failure` is "stop".
        """
        strategy = self._strategy
        measured = strategy.run.states.get(OUTLIERS, {})
        again = measured.get("undone", -1) == opened.round - 1
        failures = Outliers.found(opened) if self.possible and not again else []
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
    """As `trees.norm`, in fewer passes: only its order of magnitude matters here."""
    if isinstance(tree, Difference):
        tree = {name: tree.new[name] - tree.old[name] for name in tree}
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tree.values()]
    return float(torch.stack(norms).norm())
