"""One of six clients sends whatever it likes, again and again, in every phase of every method.

Its replies travel as Flower carries them. A run in which the others alone learn, and one in which
all six are honest, show what it may cost: the accuracy is the mean over the five others.
FEDHET_ATTACKS=440 sends so many hostile replies with each method; `pytest -s` shows the costs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from engines import wired
from safetensors.torch import load_file
from torch import Tensor

from fedhet.core import trees
from fedhet.core.messages import EVALUATE, Broadcast, Failure, Reply, Upload
from fedhet.core.server.loop import Clock
from fedhet.engines import in_process
from fedhet.engines.dispatch import run_job
from fedhet.engines.local_transport import LocalTransport
from fedhet.runs import config

ATTACKER = 1
REPLIES = int(os.environ.get("FEDHET_ATTACKS", "40"))  # hostile ones, with each method
LOSS = 0.1  # of accuracy, beyond which an attack has succeeded
LIMIT = 2**28  # replies.max_mb
SETTINGS = [
    *["dataset=digits", "model=mlp", "model.hidden=[16]", "partition.clients=6", "rounds=12"],
    *["partition.alpha=1", "client.epochs=1", "figures=false"],
    *["on_failure=skip", "replies.max_lost=1", "device=cpu", "eval.personal_mb=0"],
]
DENSITY = [  # few epochs, in which the weights of samples still become different
    *["plugin.feddisk.made_max_rounds=8", "plugin.feddisk.made_lr=.01"],
    *["plugin.feddisk.local_max_epochs=30", "plugin.feddisk.clf_max_epochs=20"],
    *["plugin.feddisk.clf_lr=.2", "plugin.feddisk.clf_tolerance=0"],
]
EXPLORE = ["plugin.fedlex.e_exp=5", "plugin.fedlex.rescale=mean1"]
RUNS = {  # what is attacked, by name
    "fedavg": [],
    "feddisk": DENSITY,
    "fedlex": EXPLORE,
    "fedgmm": [],
    "scaffold+feddisk": [*DENSITY, "client.lr=.1"],
    "fednova+fedgmm": ["client.lr=.1"],
    "fedavgm+fedlex": EXPLORE,
    **{name: [] for name in ("fedbabu", "fedbn", "feddyn", "fednorm", "fedprox", "fedrod")},
    "fedgen": ["method.server_steps=20", "method.hidden=32", "method.noise_dim=16"],
    "scaffold": ["client.lr=.1"],
    "fednova": ["client.lr=.1"],
    "fedpcl": [],
    "fedproto": [],
    "fedsa": [],
    "fedsgd": ["client.lr=.5", "rounds=20"],
    "sgdm": ["client.lr=.05"],
    "ditto": [],
    "fedadam": [],
}


# ---- what the attacker does to its reply
Draw = np.random.Generator
Change = Callable[[Upload, Broadcast, Draw], object]


def _tensors(update: Upload) -> list[tuple[dict[str, Any], str]]:
    """Where its tensors are: each one's tree and name, of the weights and of the extras."""
    trees = [update.weights, update.extras]
    trees += [value for value in update.extras.values() if isinstance(value, dict)]
    return [(tree, name) for tree in trees for name in tree if isinstance(tree[name], Tensor)]


def _all(change: Callable[[Tensor, Tensor | None, Draw], Tensor]) -> Change:
    """Change every floating tensor: (value, what was received in its place, draw) -> value."""

    def fault(update: Upload, msg: Broadcast, draw: Draw) -> None:
        for tree, name in _tensors(update):
            if (t := tree[name]).is_floating_point():
                old = msg.weights.get(name) if tree is update.weights else None
                tree[name] = change(t, old, draw).to(t.dtype)

    return fault


def _constant(size: float) -> Change:
    return _all(lambda t, old, draw: torch.full_like(t, size))


def _longer(factor: float) -> Change:
    """So many times its change, or its extra."""
    return _all(lambda t, old, draw: factor * t if old is None else old + factor * (t - old))


