"""The checks of a reply. One that fails a check is left out as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fedhet import messages, trees
from fedhet.admission.outcome import ends_run
from fedhet.errors import RunFailed
from fedhet.messages import Failure, Reply, Update
from fedhet.replies import Step

if TYPE_CHECKING:
    from fedhet.admission.jumps import Jumps
    from fedhet.setting import Setting

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
    return setting.merge.admit(step, _near(step, checked, setting, jumps), setting)


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
                _complete(step, reply, sizes[reply.pid], setting.site.variances)
                check(reply)
                _refuse_unread(reply)
            except ValueError as error:
                reply = failure(step, reply.pid, str(error), "refused")
                sizes_up = {REFUSED: sum(sizes_up.values())}  # the client has chosen the names
            step.count("up", sizes_up)
        if isinstance(reply, Failure):
            record(step, reply, setting)
        else:
            yield reply


def _near(
    step: Step, updates: Iterable[Update], setting: Setting, jumps: Jumps
) -> Iterator[Update]:
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
        record(step, failure(step, update.pid, jumps.cause(update.pid), "outlier"), setting)


def failure(step: Step, pid: int, cause: str, reason: str) -> Failure:
    """A failure of the client in this step."""
    return Failure(pid, step.entry.name, step.step, cause, reason)


def record(step: Step, failed: Failure, setting: Setting) -> None:
    """Note the failure, which may end the run (`on_failure`, `on_lost_state`).

    Raises:
        RunFailed: it does.
    """
    step.failures.append(failed)
    if ends_run(failed, setting):
        raise RunFailed(str(failed))


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
