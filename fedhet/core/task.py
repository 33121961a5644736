"""The learning problem as plain objects: a model, a criterion, and the clients' data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fedhet.core import objects, targets
from fedhet.core.check import counted, one_of
from fedhet.core.errors import ConfigError, DataError


@dataclass(frozen=True)
class Samples:
    """A set of n samples.

    Attributes:
        x: (n, ...) the inputs: images as uint8 (0..255) or floating point (in [0, 1]); a table
            (n, F) of floating point, or of uint8, which becomes floating point; or token numbers.
        y: (n, ...) the targets.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        x, y = objects.pair(self.x, self.y)  # numpy arrays and lists are accepted
        table = x.dtype == torch.uint8 and not objects.are_pixels(x)
        object.__setattr__(self, "x", x.float() if table else x)
        # Losses of classes take numbers of this type only.
        whole = y.ndim == 1 and not y.is_floating_point() and y.dtype != torch.bool
        object.__setattr__(self, "y", y.long() if whole else y)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def stored(self) -> Tensor:
        """(n, ...) the inputs as they are in memory."""
        return self.x

    @property
    def ready(self) -> Callable[[Tensor], Tensor] | None:
        """Makes of some of `stored` what `x` has in their place; None: they are the same."""
        return None

    def to(self, device: torch.device) -> Samples:
        """Return the samples on this device."""
        return Samples(self.x.to(device), self.y.to(device))


class Pixels(Samples):
    """Images as uint8, whose `x` is computed whenever it is read.

    Args:
        stored: (n, C, H, W) the images.
        y: (n, ...) the targets.
        ready: makes any number of images ready for the model, each by itself.
    """

    _given: tuple[Tensor, Callable[[Tensor], Tensor]]

    def __init__(self, stored: Tensor, y: Tensor, ready: Callable[[Tensor], Tensor]) -> None:
        vars(self).update(y=y, _given=(stored, ready))

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        return self.ready(self.stored)

    @property
    def stored(self) -> Tensor:
        return self._given[0]

    @property
    def ready(self) -> Callable[[Tensor], Tensor]:
        return self._given[1]


_BUILDS = (
    "expected what builds a fresh nn.Module: a class or a function without arguments, such as"
    " lambda: Net(4)"
)
# Any here is a map-style data set of any library: fedhet.core.objects.
SamplesLike = Samples | tuple[Any, Any] | Any


def _samples(value: SamplesLike, where: str, pid: int = -1) -> Samples:
    return value if isinstance(value, Samples) else Samples(*objects.read(value, where, pid))


class ClientData:
    """One client's data: a training set, and perhaps sets for validation and testing.

    Each part is a `Samples`, a pair (x, y) of tensors, NumPy arrays or lists, or a map-style data
    set whose items are pairs (x, y). It is read into tensors once: by the `Task`, or when it is
    first accessed.

    Args:
        train: the training set, the only part from which training statistics are computed.
        val: the set by which models are selected; None if missing or empty.
        test: the set that is used for reporting only; None if missing or empty.
    """

    def __init__(
        self, train: SamplesLike, val: SamplesLike | None = None, test: SamplesLike | None = None
    ) -> None:
        self._given = {"train": train, "val": val, "test": test}
        self._read: dict[str, Samples | None] = {}

    def read(self, pid: int = -1) -> None:
        """Read what is not in tensors yet.

        Args:
            pid: the client's number, for messages and for what data sets draw at random.

        Raises:
            DataError: a part cannot be read; the message names the client, the part and the sample.
        """
        where = "" if pid < 0 else f"client {pid}, "
        for part, given in list(self._given.items()):
            missing = part != "train" and (given is None or not objects.length(given))
            self._read[part] = None if missing else _samples(given, f"{where}{part}", pid)
            del self._given[part]  # the memory of a data set may be needed

    @property
    def train(self) -> Samples:
        """The training set."""
        samples = self._part("train")
        assert samples is not None
        return samples

    @property
    def val(self) -> Samples | None:
        """The validation set."""
        return self._part("val")

    @property
    def test(self) -> Samples | None:
        """The test set."""
        return self._part("test")

    def _part(self, part: str) -> Samples | None:
        if self._given:
            self.read()
        return self._read[part]


