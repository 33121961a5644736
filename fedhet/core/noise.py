"""The Gaussian mechanism: what a client's reply carries is clipped and gets noise (privacy.noise).

docs/promises.md says what this protects, and what it does not.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedhet.core import check, streams, trees
from fedhet.core.errors import ConfigError
from fedhet.core.groups import DEFAULT_DELTA, Noise
from fedhet.core.limits import demanded
from fedhet.core.messages import Extra, Upload
from fedhet.core.trees import AnyTree, Tree, kind

Draw = Callable[[int], Tensor]  # n -> (n,) independent standard normal numbers, in float64
VARIANCE = "running_var"
# By these a machine's owner refuses runs, whose settings come from the server.
MIN_NOISE = "FEDHET_MIN_NOISE"
MAX_EPSILON = "FEDHET_MAX_EPSILON"
MAX_DELTA = "FEDHET_MAX_DELTA"  # what MAX_EPSILON refers to


def allowed_here(noise: Noise) -> Noise:
    """The noise of a run, if the owner of this machine demands no more.

    Raises:
        ConfigError: the owner does, or there is to be noise and the accountant is not installed.
    """
    least, most = demanded(MIN_NOISE), demanded(MAX_EPSILON)
    if least is not None and noise.multiplier < least:
        raise ConfigError(
            f"privacy.noise={noise.multiplier:g}: the owner of this machine serves no run with"
            f" less than {MIN_NOISE}={least:g}"
        )
    if most is not None and (noise.budget is None or noise.budget > most or not noise):
        raise ConfigError(
            f"privacy.budget={noise.budget} with privacy.noise={noise.multiplier:g}: the owner"
            f" of this machine serves no run without noise and a budget, {MAX_EPSILON}={most:g}"
            " or less"
        )
    if most is not None and noise.delta > most_delta():
        raise ConfigError(
            f"privacy.delta={noise.delta:g}: the owner of this machine serves no run with more"
            f" than {MAX_DELTA}={most_delta():g}, to which {MAX_EPSILON} refers"
        )
    if noise:
        check.installed(f"privacy.noise={noise.multiplier:g}", "opacus", extra="privacy")
    return noise


def most_delta() -> float:
    """The delta for which the owner of this machine has set FEDHET_MAX_EPSILON.

    Raises:
        ConfigError: FEDHET_MAX_DELTA is not a number > 0.
    """
    given = demanded(MAX_DELTA)
    return DEFAULT_DELTA if given is None else min(given, 1.0)


def mechanism(tree: AnyTree, clip: float, std: float, draw: Draw) -> Tree:
    """The tree, scaled down to a norm of at most `clip`, plus noise; in float64 on the CPU.

    Args:
        tree: floating tensors; the norm is that of all of them together.
        clip: the largest norm.
        std: the standard deviation of the noise in every entry.
        draw: draws the noise.

    Raises:
        ValueError: the norm is not finite.
    """
    values = trees.map(lambda t: t.detach().double().cpu(), tree)
    norm = trees.norm(values)
    if not norm < float("inf"):
        raise ValueError(f"its norm is {norm}: only finite values can be clipped")
    factor = min(1.0, clip / norm) if norm else 1.0
    return {name: t * factor + std * draw(t.numel()).view(t.shape) for name, t in values.items()}


def seeded(seed: int, phase: str, step: int, pid: int) -> Draw:
    """Noise from a stream of the run's seed, for simulations: whoever knows the seed knows it."""
    generator = streams.torch_generator(seed, "privacy.noise", phase, step, pid)
    return lambda n: torch.randn(n, generator=generator, dtype=torch.float64)


def unpredictable(n: int) -> Tensor:
    """(n,) noise from the operating system's entropy, which no seed repeats."""
    bits = np.frombuffer(secrets.token_bytes(8 * n), dtype=np.uint64)
    # In (0, 1): with a bit more, the largest value plus .5 would be rounded, and give 1.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.special.ndtri(torch.from_numpy(uniform))


