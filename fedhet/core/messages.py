"""The two messages of a step: `Broadcast` to the clients, `Upload` or `Failure` from each client.

fedhet/flower/wire.py converts them for Flower. Methods and plug-ins see them as `kernel.Message`
and `kernel.Update`.
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

Recorded = dict[str, float | Tensor]  # the values that a component records in a step
Scalar = bool | int | float | str
Extra = Scalar | Tensor | Tree
Extras = dict[str, Extra]

LOST = "lost state"  # the reason of a failure
STATE_BYTES = "bytes.state"  # metric: the size of the client's state after the message
STEPS = "steps"  # metric: the optimiser steps that a simulated client took for the message
EVALUATE = "evaluate"  # the phase name of a message that asks the client to evaluate


@dataclass
class WithExtras:
    """Typed access to the extras of a message.

    Every accessor raises ValueError if the extra is missing or has another type, so the author of
    a method needs no such checks. For an optional extra, first ask `name in msg.extras`.
    """

    extras: Extras = field(default_factory=dict, kw_only=True)

    def text(self, name: str) -> str:
        """Return the extra `name` as a str."""
        value = self._extra(name)
        if not isinstance(value, str):
            raise ValueError(f"extra {name!r} is {kind(value)}; a text is expected")
        return value

    def scalar(self, name: str) -> float:
        """Return the extra `name` as a finite number in [-LARGEST, LARGEST]."""
        value = self._extra(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST:
            return float(value)
        raise ValueError(f"extra {name!r} is {shown(value)}; a finite number is expected")

    def integer(self, name: str) -> int:
        """Return the extra `name` as a whole number >= 0."""
        value = self.scalar(name)
        if value < 0 or value != int(value):
            raise ValueError(f"extra {name!r} is {value}; a whole number >= 0 is expected")
        return int(value)

    def tensor(self, name: str) -> Tensor:
        """Return the extra `name` as a finite floating-point tensor."""
        value = self._extra(name)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise ValueError(
                f"extra {name!r} is {kind(value)}; a floating-point tensor is expected"
            )
        if trees.first_unbounded({name: value}):
            raise ValueError(f"extra {name!r} {UNBOUNDED}")
        return value

    def whole(self, name: str) -> Tensor:
        """Return the extra `name` as a tensor of whole numbers."""
        value = self._extra(name)
        if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
            raise ValueError(f"extra {name!r} is {kind(value)}; whole numbers are expected")
        return value

    def counts(self, name: str, total: int, classes: int, least: int = 0) -> Tensor:
        """Return the extra `name` as the counts of `classes` classes, whole numbers.

        A client withholds counts below `least`, and more counts if its site is stricter. Withheld
        counts are 0, so each number must be 0 or at least `least`. The counts may lack 0 or at
        least `least` of the `total` samples, or any number of samples if all counts are withheld.
        """
        value = self.whole(name)
        whole = value.shape == (classes,)
        given = [number for number in value.tolist() if number] if whole else []
        rest = total - sum(given)  # Python's numbers: a sum of int64 could wrap around
        few = any(number < max(least, 1) for number in given)
        if not whole or few or rest < 0 or (0 < rest < least and given):
            raise ValueError(
                f"extra {name!r} is {shown(value)}; expected: {counted(classes, 'whole number')}"
                f" that are 0 or at least {max(least, 1)}, with the sum {total}, or a sum that is"
                " smaller by at least as many"
            )
        return value

    def tree(self, name: str, like: AnyTree | None = None) -> Tree:
        """Return the extra `name` as a tree.

        With `like`, it must be finite, with the names, shapes and dtypes of `like`.
        """
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
    """A message from the server to a client.

    Attributes:
        phase: the work that the client is to do: "train", "fedlex.explore", "evaluate".
        step: the number of the step inside the phase, from 1.
        round: the number of the step over the whole run, from 1.
        local: the settings of local training in this step.
        slot: the slot that `weights` belong to; "" for none.
        weights: the shared tensors of `slot`; empty without a slot.
        trains: whether the step trains the model. Then every plug-in's hooks run.
        plugins: the digests of the method and the plug-ins; the keys are "method" and the
            plug-ins' names.
        pid: the client that gets the message.
        version: the round of the client state that the server last accepted; 0 for none.
        deadline: seconds after which the client gives up; None for never.
        pinned: earlier rounds; their client states are still needed at the end of the run.
        run_id: 32 hexadecimal digits that identify the run; a resumed run keeps them.
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
    """A client's reply to the server. The aggregation reads `weight`, never `num_examples`.

    The client fills in `pid` to `keeps`. The server fills in the other fields after it has checked
    the update.

    Attributes:
        pid: the client.
        num_examples: the number of its real training samples, without samples that plug-ins added.
        weights: the shared tensors of the slot after training; empty if the client sends none.
        metrics: numbers to record; they never influence the aggregation.
        keeps: whether the client changed its state in this step.
        weight: the aggregation weight; see `fedhet.core.kernel.Update`.
        change: `weights` minus the tensors of the message, in float64; trained tensors only.
        buffers: the tensors of `weights` that are not trained.
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
    """The failure of a client in a step.

    Attributes:
        pid: the client.
        phase, step: the step in which it failed.
        cause: what happened; put into one line, because the text may come from another process.
        reason: the kind of fault under which failures are counted. "failed": the client reported an
            error; LOST: it no longer has the state that the server names; "no reply"; "refused":
            its reply has the wrong content; "outlier"; and the reasons of
            `fedhet.core.errors.Rejected`.
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
    """Return the extra on the device; a tensor that is already there is not copied."""
    if isinstance(value, dict):
        return {name: t.to(device) for name, t in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def check_extras(extras: Extras, metrics: dict[str, float]) -> None:
    """Refuse extras and metrics that some engine cannot carry.

    Raises:
        TypeError: an extra is no bool, int, float, str, tensor or tree of tensors, or a metric is
            not a Python number; the message names it.
    """
    for name, value in extras.items():
        is_tree = isinstance(value, dict) and all(isinstance(t, Tensor) for t in value.values())
        if not (type(value) in (bool, int, float, str) or isinstance(value, Tensor) or is_tree):
            raise TypeError(
                f"extra {name!r} is {kind(value)}; send a bool, int, float, str, tensor or tree of"
                " tensors"
            )
    for name, number in metrics.items():
        if type(number) not in (bool, int, float):
            raise TypeError(f"metric {name!r} is {kind(number)}; a Python number is expected")


def payload(slot: str, weights: AnyTree, extras: Extras) -> dict[str, int]:
    """Return the bytes of a message by kind: the slot's name for its weights, or an extra's name.

    They are counted from the values themselves, so they are the same in every engine.
    """
    sizes = {slot: trees.nbytes(weights)} if weights else {}
    for name, value in extras.items():
        if isinstance(value, Tensor | dict):
            sizes[name] = trees.nbytes(trees.as_tree(value))
        elif isinstance(value, str):
            sizes[name] = len(value.encode())
        else:
            sizes[name] = 1 if isinstance(value, bool) else 8
    return sizes
