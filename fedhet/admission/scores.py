"""The checks of an evaluation's reply, whose scores choose the best model and end the training."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from fedhet import trees
from fedhet.admission.fields import EXACT
from fedhet.messages import Update
from fedhet.targets import Target

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
    if metric == "loss":  # it may be infinite
        return not math.isnan(value)
    low, high = (0.0, 1.0) if metric in SHARES else (-trees.LARGEST, trees.LARGEST)
    return low <= value <= high