@dataclass
class Task:
    """The learning problem of a run.

    Args:
        model: builds a fresh module; FedNorm, MOON and others need its `features(x)` and `head(f)`.
        criterion: (output, y) -> per-sample losses (B,).
        clients: the data of clients 0, 1, ...: a list, or another sequence that loads a client
            whenever it is accessed.
        test: the global test set, as a part of `ClientData`, or None.
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
        detailed: whether classes are also scored by AUC, sensitivity, ...; `eval.scores` may say
            otherwise.
        example: (1, ...) an input, for a process that has no data itself; NaN for unknown values.

    Raises:
        DataError: no client has a training sample, or samples cannot be read.
        ConfigError: `target` is unknown or does not fit `classes`, `criterion` is no function, or
            `model` does not build a module without arguments.
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
    detailed: bool = False
    example: Tensor | None = None

    def __post_init__(self) -> None:
        self._check_arguments()
        if self.test is not None:
            self.test = _samples(self.test, "the global test set") or None
        if not self.sizes:
            self.sizes = [len(client.train) for client in self._clients_read()]
        elif isinstance(self.clients, list | tuple):
            sizes = [len(client.train) for client in self._clients_read()]
            if sizes != list(self.sizes):
                raise DataError(f"Task: sizes={self.sizes}, but the clients have {sizes}")
        if not any(self.sizes):
            raise DataError(
                f"of {counted(len(self.sizes), 'client')} none has a training sample; at least one"
                " must"
            )

    def _check_arguments(self) -> None:
        one_of("Task.target", self.target, targets.TARGETS)
        classes: Any = self.classes
        needed = self.target not in ("number", "loss")
        if not isinstance(classes, int) or isinstance(classes, bool) or classes < needed:
            raise ConfigError(
                f"Task: classes={classes!r} with target={self.target}: it must be their number,"
                " >= 1. Numbers are target=number; target=loss reports the loss alone, whatever the"
                " criterion compares"
            )
        if isinstance(self.criterion, type) or not callable(self.criterion):
            raise ConfigError(
                f"Task: criterion={self.criterion!r}; expected (output, y) -> losses (B,), such as"
                ' nn.CrossEntropyLoss(reduction="none")'
            )
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise ConfigError(
                f"Task: model is an object of type {type(self.model).__name__}; {_BUILDS}"
            )
        try:
            inspect.signature(self.model).bind()
        except TypeError as error:
            raise ConfigError(f"Task: model={self.model!r}: {error}; {_BUILDS}") from error

    def build(self) -> nn.Module:
        """Build a fresh module.

        Raises:
            ConfigError: `model` makes something else, or a module without its parameters.
        """
        model: Any = self.model()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"Task: model makes an object of type {type(model).__name__}; {_BUILDS}"
            )
        if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
            raise ConfigError(
                f"Task: the module {type(model).__name__} has lazy layers, whose parameters do not"
                " exist yet: call it on a few inputs in the function that builds it"
            )
        return model

    def _clients_read(self) -> Iterator[ClientData]:
        for pid, client in enumerate(self.clients):
            if not isinstance(client, ClientData):
                raise DataError(
                    f"client {pid} is of type {type(client).__name__}; expected"
                    " fedhet.ClientData(train=..., val=..., test=...)"
                )
            client.read(pid)
            yield client

    @cached_property
    def part_sizes(self) -> list[tuple[int, int, int]]:
        """The numbers of each client's training, validation and test samples.

        `clients` states them as an attribute of this name, or each client is accessed once.
        """
        known = getattr(self.clients, "part_sizes", None)
        return known or [
            (size, *(0 if part is None else len(part) for part in (client.val, client.test)))
            for size, client in zip(self.sizes, self.clients, strict=True)
        ]

    @property
    def scoring(self) -> targets.Target:
        """What is learned, as the object that scores it."""
        mean, std = self.target_scale or ((), ())
        outputs = self.classes
        if self.target == "number":
            outputs = len(mean) or self._some.y[0].numel()
        return targets.make(self.target, outputs, mean, std, detailed=self.detailed)

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

        They are the example, or those of the global test set, or else of the first client with
        training samples.
        """
        return self._some.x if self.example is None else self.example

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
        if x.isnan().all():
            raise ConfigError(
                f"{requirement}; of the sites' own tables the server does not know it, so it takes"
                " their images only"
            )
        low, high = (float(bound) for bound in x.aminmax())
        if not (low >= 0 and high <= 1):  # true for NaN, too
            raise ConfigError(
                f"{requirement}; these lie in [{low:g}, {high:g}]: scale them in your file"
            )
