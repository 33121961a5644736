"""The two messages of a step, as methods and plug-ins see them. How Flower carries them is
wire.py's business."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedhet import trees
from fedhet.trees import AnyTree, Tree

Scalar = bool | int | float | str
Extra = Scalar | Tensor | Tree
Extras = dict[str, Extra]


@dataclass(frozen=True)
class LocalSettings:
    """How clients train in this step; sent, so that a plug-in can schedule it
    (conf/client/*.yaml)."""

    lr: float
    epochs: int = 1
    batch_size: int = 32
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    optimizer: str = "sgd"


@dataclass
class Broadcast:
    """Server to client.

    `phase` names who serves it ("train", "fedlex.explore"); `step` counts inside the phase, `round`
    over the run; `weights` are the shared tensors of `slot`; `version` is the client state that the
    server last accepted."""

    phase: str
    step: int
    round: int
    slot: str | None
    weights: Tree | None
    extras: Extras
    local: LocalSettings
    trains: bool = False
    plugins: dict[str, str] = field(default_factory=dict)
    pid: int = -1
    version: int = 0

    def to(self, pid: int, version: int, private: Extras) -> Broadcast:
        """The message of one client: everything shared is handed on by reference."""
        return replace(
            self,
            pid=pid,
            version=version,
            extras={**self.extras, **private} if private else self.extras,
        )

    def on(self, device: torch.device) -> Broadcast:
        """The message with its tensors where the client computes."""
        weights = (
            None
            if self.weights is None
            else {name: t.to(device) for name, t in self.weights.items()}
        )
        return replace(
            self,
            weights=weights,
            extras={name: on_device(value, device) for name, value in self.extras.items()},
        )


@dataclass
class Update:
    """Client to server. Aggregation reads `weight`, never `num_examples` (the real training
    samples, always).

    The client fills `weights`; the server adds `delta` (client minus server, float64, trainable
    names only) and `buffers`. `metrics` are recorded, never used. `keeps` says that the client
    changed its state in this step."""

    pid: int
    num_examples: int
    weights: Tree | None = None
    extras: Extras = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    keeps: bool = False
    weight: float = 0.0
    delta: AnyTree | None = None
    buffers: Tree = field(default_factory=dict)

    @property
    def change(self) -> AnyTree:
        """`delta`, for a phase in which every client sends weights."""
        if self.delta is None:
            raise ValueError(f"client {self.pid} sent no weights")
        return self.delta

    def scalar(self, name: str) -> float:
        """The extra `name` as a finite number; ValueError where it is not one."""
        value = self._extra(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise ValueError(f"extra {name!r} is {value!r}; a finite number is expected")
        return float(value)

    def integer(self, name: str, low: int) -> int:
        """The extra `name` as a whole number >= low; ValueError where it is not one."""
        value = self.scalar(name)
        if value < low or value != int(value):
            raise ValueError(f"extra {name!r} is {value}; a whole number >= {low} is expected")
        return int(value)

    def tensor(self, name: str, ndim: int | None = None) -> Tensor:
        """The extra `name` as a finite floating tensor; ValueError where it is not one."""
        value = self._extra(name)
        if (
            not isinstance(value, Tensor)
            or not value.is_floating_point()
            or (ndim is not None and value.ndim != ndim)
        ):
            size = "" if ndim is None else f" of {ndim} dimensions"
            raise ValueError(
                f"extra {name!r} is {describe(value)}; a floating tensor{size} is expected"
            )
        if not torch.isfinite(value).all():
            raise ValueError(f"extra {name!r} holds NaN or infinite values; all must be finite")
        return value

    def tree(self, name: str, like: AnyTree) -> Tree:
        """The extra `name` as a finite tree with the names and shapes of `like`; ValueError where
        it is not one."""
        value = self._extra(name)
        if not isinstance(value, dict):
            raise ValueError(
                f"extra {name!r} is {describe(value)}; a tree of {len(like)} tensors is expected"
            )
        check_tree(f"extra {name!r}", value, like)
        return value

    def _extra(self, name: str) -> Extra:
        if name not in self.extras:
            raise ValueError(f"extra {name!r} is missing; received {sorted(self.extras)}")
        return self.extras[name]


@dataclass
class Failure:
    """A client that did not deliver."""

    pid: int
    phase: str
    step: int
    cause: str

    def __str__(self) -> str:
        return f"client {self.pid} failed in phase {self.phase!r}, step {self.step}: {self.cause}"


Reply = Update | Failure


def on_device(value: Extra, device: torch.device) -> Extra:
    """The extra where arithmetic takes place; what is there already is handed on as it is."""
    if isinstance(value, dict):
        return {name: t.to(device) for name, t in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def check_extras(extras: Extras, metrics: dict[str, float]) -> None:
    """TypeError names an extra or metric that cannot travel, in every engine: Python's own scalars,
    tensors and trees can."""
    for name, value in extras.items():
        tree = isinstance(value, dict) and all(isinstance(t, Tensor) for t in value.values())
        if (
            type(value) not in (bool, int, float, str)
            and not isinstance(value, Tensor)
            and not tree
        ):
            raise TypeError(
                f"extra {name!r} is {describe(value)}; send a bool, int, float, str, tensor or tree"
                " of tensors"
            )
    for name, number in metrics.items():
        if type(number) not in (bool, int, float):
            raise TypeError(f"metric {name!r} is {describe(number)}; a Python number is expected")


def describe(value: object) -> str:
    return (
        f"a {value.dtype!s} tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )


def check_tree(what: str, tree: AnyTree, like: AnyTree) -> None:
    """Refuse a tree whose names, shapes or dtypes are not those of `like`, or that is not
    finite."""
    if set(tree) != set(like):
        missing, extra = [n for n in like if n not in tree], [n for n in tree if n not in like]
        raise ValueError(f"{what}: names differ: missing {missing[:3]}, unexpected {extra[:3]}")
    for name in like:
        got, want = tree[name], like[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ValueError(f"{what}, tensor {name!r}: {describe(got)}; expected {describe(want)}")
    if bad := trees.first_nonfinite(tree):
        raise ValueError(
            f"{what}, tensor {bad!r}: holds NaN or infinite values; all must be finite"
        )


def payload(slot: str | None, weights: AnyTree | None, extras: Extras) -> dict[str, int]:
    """Bytes by payload kind: the slot's name for its weights, else the extra's name. The same in
    every engine."""
    out = {slot: trees.nbytes(weights)} if slot and weights else {}
    for name, value in extras.items():
        if isinstance(value, Tensor):
            out[name] = trees.nbytes({"": value})
        elif isinstance(value, dict):
            out[name] = trees.nbytes(value)
        else:
            out[name] = (
                len(value.encode())
                if isinstance(value, str)
                else 1
                if isinstance(value, bool)
                else 8
            )
    return out
