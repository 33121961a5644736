"""The names under which the extras of a method or plug-in travel, and their checks on arrival.

The extra `c` of the piece `scaffold` travels as `scaffold.c`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedhet.core import kernel, messages, trees
from fedhet.core.kernel import Component, Expected, Message, Step, is_withheld
from fedhet.core.messages import Broadcast
from fedhet.core.trees import AnyTree


def prefixed(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The owner's values under the names that they have in a message."""
    return {f"{owner}.{name}": value for name, value in values.items()}


def seen_message(owner: str, msg: Broadcast, weights: AnyTree) -> Message:
    """The message as the owner sees it."""
    phase = msg.phase.rpartition(".")[2]
    start = f"{owner}."
    extras = {n.removeprefix(start): v for n, v in msg.extras.items() if n.startswith(start)}
    return Message(phase, msg.step, msg.round, msg.pid, msg.local, weights, extras)


def sent_extras(component: Component, result: kernel.Result) -> messages.Extras:
    """The extras of a result under the names in messages; what is withheld is empty."""
    given = {n: torch.empty(0) if t is None else t for n, t in result.extras.items()}
    return prefixed(component.name, given)


def read_update(
    name: str, expected: Mapping[str, Expected], step: Step, update: messages.Upload
) -> kernel.Update:
    """The update as the piece of this name sees it, after the checks; what is withheld is None."""
    assert step.sent is not None
    extras: dict[str, Any] = {}
    for key, what in expected.items():
        value = (update.metrics if what.metric else update.extras).get(f"{name}.{key}")
        if what.whole and isinstance(value, float):
            value = int(value)
        extras[key] = None if what.statistic and is_withheld(value) else value
    return kernel.Update(
        pid=update.pid,
        n=update.num_examples,
        weight=update.weight,
        weights=update.weights,
        change=update.change,
        extras=extras,
        metrics=update.metrics,
        sent=step.sent,
    )


def check_extras(
    owner: str,
    expected: Mapping[str, Expected],
    update: messages.Upload,
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Refuse an update that is not what its owner expects.

    Args:
        owner: the name of the piece.
        expected: what it expects.
        update: the update.
        shapes: of the tensors of any size in the step's other updates; one more may be added.

    Raises:
        ValueError: it names the extra.
    """
    for name, what in expected.items():
        key = f"{owner}.{name}"
        value = what.read(key, update)
        if value is not None and what.shape is not None and -1 in what.shape:
            first = shapes.setdefault(key, tuple(value.shape))
            if value.shape != first:
                raise ValueError(
                    f"extra {key!r} has the shape {tuple(value.shape)}; that of the first client"
                    f" has {first}"
                )


# ---- under privacy.noise and privacy.min_count
def releases_in(expected: Mapping[str, Expected]) -> int:
    """How many releases under privacy.noise the extras of a reply are."""

    def is_release(what: Expected) -> bool:
        if what.public is True or what.metric or (what.whole and not what.repair):
            return False
        public = what.public or ()
        like = {"": None} if what.like is None else what.like
        return any(
            name not in public and (t is None or t.is_floating_point()) for name, t in like.items()
        )

    return sum(map(is_release, expected.values()))


# Of these, `expected` has the extras of all pieces under their names in messages.
def public_names(expected: Mapping[str, Expected]) -> set[str]:
    """The names of extras, and of tensors in them, that need no noise."""
    names = {name for name, what in expected.items() if what.public is True}
    parts = {name: what.public for name, what in expected.items() if name not in names}
    return names | {f"{name}.{part}" for name, public in parts.items() for part in public or ()}  # type: ignore[union-attr]


def withhold(
    expected: Mapping[str, Expected], update: messages.Upload, device: torch.device
) -> None:
    """Withhold the statistics, because they are of too few samples."""
    statistics = [name for name, what in expected.items() if what.statistic]
    for name in update.extras.keys() & statistics:
        update.extras[name] = torch.empty(0, device=device)


def repair(expected: Mapping[str, Expected], update: messages.Upload) -> None:
    """Make of noised extras what the server accepts."""
    for name, what in expected.items():
        value: Any = update.extras.get(name)
        if value is None or what.public is True or (what.statistic and is_withheld(value)):
            continue
        if what.low is not None or what.high is not None:
            clamp = partial(torch.clamp, min=what.low, max=what.high)
            if isinstance(value, dict):
                value = trees.map(clamp, value)
            elif isinstance(value, Tensor):
                value = clamp(value)
            else:
                value = float(clamp(torch.tensor(value)))
        update.extras[name] = what.repair(value, update) if what.repair else value
