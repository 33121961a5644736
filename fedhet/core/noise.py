"""The Gaussian mechanism: a client clips the content of its reply and adds noise (privacy.noise).

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
# Environment variables: a machine's owner refuses runs by them, since runs come from the server.
MIN_NOISE = "FEDHET_MIN_NOISE"
MAX_EPSILON = "FEDHET_MAX_EPSILON"
MAX_DELTA = "FEDHET_MAX_DELTA"  # what MAX_EPSILON refers to


def allowed_here(noise: Noise) -> Noise:
    """Return the noise of a run if the owner of this machine allows it.

    Raises:
        ConfigError: the owner demands more privacy, or the run has noise and the accountant is not
            installed.
    """
    least, most = demanded(MIN_NOISE), demanded(MAX_EPSILON)
    if least is not None and noise.multiplier < least:
        raise ConfigError(
            f"privacy.noise={noise.multiplier:g}: the owner of this machine allows no less than"
            f" {MIN_NOISE}={least:g}"
        )
    if most is not None and (noise.budget is None or noise.budget > most or not noise):
        raise ConfigError(
            f"privacy.budget={noise.budget} with privacy.noise={noise.multiplier:g}: the owner of"
            " this machine allows only runs with noise and a budget of at most"
            f" {MAX_EPSILON}={most:g}"
        )
    if most is not None and noise.delta > most_delta():
        raise ConfigError(
            f"privacy.delta={noise.delta:g}: the owner of this machine allows at most"
            f" {MAX_DELTA}={most_delta():g}, because {MAX_EPSILON} refers to this delta"
        )
    if noise:
        check.installed(f"privacy.noise={noise.multiplier:g}", "opacus", extra="privacy")
    return noise


def most_delta() -> float:
    """Return the delta for which the owner of this machine has set FEDHET_MAX_EPSILON.

    Raises:
        ConfigError: FEDHET_MAX_DELTA is not a number > 0.
    """
    given = demanded(MAX_DELTA)
    return DEFAULT_DELTA if given is None else min(given, 1.0)


def mechanism(tree: AnyTree, clip: float, std: float, draw: Draw) -> Tree:
    """Return the tree, scaled down to a norm of at most `clip`, plus noise; float64 on the CPU.

    Args:
        tree: floating tensors; the norm is taken over all of them together.
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
    """Return noise from a stream of the run's seed, for simulations only.

    Anyone who knows the seed can compute it.
    """
    generator = streams.torch_generator(seed, "privacy.noise", phase, step, pid)
    return lambda n: torch.randn(n, generator=generator, dtype=torch.float64)


def unpredictable(n: int) -> Tensor:
    """Return (n,) noise from the operating system's entropy, which no seed repeats."""
    bits = np.frombuffer(secrets.token_bytes(8 * n), dtype=np.uint64)
    # In (0, 1): with 53 bits, the largest value plus .5 would be rounded up, and give 1.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.special.ndtri(torch.from_numpy(uniform))


@dataclass
class Content:
    """The values of a reply that need noise.

    Attributes:
        change: the floating weights minus the received ones; empty if no weights are sent. Other
            weights, such as the counters of batch norm, are sent as they were received.
        extras: the floating part of every extra that has one; a single tensor is under "".
    """

    change: Tree
    extras: dict[str, Tree]

    @classmethod
    def of(cls, update: Upload, received: AnyTree, public: set[str]) -> Content:
        """Return the content of an update, without noise.

        Args:
            update: the update.
            received: the weights that the client received.
            public: names of extras, or "<extra>.<tensor>", that reveal nothing about the data
                except the number of samples.

        Raises:
            ValueError: an extra or a tensor is not public, and noise cannot cover it.
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
        """The number of releases of the mechanism: one for each kind of value."""
        return bool(self.change) + len(self.extras)

    def noised(self, noise: Noise, draw: Draw) -> Content:
        """Return the content after each kind of value was clipped and noised separately."""

        def of(what: str, tree: Tree) -> Tree:
            try:
                return mechanism(tree, noise.clip, noise.clip * noise.multiplier, draw)
            except ValueError as error:
                raise ValueError(f"privacy.noise: {what} cannot be sent: {error}") from error

        change = of("the change of the weights", self.change) if self.change else {}
        return Content(change, {name: of(name, tree) for name, tree in self.extras.items()})

    def write(self, update: Upload, received: AnyTree) -> None:
        """Replace the values of the update by this content, with their types and devices."""
        counters = _counters(received)  # counters of steps would reveal the samples that were added
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
    """Return the floating part of a value, which noise can cover; the rest must be public."""
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
    """Return the integer tensors of a model. They go back as they came, also in an extra."""
    return {name: t for name, t in received.items() if not t.is_floating_point()}


def _uncovered(what: str, value: object) -> ValueError:
    return ValueError(
        f"privacy.noise: {what!r} is {kind(value)}, which Gaussian noise cannot cover; nothing was"
        " sent. If it reveals no more than the number of samples, name it in `public`"
    )


def _valid(name: str, t: Tensor) -> Tensor:
    """Return the tensor; if it is a variance of batch norm, replace negative values by 0."""
    return t.clamp(min=0) if name.endswith(VARIANCE) else t