@dataclass
class Content:
    """What a reply carries, sorted by what must be noised.

    Attributes:
        change: the floating weights minus those that were received; empty where none are sent.
            Other weights, such as the counters of batch norm, are sent as they were received.
        extras: the floating part of every extra that has one, a single tensor under "".
    """

    change: Tree
    extras: dict[str, Tree]

    @classmethod
    def of(cls, update: Upload, received: AnyTree, public: set[str]) -> Content:
        """The content of an update, before its noise.

        Args:
            update: the update.
            received: the weights that the client received.
            public: names of extras, or "<extra>.<tensor>", that reveal nothing about the data but
                their number of samples.

        Raises:
            ValueError: an extra or a tensor can neither be noised nor is it public.
        """
        extras = {
            name: _floating(name, value, public | {f"{name}.{n}" for n in _counters(received)})
            for name, value in update.extras.items()
            if name not in public
        }
        change = {
            name: t.double() - received[name]
            for name, t in update.weights.items()
            if t.is_floating_point()
        }
        return cls(change, {name: tree for name, tree in extras.items() if tree})

    @property
    def releases(self) -> int:
        """How many releases of the mechanism they are: one for each kind of value."""
        return bool(self.change) + len(self.extras)

    def noised(self, noise: Noise, draw: Draw) -> Content:
        """Each kind of value, clipped and noised by itself."""

        def of(what: str, tree: Tree) -> Tree:
            try:
                return mechanism(tree, noise.clip, noise.clip * noise.multiplier, draw)
            except ValueError as error:
                raise ValueError(f"privacy.noise: {what} cannot be sent: {error}") from error

        change = of("the change of the weights", self.change) if self.change else {}
        return Content(change, {name: of(name, tree) for name, tree in self.extras.items()})

    def write(self, update: Upload, received: AnyTree) -> None:
        """Put the content into the update, in the place, type and device of what was there."""
        counters = _counters(received)  # of steps, which reveal the samples that were added
        for name, before in update.weights.items():
            value = counters.get(name)
            if value is None:
                value = _valid(name, received[name].double().cpu() + self.change[name])
            update.weights[name] = value.to(before)
        for extra, old in update.extras.items():
            tree = self.extras.get(extra, {})
            if isinstance(old, dict):
                new = {name: _valid(name, t) for name, t in tree.items()} | counters
                update.extras[extra] = {name: new.get(name, t).to(t) for name, t in old.items()}
            elif tree:
                update.extras[extra] = (
                    tree[""].to(old) if isinstance(old, Tensor) else float(tree[""])
                )


def _floating(what: str, value: Extra, public: set[str]) -> Tree:
    """The floating part of a value, which noise can cover; the rest must be public."""
    if isinstance(value, float):
        return {"": torch.tensor(value, dtype=torch.float64)}
    tree = {"": value} if isinstance(value, Tensor) else value
    if not isinstance(tree, dict):
        raise _uncovered(what, value)
    for name, t in tree.items():
        full = f"{what}.{name}" if name else what
        if not t.is_floating_point() and full not in public:
            raise _uncovered(full, t)
    return {name: t for name, t in tree.items() if t.is_floating_point()}


def _counters(received: AnyTree) -> Tree:
    """The integer tensors of a model, which go back as they came, in an extra too."""
    return {name: t for name, t in received.items() if not t.is_floating_point()}


def _uncovered(what: str, value: object) -> ValueError:
    return ValueError(
        f"privacy.noise: {what!r} is {kind(value)}, which Gaussian noise cannot cover; nothing was"
        " sent. If it reveals no more than the number of samples, name it in `public`"
    )


def _valid(name: str, t: Tensor) -> Tensor:
    """The tensor; variances of batch norm that the noise has made negative are 0."""
    return t.clamp(min=0) if name.endswith(VARIANCE) else t
