"""The learning problem as plain objects: a model, a criterion, and the clients' data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedhet import targets
from fedhet.check import one_of
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
        classes: the number of classes, labels or characters that `target` is about; not used for
            "number" and "loss".
        transform: x -> model input, such as normalisation; x is floating point, in [0, 1] for
            images, or token numbers.
        sizes: the number of training samples per client; counted from `clients` if not given.
        augment: (model input (B, ...), generator) -> model input, applied to training batches
            only; the generator is the client's own and on the CPU.
        target: what is learned, which says how models are scored: "class" (accuracy); "number"
            (R2, MAE); "labels", y (n, classes) of zeros and ones (F1); "next_char" (accuracy); or
            "loss" for targets of another kind, of which the loss alone is reported.
        target_scale: (mean, std) of each number, for a model that predicts (y - mean) / std; None
            for one that predicts y itself.

    Raises:
        ConfigError: `target` is unknown, or does not fit `classes`.
        DataError: no client has a training sample.
    """

    model: Callable[[], nn.Module]
    criterion: Callable[[Tensor, Tensor], Tensor]
    clients: Sequence[ClientData]
    test: Samples | None
    classes: int = 0
    transform: Callable[[Tensor], Tensor] | None = None
    sizes: list[int] = field(default_factory=list)
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    target: str = "class"
    target_scale: tuple[Sequence[float], Sequence[float]] | None = None

    def __post_init__(self) -> None:
        self._check_target()
        self.test = _samples(self.test)
        if not self.sizes:
            self.sizes = [len(client.train) for client in self.clients]
        if not any(self.sizes):
            raise DataError(
                f"none of the {len(self.sizes)} clients has a training sample; at least one must"
            )

    def _check_target(self) -> None:
        one_of("Task.target", self.target, targets.TARGETS)
        counted = self.target not in ("number", "loss")
        if counted and self.classes < 1:
            raise ConfigError(
                f"Task.classes={self.classes} with target={self.target}: it must be their number,"
                " >= 1. Numbers are target=number; target=loss reports the loss alone, whatever the"
                " criterion compares"
            )

    @property
    def scoring(self) -> targets.Target:
        """What is learned, as the object that scores it."""
        mean, std = self.target_scale or ((), ())
        outputs = self.classes
        if self.target == "number":
            outputs = len(mean) or self._some.y[0].numel()
        return targets.make(self.target, outputs, mean, std)

    def check_classes(self, who: str) -> None:
        """Refuse a task without classes, for a method or plug-in that needs them.

        Raises:
            ConfigError: the message begins with `who`.
        """
        if self.target not in targets.WITH_CLASSES:
            raise ConfigError(
                f"{who} needs samples that have one class each, target=class or next_char; this"
                f" task has target={self.target}"
            )

    @property
    def inputs(self) -> Tensor:
        """Some inputs (n, ...) as they are stored, before the transform.

        They are those of the global test set, or else of the first client with training samples.
        """
        return self._some.x

    @property
    def _some(self) -> Samples:
        if self.test:
            return self.test
        return next(self.clients[pid].train for pid, size in enumerate(self.sizes) if size)

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