def _random(factor: float) -> Change:
    """A random direction, so many times as long as its change."""

    def change(t: Tensor, old: Tensor | None, draw: Draw) -> Tensor:
        base = torch.zeros_like(t) if old is None else old
        noise = torch.from_numpy(draw.standard_normal(tuple(t.shape))).float()
        return base + noise * factor * ((t - base).norm() / (noise.norm() + 1e-12))

    return _all(change)


def _entry(size: float) -> Change:
    """A single number."""

    def change(t: Tensor, old: Tensor | None, draw: Draw) -> Tensor:
        t = t.clone()
        if t.numel():
            t.view(-1)[int(draw.integers(t.numel()))] = size
        return t

    return _all(change)


def _form(change: Callable[[Tensor], Tensor]) -> Change:
    """Another form of one tensor, among the weights or the extras."""

    def fault(update: Upload, msg: Broadcast, draw: Draw) -> None:
        places = _tensors(update)
        if places:
            tree, name = places[int(draw.integers(len(places)))]
            tree[name] = change(tree[name])

    return fault


def _extra(value: Any) -> Change:
    """One of its extras, or a metric, becomes this."""

    def fault(update: Upload, msg: Broadcast, draw: Draw) -> None:
        names = [*update.extras, "unknown"]
        update.extras[names[int(draw.integers(len(names)))]] = value
        if isinstance(value, int | float) and update.metrics:
            names = list(update.metrics)
            update.metrics[names[int(draw.integers(len(names)))]] = value

    return fault


def _missing(update: Upload, msg: Broadcast, draw: Draw) -> None:
    for tree in (update.weights, update.extras, update.metrics):
        if tree:
            del tree[list(tree)[int(draw.integers(len(tree)))]]


def _counts(update: Upload, msg: Broadcast, draw: Draw) -> None:
    """What it says of its samples: all are of one class, and classes have each other's extras."""
    for name, value in update.extras.items():
        if isinstance(value, Tensor) and not value.is_floating_point() and value.numel():
            update.extras[name] = torch.zeros_like(value)
            update.extras[name].view(-1)[int(draw.integers(value.numel()))] = value.sum()
        elif isinstance(value, dict) and "label" in value:
            value["label"] = value["label"].roll(1)


def _samples(n: int) -> Change:
    return lambda update, msg, draw: setattr(update, "num_examples", n)


def _scores(value: float) -> Change:
    """Its scores, where it evaluates, and its losses elsewhere."""

    def fault(update: Upload, msg: Broadcast, draw: Draw) -> None:
        for name in update.metrics:
            if not name.endswith(".n"):
                update.metrics[name] = value
        for name, one in update.extras.items():
            if isinstance(one, float):
                update.extras[name] = value

    return fault


ATTACKS: dict[str, Change] = {
    **{f"all are {size:g}": _constant(size) for size in (0, 1, 10, -1e3, 1e6, 1e14, 3e38)},
    **{f"all are {size}": _constant(float(size)) for size in ("nan", "inf", "-inf")},
    **{f"x {factor:g}": _longer(factor) for factor in (-1, -10, 10, 29, 100, 900, 1e5, -1e12)},
    **{f"random x {factor:g}": _random(factor) for factor in (1, 10, 29, 100, 900, 1e8)},
    **{f"an entry is {size:g}": _entry(size) for size in (10, 1e6, 1e14, 3e38)},
    "an entry is nan": _entry(float("nan")),
    "another shape": _form(lambda t: t[:-1] if t.dim() else t.reshape(1)),
    "a dimension more": _form(lambda t: t[None]),
    "one number": _form(lambda t: t.flatten()[:1]),
    "none": _form(lambda t: t.flatten()[:0]),
    "another type": _form(lambda t: t.double() if t.dtype != torch.float64 else t.int()),
    "whole numbers": _form(lambda t: t.long()),
    "upside down": _form(lambda t: t.flip(0) if t.dim() else -t),
    "negative": _form(lambda t: -t - 1 if t.dtype != torch.bool else ~t),
    **{f"an extra is {v!r:.20}": _extra(v) for v in (-1, 0, 2**62, 1e308, "x" * 10**5, True)},
    "an extra is a tensor": _extra(torch.zeros(3)),
    "an extra is a tree": _extra({"a": torch.zeros(2)}),
    "something is missing": _missing,
    "other counts and labels": _counts,
    **{f"{n} samples": _samples(n) for n in (-5, 0, 10**6, 2**62)},
    **{f"scores of {value:g}": _scores(value) for value in (0, 1, -1, 1e15, 1e300)},
    "scores of inf": _scores(float("inf")),
}
WHEN = ("always", "first steps", "later", "before training", "training", "evaluations")


