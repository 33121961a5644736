"""The number of local steps that a reply claims, beside the one that follows from the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedhet.check import counted
from fedhet.training import usable

if TYPE_CHECKING:
    from fedhet.messages import Update
    from fedhet.strategy import FedStrategy


def check_steps(method: FedStrategy, update: Update, name: str, *, low: int = 0) -> None:
    """Check the number of local steps in the extra `name`.

    A merge that divides by it, or multiplies with it, would let one client that lies outvote all
    others. Where a plug-in changes it (`Plugin.changes_steps`), any from `low` on is accepted.

    Raises:
        ValueError: it is not the number that follows from the client's samples.
    """
    steps = update.integer(name, low=low)
    if _changing(method):
        return
    n = method.sizes[update.pid]
    local = method.local
    used = usable(method.site.model, n, local.batch_size)
    expected = sum(-(-min(size, used) // local.batch_size) for size in local.epoch_sizes(used))
    if steps != expected:
        raise ValueError(
            f"extra {name!r} is {steps}; {counted(expected, 'local step')} would follow from the"
            f" client's {counted(n, 'sample')}"
        )


def unbounded_merges(method: FedStrategy) -> dict[str, str]:
    """The merges that are of no use where a plug-in changes the number of steps: name -> reason."""
    if not (plugin := _changing(method)):
        return {}
    reason = (
        f"plugin {plugin!r} changes the number of local steps, so that nobody can check the one"
        " that a client claims, by which it would outvote the others; client.steps=<number> sets it"
    )
    return dict.fromkeys(("krum", "norm_filter"), reason)


def _changing(method: FedStrategy) -> str:
    """The plug-in that changes the number of local steps; "" if none does."""
    fixed = method.setting.local.steps is not None
    changing = (plugin.name for plugin in method.plugins if plugin.changes_steps)
    return "" if fixed else next(changing, "")
