"""Which phases a client or a plug-in serves."""

from __future__ import annotations

import inspect


def serves(owner: object, phase: str, base: type) -> bool:
    """Whether the owner has a method for this phase.

    A message must not be able to call whatever has its name: the methods of the base class are no
    phases, except `train`.
    """
    if phase.startswith("_") or not inspect.isfunction(getattr(type(owner), phase, None)):
        return False
    return phase == "train" or not hasattr(base, phase)