def struck(when: str, msg: Broadcast) -> bool:
    """Whether the attacker changes its reply to the message."""
    if msg.phase == EVALUATE:
        return when in ("always", "evaluations")
    return {
        "always": True,
        "first steps": msg.step == 1,
        "later": msg.step > 1,
        "before training": not msg.trains,
        "training": msg.trains,
        "evaluations": False,
    }[when]


# ---- the runs
class Attacked(LocalTransport):
    """Clients of this process, one of which attacks; what all of them send is packed and read."""

    change: Change | None = None
    when: ClassVar[str] = ""
    draw: ClassVar[Draw]
    sent: ClassVar[int] = 0  # hostile replies
    scores: ClassVar[dict[int, list[float]]] = {}  # of the others, by round

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        for msg, reply in zip(plan, super().exchange(plan, clock), strict=True):
            attacks = msg.pid == ATTACKER and isinstance(reply, Upload)
            if attacks and self.when == "absent":
                yield Failure(msg.pid, msg.phase, msg.step, "absent")
                continue
            if msg.phase == EVALUATE and msg.pid != ATTACKER and isinstance(reply, Upload):
                first = next(k for k in reply.metrics if k[:5] == "test." and k[-9:] == ".accuracy")
                self.scores.setdefault(msg.round, []).append(reply.metrics[first])
            change = Attacked.change
            if attacks and change and struck(self.when, msg):
                Attacked.sent += 1
                change(reply, msg, self.draw)
            yield travelled(msg, reply)


def travelled(msg: Broadcast, reply: Reply) -> Reply:
    """What the server reads of the reply."""
    if isinstance(reply, Failure):
        return reply
    try:
        sent = wired.packed(msg, reply)
    except TypeError as error:  # an honest client cannot send it; an attacker sends other bytes
        return Failure(msg.pid, msg.phase, msg.step, str(error), "unsendable")
    return wired.read(msg, sent, LIMIT)


def run(
    settings: config.Config, when: str, change: Change | None, number: int, folder: Path
) -> float:
    """A run, which nothing may escape; the accuracy of the others."""
    Attacked.when, Attacked.change = when, change
    Attacked.draw, Attacked.scores = np.random.default_rng(number), {}
    found = run_job(replace(settings, run_dir=str(folder), run_dir_given=True)).summary
    assert {one["pid"] for one in found["failures"]} <= {ATTACKER}
    for file in folder.glob("*.safetensors"):
        assert trees.first_nonfinite(load_file(file)) is None
    return float(np.mean(Attacked.scores[max(Attacked.scores)]))


@pytest.mark.matrix
@pytest.mark.parametrize("name", RUNS)
def test_no_lie_escapes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none costs much, but for those in the training, after its first step."""
    monkeypatch.setattr(in_process, "LocalTransport", Attacked)
    monkeypatch.setattr(Attacked, "sent", 0)
    host, _, plugin = name.partition("+")
    settings = config.compose([*SETTINGS, f"method={host}", f"plugin=[{plugin}]", *RUNS[name]])
    expected = min(run(settings, when, None, 0, tmp_path / f"0{when}") for when in ("", "absent"))
    draw = np.random.default_rng([7, *name.encode()])
    lost: dict[str, dict[str, float]] = {}  # by when the attacker lies, and how
    number = 0
    while Attacked.sent < REPLIES:
        number += 1
        how, when = (str(draw.choice([*every])) for every in (ATTACKS, WHEN))
        score = run(settings, when, ATTACKS[how], number, tmp_path / str(number))
        loss = round(expected - score, 3)
        lost.setdefault(when, {})[how] = loss
        assert loss <= LOSS or when in ("always", "later", "training"), (how, when)
    print(name, f"{Attacked.sent} replies in {number} runs", lost)
