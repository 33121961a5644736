"""The learning problem as plain objects: a model, a criterion, and the clients' data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedhet.check import counted
from fedhet.errors import ConfigError, DataError


@dataclass(frozen=True)
class Samples:
    """A set of n samples.

    Attributes:
        x: (n, ...) the inputs: uint8 for images (0..255), floating point (in [0, 1] for images),
            or token numbers.
        y: (n, ...) the targets.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        for name in ("x", "y"):  # numpy arrays and lists are accepted
            object.__setattr__(self, name, torch.as_tensor(getattr(self, name)))
        if len(self.x) != len(self.y):
            raise DataError(
                f"{len(self.x)} inputs but {len(self.y)} targets; each sample needs both"
            )

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device) -> Samples:
        """Return the samples on this device."""
        return Samples(self.x.to(device), self.y.to(device))


SamplesLike = Samples | tuple[Tensor, Tensor]


def _samples(value: SamplesLike | None) -> Samples | None:
    return value if value is None or isinstance(value, Samples) else Samples(*value)


@dataclass(frozen=True)
class ClientData:
    """One client's data, each part a `Samples` or a pair (x, y).

    Attributes:
        train: the training set, the only part from which training statistics are computed.
        val: the set by which models are selected; None if missing or empty.
        test: the set that is used for reporting only; None if missing or empty.
    """

    train: Samples
    val: Samples | None = None
    test: Samples | None = None

    def __post_init__(self) -> None:
        for part in ("train", "val", "test"):
            object.__setattr__(self, part, _samples(getattr(self, part)))


@dataclass
class Task:
    """The learning problem of a run.

    Args:
        model: builds a fresh module; FedNorm, MOON and others need its `features(x)` and `head(f)`.
        criterion: (output, y) -> per-sample losses (B,).
        clients: the data of clients 0, 1, ...; they may be loaded lazily.
        test: the global test set, a `Samples` or a pair (x, y), or None.
        classes: the number of classes; 0 if the targets are not classes, in which case no accuracy
            is reported.
        transform: x -> model input, such as normalisation; x is floating point, in [0, 1] for
            images, or token numbers.
        sizes: the number of training samples per client; counted from `clients` if not given.
        augment: (model input (B, ...), generator) -> model input, applied to training batches
            only; the generator is the client's own and on the CPU.

    Raises:
        DataError: no client has a training sample.
    """

    model: Callable[[], nn.Module]
    criterion: Callable[[Tensor, Tensor], Tensor]
    clients: Sequence[ClientData]
    test: Samples | None
    classes: int
    transform: Callable[[Tensor], Tensor] | None = None
    sizes: list[int] = field(default_factory=list)
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None

    def __post_init__(self) -> None:
        self.test = _samples(self.test)
        if not self.sizes:
            self.sizes = [len(client.train) for client in self.clients]
        if not any(self.sizes):
            raise DataError(
                f"of {counted(len(self.sizes), 'client')} none has a training sample; at least one"
                " must"
            )

    @property
    def inputs(self) -> Tensor:
        """Some inputs (n, ...) as they are stored, before the transform.

        They are those of the global test set, or else of the first client with training samples.
        """
        if self.test:
            return self.test.x
        return next(self.clients[pid].train for pid, size in enumerate(self.sizes) if size).x

    def check_density(self, plugin: str) -> None:
        """Check that `inputs` are suitable for a plug-in that models densities on [0, 1].

        Raises:
            ConfigError: they are token numbers, or outside [0, 1].
        """
        x = self.inputs
        if x.dtype == torch.uint8:
            return
        requirement = (
            f"plugin {plugin!r} models the density of inputs in [0, 1], pixels or a table's columns"
        )
        if not x.is_floating_point():
            raise ConfigError(
                f"{requirement}; these are token numbers (a text), whose order has no meaning"
            )
        low, high = (float(bound) for bound in x.aminmax())
        if not (low >= 0 and high <= 1):  # true for NaN, too
            raise ConfigError(
                f"{requirement}; these lie in [{low:g}, {high:g}]: scale them in your file"
            )
