"""The names of extras in messages, and checks of the extras that clients send.

The extra `c` of the component `scaffold` has the name `scaffold.c` in messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedhet.core import kernel, messages, trees
from fedhet.core.kernel import Component, Expected, Message, Step, is_withheld


def prefixed(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the owner's values under their names in messages."""
    return {f"{owner}.{name}": value for name, value in values.items()}


def seen_message(owner: str, msg: messages.Broadcast, weights: trees.AnyTree) -> Message:
    """Return the message as its owner sees it."""
    phase = msg.phase.rpartition(".")[2]
    start = f"{owner}."
    extras = {n.removeprefix(start): v for n, v in msg.extras.items() if n.startswith(start)}
    return Message(phase, msg.step, msg.round, msg.pid, msg.local, weights, extras)


def sent_extras(component: Component, result: kernel.Result) -> messages.Extras:
    """Return the extras of a result under their names in messages; withheld ones are empty."""
    return prefixed(
        component.name,
        {n: torch.empty(0) if t is None else t for n, t in result.extras.items()},
    )


def read_update(
    name: str, expected: Mapping[str, Expected], step: Step, update: messages.Upload
) -> kernel.Update:
    """Return a checked update as the component `name` sees it; withheld extras are None."""
    assert step.sent is not None
    extras: dict[str, Any] = {}
    for key, rule in expected.items():
        value = (update.metrics if rule.metric else update.extras).get(f"{name}.{key}")
        if rule.whole and isinstance(value, float):
            value = int(value)
        extras[key] = None if rule.statistic and is_withheld(value) else value
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
    """Refuse an update if its extras are not as a component expects.

    Args:
        owner: the name of the component.
        expected: the extras that the component expects.
        update: the update.
        shapes: the shapes of extras in the step's first reply, for tensors of any size, by name.
            New names are added to it.

    Raises:
        ValueError: names the extra.
    """
    for name, rule in expected.items():
        key = f"{owner}.{name}"
        value = rule.read(key, update)
        if value is not None and rule.shape is not None and -1 in rule.shape:
            first = shapes.setdefault(key, tuple(value.shape))
            if value.shape != first:
                raise ValueError(
                    f"extra {key!r} has the shape {tuple(value.shape)}; expected: {first}, the"
                    " shape in the first client's reply"
                )


# ---- under privacy.noise and privacy.min_count
def releases_in(expected: Mapping[str, Expected]) -> int:
    """Return how many releases under privacy.noise the extras of a reply are."""

    def is_release(rule: Expected) -> bool:
        if rule.public is True or rule.metric or (rule.whole and not rule.repair):
            return False
        public = rule.public or ()
        like = {"": None} if rule.like is None else rule.like
        return any(
            name not in public and (t is None or t.is_floating_point()) for name, t in like.items()
        )

    return sum(map(is_release, expected.values()))


# In the next functions, `expected` has the extras of all components under their names in messages.
def public_names(expected: Mapping[str, Expected]) -> set[str]:
    """Return the names of extras, and of tensors in extras, that need no noise."""
    names = {name for name, rule in expected.items() if rule.public is True}
    parts = {name: rule.public for name, rule in expected.items() if name not in names}
    return names | {f"{name}.{part}" for name, public in parts.items() for part in public or ()}  # type: ignore[union-attr]


def withhold(
    expected: Mapping[str, Expected], update: messages.Upload, device: torch.device
) -> None:
    """Withhold the statistics of a client with too few samples."""
    update.extras |= {
        name: torch.empty(0, device=device)
        for name, rule in expected.items()
        if rule.statistic and name in update.extras
    }


def repair(expected: Mapping[str, Expected], update: messages.Upload) -> None:
    """Change noised extras so that the server accepts them."""
    for name, rule in expected.items():
        value: Any = update.extras.get(name)
        if value is None or rule.public is True or (rule.statistic and is_withheld(value)):
            continue
        if rule.low is not None or rule.high is not None:
            clamp = partial(torch.clamp, min=rule.low, max=rule.high)
            if isinstance(value, dict):
                value = trees.map(clamp, value)
            elif isinstance(value, Tensor):
                value = clamp(value)
            else:
                value = float(clamp(torch.tensor(value)))
        update.extras[name] = rule.repair(value, update) if rule.repair else value
