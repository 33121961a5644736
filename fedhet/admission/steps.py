"""The number of local steps that a reply claims, beside the one that follows from the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedhet.check import counted
from fedhet.plugin import Plugin, overrides
from fedhet.training import usable

if TYPE_CHECKING:
    from fedhet.messages import Update
    from fedhet.strategy import FedStrategy


def check_steps(method: FedStrategy, update: Update, name: str) -> None:
    """Check the number of local steps in the extra `name`.

    A merge that divides by it, or multiplies with it, would let one client that lies outvote all
    others. Where a plug-in adds samples, more steps than those of the client's own are accepted.

    Raises:
        ValueError: it is not the number that follows from the client's samples.
    """
    steps = update.integer(name, low=1)
    n = method.sizes[update.pid]
    expected = method.local.count_steps(usable(method.site.model, n, method.local.batch_size))
    if steps < expected or (steps > expected and not steps_unknown(method)):
        raise ValueError(
            f"extra {name!r} is {steps}; {counted(expected, 'local step')} would follow from the"
            f" client's {counted(n, 'sample')}"
        )


def steps_unknown(method: FedStrategy) -> str:
    """The plug-in that adds samples, whose number the server does not know; "" if none does."""
    if method.setting.local.steps is not None:
        return ""
    adding = (plugin.name for plugin in method.plugins if overrides(plugin, Plugin, "data"))
    return next(adding, "")


def unbounded_merges(method: FedStrategy) -> dict[str, str]:
    """The merges that are of no use where a plug-in adds samples: name -> reason."""
    if not (plugin := steps_unknown(method)):
        return {}
    reason = (
        f"plugin {plugin!r} adds samples, so that nobody can check the number of local steps that a"
        " client claims, by which it would outvote the others; client.steps=<number> sets it"
    )
    return dict.fromkeys(("krum", "norm_filter"), reason)
