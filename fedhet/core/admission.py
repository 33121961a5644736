"""What a reply must meet before it is merged, and what becomes of a client that failed.

A reply that fails a check is left out as a whole. Under a mean, which one reply far from all others
would take over, a reply is also refused if its weights have changed by far more than those of the
phase's last step, unless most replies have: then the method itself diverges. Where nothing is known
of a last step, the step itself tells in the end what was usual, and is undone if a reply was far
beyond it; so is one after which the model's loss is not finite, and in which one reply had changed
by far more than the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from statistics import median
from typing import TYPE_CHECKING, ClassVar

import torch

from fedhet.core import messages, trees
from fedhet.core.check import EXACT, counted
from fedhet.core.compatibility import unknown_steps
from fedhet.core.errors import RunFailed
from fedhet.core.memory import MemoryPacker, put_back
from fedhet.core.merging import Mean, median_of, norms_of
from fedhet.core.messages import STATE_BYTES, Failure, Reply, Update
from fedhet.core.phases import Step
from fedhet.core.targets import Target
from fedhet.core.training import usable
from fedhet.core.trees import AnyTree, Difference

if TYPE_CHECKING:
    from fedhet.core.setting import Setting
    from fedhet.core.strategy import FedStrategy

log = logging.getLogger("fedhet")
REFUSED = "refused"  # the kind of all bytes of a reply that has failed a check


def accepted(
    step: Step,
    replies: Iterable[Reply],
    sizes: Sequence[int],
    check: Callable[[Update], None],
    setting: Setting,
    jumps: Jumps,
) -> Iterator[Update]:
    """The updates that pass every check, completed by the server's part.

    Every other reply is a failure of its client. With `on_failure` "skip" it is left out as a
    whole, as if the client had not taken part.

    Args:
        step: the step in progress.
        replies: what the clients returned.
        sizes: the number of training samples of each client.
        check: the checks of the method and the plug-ins; raises ValueError.
        setting: the run's `on_failure`, `on_lost_state` and `merge`.
        jumps: the bound on what a reply may change.

    Raises:
        RunFailed: a client failed and `on_failure` is "stop".
    """
    checked = _checked(step, replies, sizes, check, setting)
    return setting.merge.admit(step, _near(step, checked, jumps))


def _checked(
    step: Step,
    replies: Iterable[Reply],
    sizes: Sequence[int],
    check: Callable[[Update], None],
    setting: Setting,
) -> Iterator[Update]:
    for reply in replies:
        if isinstance(reply, Update):
            sizes_up = messages.payload(step.entry.phase.slot, reply.weights, reply.extras)
            try:
                _complete(step, reply, sizes[reply.pid], setting.workspace.variances)
                check(reply)
                _refuse_unread(reply)
            except ValueError as error:
                reply = step.failure(reply.pid, str(error), "refused")
                sizes_up = {REFUSED: sum(sizes_up.values())}  # the client has chosen the names
            step.count("up", sizes_up)
        if isinstance(reply, Failure):
            step.record(reply)
        else:
            yield reply


def _near(step: Step, updates: Iterable[Update], jumps: Jumps) -> Iterator[Update]:
    """The updates within the bound; where most are beyond it, the method itself diverges."""
    far, near = [], 0
    for update in updates:
        if jumps.far(update):
            far.append(update)
        else:
            near += 1
            yield update
    if len(far) > max(near, 1):
        yield from far
        return
    for update in far:
        step.fail(update.pid, jumps.cause(update.pid), "outlier")


def _complete(step: Step, update: Update, declared: int, variances: Sequence[str]) -> None:
    """Check what every update has against what was sent, and form its `change` and `buffers`."""
    n = update.num_examples
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= declared:
        raise ValueError(
            f"num_examples is {trees.shown(n)}; a whole number from 1 to {declared}, the client's"
            " training samples, is expected"
        )
    _check_metrics(update.metrics)
    update.extras = {
        name: messages.on_device(value, step.device) for name, value in update.extras.items()
    }
    if not update.weights:
        if step.sent and step.entry.phase.uploads:
            raise ValueError("the reply carries no weights")
        return
    if not step.entry.phase.slot:
        raise ValueError("the reply carries weights in a phase that has none")
    update.weights = {name: t.to(step.device) for name, t in update.weights.items()}
    trees.check_like("weights", update.weights, step.sent)
    held = trees.pick(update.weights, [name for name in variances if name in update.weights])
    if bad := trees.first_negative(held):
        raise ValueError(f"weights {bad!r} hold negative values; variances are >= 0")
    update.change = trees.Difference(trees.pick(update.weights, step.old), step.old)
    update.buffers = {name: t for name, t in update.weights.items() if name not in step.old}


def _check_metrics(metrics: dict[str, float]) -> None:
    if not isinstance(metrics, dict) or not all(
        isinstance(v, int | float) for v in metrics.values()
    ):
        raise ValueError(f"metrics are {trees.shown(metrics)}; numbers by name are expected")
    for name, value in metrics.items():
        if name.startswith(("seconds.", "bytes.")) and not 0 <= value <= trees.LARGEST:
            raise ValueError(f"metric {name!r} is {trees.shown(value)}; a number >= 0 is expected")


def _refuse_unread(update: Update) -> None:
    """Refuse an update with an extra that no check has asked for.

    Extras that are read without a check would end the run where they are bad, and others only
    occupy the server.
    """
    if unread := sorted(set(update.extras) - update.read):
        raise ValueError(
            f"unexpected extras {trees.shown(unread)}; what a method expects, its `check` reads"
        )


# ---- failures and clients' states
def forget_lost(strategy: FedStrategy, failures: Iterable[Failure]) -> None:
    """Let each client whose state is lost start afresh, like one that takes part the first time."""
    for failure in failures:
        if strategy.setting.starts_afresh(failure.reason) and failure.pid in strategy.versions:
            version = strategy.versions.pop(failure.pid)
            for by_client in (strategy.state_bytes, *strategy.pinned.values()):
                by_client.pop(failure.pid, None)
            log.warning(
                "client %d starts afresh: its state of round %d is lost", failure.pid, version
            )


def needed_versions(strategy: FedStrategy, pid: int) -> list[int]:
    """Earlier states that the client must keep: of the best evaluations, and for checkpoints."""
    best = [versions[pid] for versions in strategy.pinned.values() if pid in versions]
    return sorted({*best, *strategy.kept_back.get(pid, ())})


def registered(
    strategy: FedStrategy, updates: Iterable[Update], accept: Callable[[Update], None]
) -> Iterator[Update]:
    """Note what the clients of admitted updates report, and pass the updates on."""
    for update in updates:
        accept(update)
        size = int(update.metrics.pop(STATE_BYTES, 0))
        if update.keeps:
            strategy.versions[update.pid] = strategy.current.round
            strategy.state_bytes[update.pid] = size
        strategy.current.accepted += 1
        strategy.current.measure(update.metrics)
        yield update


def log_failures(failures: Iterable[Failure]) -> None:
    """Log who is left out of a step."""
    for failure in failures:
        log.warning("%s", failure)


# ---- how many replies a step needs
class Quorum:
    """Lets a step change something only if enough updates were accepted.

    Args:
        setting: `replies.least`, `replies.bad_steps` and `merge` count here.

    Attributes:
        in_row: the number of steps in a row with too few updates.
    """

    memory: ClassVar[tuple[str, ...]] = ("in_row",)

    def __init__(self, setting: Setting) -> None:
        self._limits = setting.replies
        self._merge = setting.merge
        self.in_row = 0

    def __call__(self, step: Step, admitted: Iterator[Update]) -> Iterator[Update] | None:
        """The updates of the step, or None if they are too few.

        Raises:
            RunFailed: too many steps in a row had too few updates, or the phase is not one of
                training and cannot be continued without them.
        """
        phase = step.entry.phase
        compared = self._merge.needs(step.sent, step.old) if phase.compared else 1
        least = max(self._limits.least, compared)
        needed = list(islice(admitted, least))
        # What the merge has refused was compared with the others all the same.
        outliers = sum(failure.reason == "outlier" for failure in step.failures)
        if len(needed) >= self._limits.least and len(needed) + outliers >= compared:
            self.in_row = 0
            return chain(needed, admitted)
        self.in_row += 1
        causes = "; ".join(map(str, step.failures)) or f"{len(step.cohort)} clients take part"
        reason = "replies.least" if self._limits.least >= compared else f"merge={self._merge.name}"
        if self.in_row > self._limits.bad_steps or not phase.trains:
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


# ---- an evaluation's reply
SHARES = ("accuracy", "f1", "f1_micro", "f1_macro", "subset_accuracy")  # in [0, 1]


def check_scores(
    update: Update,
    scored: Collection[str],
    target: Target,
    extras: Collection[str],
    sizes: Mapping[str, int],
) -> None:
    """Refuse scores that no evaluation can have.

    Args:
        update: the reply.
        scored: the parts of its data and the views that it was asked for, as in "test.global".
        target: what is learned; clients send its tallies if they are pooled.
        extras: the further extras that the client was asked for.
        sizes: how many samples the client has in each part, by which its scores count.

    Raises:
        ValueError: a metric or an extra is unknown, or a value is out of its range.
    """
    counted = set()
    for name, value in update.metrics.items():
        where, _, metric = name.rpartition(".")
        if where not in scored or metric not in (*target.keys, *SHARES, "loss", "n"):
            raise ValueError(f"unexpected metric {trees.shown(name)}")
        if metric == "n":
            own = sizes[where.partition(".")[0]]
            if value != own or not own:
                raise ValueError(
                    f"metric {name!r} is {trees.shown(value)}; the client has {own} such samples"
                )
            counted.add(where)
        elif not _in_range(metric, value):
            raise ValueError(f"metric {name!r} is {trees.shown(value)}, which it cannot be")
    if uncounted := {name.rpartition(".")[0] for name in update.metrics} - counted:
        raise ValueError(f"no number of samples for {trees.shown(sorted(uncounted))}")
    expected = {*extras, *(scored if target.pooled else ())}
    if unexpected := sorted(set(update.extras) - expected):
        raise ValueError(f"unexpected extras {trees.shown(unexpected)}")


def _in_range(metric: str, value: float) -> bool:
    if isinstance(value, int) and abs(value) > EXACT:  # no file of scores could hold it
        return False
    if metric in SHARES:
        return 0.0 <= value <= 1.0
    # Those of a model that has diverged are infinite, which is a result.
    return value <= 1.0 if metric == "r2" else not math.isnan(value)


# ---- the number of local steps that a reply claims
def check_steps(method: FedStrategy, update: Update, name: str, *, low: int = 0) -> None:
    """Check the number of local steps in the extra `name`.

    A merge that divides by it, or multiplies with it, would let one client that lies outvote all
    others. Where a plug-in changes it (`Plugin.changes_steps`), any from `low` on is accepted.

    Raises:
        ValueError: it is not the number that follows from the client's samples.
    """
    steps = update.integer(name, low=low)
    if unknown_steps(method):
        return
    n = method.sizes[update.pid]
    local = method.local
    used = usable(method.workspace.model, n, local.batch_size)
    expected = sum(-(-min(size, used) // local.batch_size) for size in local.epoch_sizes(used))
    if steps != expected:
        raise ValueError(
            f"extra {name!r} is {steps}; {counted(expected, 'local step')} would follow from the"
            f" client's {counted(n, 'sample')}"
        )


# ---- what a single reply may change
ALIKE = 10.0  # times the median of the others: within it, all replies of a step diverge alike
KEPT = ("jumps",)  # what a step that is undone has measured remains


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
        self._bounded = any(self._usual.values())

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
            f" replies.max_jump={self.limit:g} times the median of"
            f" {'the last' if self._bounded else 'this'} step, {self._usual[kind]:.3g}"
        )

    def end(self) -> None:
        """Keep the medians of the step."""
        for kind in {kind for norms in self._norms.values() for kind in norms}:
            held = (norms[kind] for norms in self._norms.values() if kind in norms)
            self._usual[kind] = median_of(held)

    def odd(self, *, finite: bool) -> list[Failure]:
        """The failures of the replies that may have spoilt the step; none where all are alike.

        Args:
            finite: whether the loss is finite after the step. Then they are those that the step's
                own medians would have refused, if it had no bound; else the largest change.
        """
        if finite:
            far = [] if self._bounded else [pid for pid in self._norms if self._beyond(pid)]
            return [self._step.failure(pid, self.cause(pid), "outlier") for pid in far]
        changes = {pid: max(norms.values(), default=0.0) for pid, norms in self._norms.items()}
        pid = max(changes, key=changes.__getitem__, default=-1)
        others = [norm for other, norm in changes.items() if other != pid]
        if not others or not changes[pid] > ALIKE * median(others):
            return []
        cause = (
            f"the loss is not finite after this step, in which its norm is {changes[pid]:.3g}, and"
            f" the median of the others {median(others):.3g}"
        )
        return [self._step.failure(pid, cause, "outlier")]


class Undo:
    """Takes a step back that a reply has spoilt.

    That happens once in a row, and only where one reply had changed by far more than the others: a
    method that diverges by itself is a result.

    Args:
        strategy: the run's strategy, before the step is settled.
    """

    def __init__(self, strategy: FedStrategy) -> None:
        setting = strategy.setting
        self._strategy = strategy
        self.possible = strategy.jumps.limit is not None and strategy.current.entry.phase.evaluate
        packer = MemoryPacker()
        if self.possible and setting.on_failure == "skip":
            parts = strategy.parts.items()
            try:
                self._before = {name: packer.memory(part, name) for name, part in parts}
                for name in KEPT:
                    del self._before["method"][name]
            except TypeError as error:
                self.possible = False
                if strategy.current.step == 1:
                    log.warning("no step can be undone, should a reply spoil it: %s", error)
        self._tensors = {name: t.clone() for name, t in packer.tensors.items()}

    def __call__(self, report: Callable[[Failure], None], *, finite: bool = False) -> bool:
        """Put back what was before the step, if a reply has spoilt it.

        Args:
            report: is given the failure of each such reply's client.
            finite: whether the loss is finite after the step.

        Raises:
            RunFailed: there is one, and `on_failure` is "stop".
        """
        strategy = self._strategy
        again = strategy.jumps.undone == strategy.current.round - 1
        failures = strategy.jumps.odd(finite=finite) if self.possible and not again else []
        for failed in failures:
            report(failed)
            if strategy.setting.ends_run(failed):
                raise RunFailed(str(failed))
            log.warning("round %d is undone: %s", strategy.current.round, failed)
        if not failures:
            return False
        for name, part in strategy.parts.items():
            put_back(part, self._before[name], self._tensors, strategy.workspace.device, name)
        strategy.forget_reports()
        strategy.current.accepted = 0
        strategy.current.metrics = {}
        strategy.jumps.undone = strategy.current.round
        return True


def _norm(tree: AnyTree) -> float:
    """As `trees.norm`, in fewer passes: only its order of magnitude matters here."""
    if isinstance(tree, Difference):
        tree = {name: tree.new[name] - tree.old[name] for name in tree}
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tree.values()]
    return float(torch.stack(norms).norm())
