"""The two messages of a step, as methods and plug-ins see them.

How Flower carries them is the business of fedhet/flower/wire.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedhet.core import trees
from fedhet.core.check import counted
from fedhet.core.errors import clean
from fedhet.core.groups import LocalSettings as LocalSettings  # part of every Broadcast
from fedhet.core.trees import LARGEST, UNBOUNDED, AnyTree, Tree, kind, shown

Recorded = dict[str, float | Tensor]  # what is recorded of a step
Scalar = bool | int | float | str
Extra = Scalar | Tensor | Tree
Extras = dict[str, Extra]

LOST = "lost state"  # the reason of a failure
STATE_BYTES = "bytes.state"  # metric: the size of what the client remembers now
STEPS = "steps"  # metric: the optimiser steps that a simulated client has taken for a message
EVALUATE = "evaluate"  # the phase name of a message whose client evaluates


@dataclass
class WithExtras:
    """Typed access to the extras of a message.

    Every accessor raises ValueError where the extra is missing or of another type, so that a
    method's author handles neither. Use `name in msg.extras` for an extra that is optional.
    """

    extras: Extras = field(default_factory=dict, kw_only=True)

    def text(self, name: str) -> str:
        """The extra `name` as a str."""
        value = self._extra(name)
        if not isinstance(value, str):
            raise ValueError(f"extra {name!r} is {kind(value)}; a text is expected")
        return value

    def scalar(self, name: str) -> float:
        """The extra `name` as a finite number of at most LARGEST."""
        value = self._extra(name)
        is_bool = isinstance(value, bool)
        if isinstance(value, int | float) and not is_bool and abs(value) <= LARGEST:
            return float(value)
        raise ValueError(f"extra {name!r} is {shown(value)}; a finite number is expected")

    def integer(self, name: str) -> int:
        """The extra `name` as a whole number >= 0."""
        value = self.scalar(name)
        if value < 0 or value != int(value):
            raise ValueError(f"extra {name!r} is {value}; a whole number >= 0 is expected")
        return int(value)

    def tensor(self, name: str) -> Tensor:
        """The extra `name` as a finite floating tensor."""
        value = self._extra(name)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise ValueError(
                f"extra {name!r} is {kind(value)}; a floating-point tensor is expected"
            )
        if trees.first_unbounded({name: value}):
            raise ValueError(f"extra {name!r} {UNBOUNDED}")
        return value

    def whole(self, name: str) -> Tensor:
        """The extra `name` as a tensor of whole numbers."""
        value = self._extra(name)
        if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
            raise ValueError(f"extra {name!r} is {kind(value)}; whole numbers are expected")
        return value

    def counts(self, name: str, total: int, classes: int, least: int = 0) -> Tensor:
        """The extra `name` as `classes` whole numbers whose sum is `total`.

        A client withholds counts below `least`, and more than that where its site is stricter: each
        number is 0 or at least `least`, and so is what their sum lacks, unless all are withheld.
        """
        value = self.whole(name)
        whole = value.shape == (classes,)
        given = [number for number in value.tolist() if number] if whole else []
        rest = total - sum(given)  # of Python's numbers, since a sum of int64 could wrap around
        few = any(number < max(least, 1) for number in given)
        if not whole or few or rest < 0 or (0 < rest < least and given):
            raise ValueError(
                f"extra {name!r} is {shown(value)}; expected: {counted(classes, 'whole number')}"
                f" that are 0 or at least {max(least, 1)}, with the sum {total}, or one that lacks"
                " as many"
            )
        return value

    def tree(self, name: str, like: AnyTree | None = None) -> Tree:
        """The extra `name` as a tree; with `like`, a finite one of its names, shapes and dtypes."""
        value = self._extra(name)
        if not isinstance(value, dict):
            size = "tensors" if like is None else counted(len(like), "tensor")
            raise ValueError(f"extra {name!r} is {kind(value)}; a tree of {size} is expected")
        if like is not None:
            trees.check_like(f"extra {name!r}", value, like)
        return value

    def _extra(self, name: str) -> Extra:
        if name not in self.extras:
            received = sorted(self.extras)[:10]
            raise ValueError(f"extra {name!r} is missing; received {received}")
        return self.extras[name]


@dataclass(kw_only=True)
class Broadcast(WithExtras):
    """Server to client.

    Attributes:
        phase: what the client is to do: "train", "fedlex.explore", "evaluate".
        step: the number of the step inside the phase, from 1.
        round: the number of the step over the whole run, from 1.
        local: the settings of local training in this step.
        slot: whose weights travel; "" where none do.
        weights: the shared tensors of `slot`; empty where there is no slot.
        trains: whether the step trains the model, so that every plug-in's hooks run.
        plugins: name of each plug-in, or "method" -> digest of its class and its settings.
        pid: the client that the message is for.
        version: the round of the client state that the server last accepted; 0 for none.
        deadline: seconds after which the client gives up; None for never.
        pinned: earlier rounds whose client state is still needed at the end of the run.
        run_id: 32 hexadecimal digits that identify the run, also when it is resumed.
    """

    phase: str
    step: int
    round: int
    local: LocalSettings
    slot: str = ""
    weights: Tree = field(default_factory=dict)
    trains: bool = False
    plugins: dict[str, str] = field(default_factory=dict)
    pid: int = -1
    version: int = 0
    deadline: float | None = None
    pinned: list[int] = field(default_factory=list)
    run_id: str = "0" * 32


@dataclass
class Upload(WithExtras):
    """Client to server. Aggregation reads `weight`, never `num_examples`.

    The client fills in `pid` to `keeps`; the server adds the rest when it has checked the update.

    Attributes:
        pid: the client.
        num_examples: its real training samples, also where a plug-in has added generated ones.
        weights: the shared tensors of the slot after training; empty where none are sent.
        metrics: numbers to record; they never influence the aggregation.
        keeps: whether the client changed its state in this step.
        weight: the aggregation weight; see `fedhet.core.kernel.Update`.
        change: `weights` minus what was sent, in float64; trained names only, never buffers.
        buffers: the part of `weights` that is not trained.
    """

    pid: int
    num_examples: int
    weights: Tree = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    keeps: bool = False
    weight: float = 0.0
    change: AnyTree = field(default_factory=dict)
    buffers: Tree = field(default_factory=dict)


@dataclass
class Failure:
    """A client that did not deliver.

    Attributes:
        pid: the client.
        phase, step: what it was to do.
        cause: what happened, in one line: a text of another process is made one.
        reason: the kind of fault, under which failures are counted. "failed": the client reported
            an error; LOST: it no longer has the state that the server names; "no reply"; "refused":
            its reply has the wrong content; "outlier"; and those of `fedhet.core.errors.Rejected`.
    """

    pid: int
    phase: str
    step: int
    cause: str
    reason: str = "failed"

    def __post_init__(self) -> None:
        self.cause = clean(self.cause)

    def __str__(self) -> str:
        return f"client {self.pid} failed in phase {self.phase!r}, step {self.step}: {self.cause}"


Reply = Upload | Failure


def on_device(value: Extra, device: torch.device) -> Extra:
    """The extra on the device; a tensor that is already there is passed on unchanged."""
    if isinstance(value, dict):
        return {name: t.to(device) for name, t in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def check_extras(extras: Extras, metrics: dict[str, float]) -> None:
    """Refuse extras and metrics that cannot travel in every engine.

    Raises:
        TypeError: an extra is no bool, int, float, str, tensor or tree of tensors, or a metric is
            not a Python number; the message names it.
    """
    for name, value in extras.items():
        is_tree = isinstance(value, dict) and all(isinstance(t, Tensor) for t in value.values())
        is_scalar = type(value) in (bool, int, float, str)
        if not (is_scalar or isinstance(value, Tensor) or is_tree):
            raise TypeError(
                f"extra {name!r} is {kind(value)}; send a bool, int, float, str, tensor or tree of"
                " tensors"
            )
    for name, number in metrics.items():
        if type(number) not in (bool, int, float):
            raise TypeError(f"metric {name!r} is {kind(number)}; a Python number is expected")


def payload(slot: str, weights: AnyTree, extras: Extras) -> dict[str, int]:
    """Bytes by kind: the slot's name for its weights, else the extra's name.

    They are counted from the payload itself, so they are equal in every engine.
    """
    sizes = {slot: trees.nbytes(weights)} if weights else {}
    for name, value in extras.items():
        if isinstance(value, Tensor):
            sizes[name] = trees.nbytes({"": value})
        elif isinstance(value, dict):
            sizes[name] = trees.nbytes(value)
        elif isinstance(value, str):
            sizes[name] = len(value.encode())
        else:
            sizes[name] = 1 if isinstance(value, bool) else 8
    return sizes
