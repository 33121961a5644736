"""What a federation trains: a model, a criterion, and the clients' data, as plain objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedhet.errors import ConfigError, DataError


@dataclass(frozen=True)
class Samples:
    """n samples: `x` (n, ...) is uint8 (an image, 0..255), floating (in [0, 1] for images) or token
    numbers; `y` (n, ...) the targets."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        for name in ("x", "y"):  # numpy arrays and lists are welcome
            object.__setattr__(self, name, torch.as_tensor(getattr(self, name)))
        if len(self.x) != len(self.y):
            raise DataError(
                f"{len(self.x)} inputs but {len(self.y)} targets; each sample needs one of both"
            )

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device) -> Samples:
        return Samples(self.x.to(device), self.y.to(device))


Pair = Samples | tuple[Tensor, Tensor]


def _samples(value: Pair | None) -> Samples | None:
    return value if value is None or isinstance(value, Samples) else Samples(*value)


@dataclass(frozen=True)
class ClientData:
    """One client's own data. Training statistics use `train` only; `val` chooses models; `test` is
    only reported.

    Each part is a `Samples` or a pair (x, y); a missing or empty part is None.
    """

    train: Samples
    val: Samples | None = None
    test: Samples | None = None

    def __post_init__(self) -> None:
        for part in ("train", "val", "test"):
            object.__setattr__(self, part, _samples(getattr(self, part)))


@dataclass
class Task:
    """Everything that a run trains on.

    Args: model: builds a fresh module; `features(x)` and `head(f)` on it are what FedNorm, MOON and
        others need. criterion: (output, y) -> per-sample losses (B,). clients: the data of client
        0, 1, ...; may load lazily. test: the global test set, a `Samples` or a pair (x, y), or
        None. classes: number of classes; 0 where the targets are not classes (no accuracy is then
        reported). transform: x -> model input, such as normalisation; x is floating, images in [0,
        1], or token numbers. sizes: training samples per client; counted from `clients` where not
        given. augment: (model input (B, ...), generator) -> model input, for what is trained on
        only; the generator is the client's own, on the CPU.
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
                f"none of the {len(self.sizes)} clients has a training sample; at least one must"
            )

    @property
    def inputs(self) -> Tensor:
        """Some inputs (n, ...) as they are kept: those of the global test set, else of the first
        client that has any."""
        return (
            self.test or next(self.clients[pid].train for pid, n in enumerate(self.sizes) if n)
        ).x

    def check_density(self, piece: str) -> None:
        """For pieces that model the density of inputs in [0, 1]: ConfigError where `inputs` are
        token numbers, or lie elsewhere."""
        x = self.inputs
        if x.dtype == torch.uint8:
            return
        needs = (
            f"plugin {piece!r} models the density of inputs in [0, 1], pixels or a table's columns"
        )
        if not x.is_floating_point():
            raise ConfigError(
                f"{needs}; these are token numbers (a text), whose order means nothing"
            )
        low, high = (float(bound) for bound in x.aminmax())
        if not (low >= 0 and high <= 1):  # also where they are NaN
            raise ConfigError(f"{needs}; these lie in [{low:g}, {high:g}]: scale them in your file")
