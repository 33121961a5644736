"""The learning problem as plain objects: a model, a criterion, and the clients' data."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fedhet.core import objects, targets
from fedhet.core.check import MOST_SAMPLES, counted, integer, one_of
from fedhet.core.errors import ConfigError, DataError, MachineError, clean


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
        # The losses for class targets accept only int64 targets.
        whole = y.ndim == 1 and not y.is_floating_point() and y.dtype != torch.bool
        object.__setattr__(self, "y", y.long() if whole else y)

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device) -> Samples:
        """Return the samples on this device."""
        return Samples(self.x.to(device), self.y.to(device))


_MODEL_HELP = (
    "expected a class or a function without arguments that builds a fresh nn.Module, such as"
    " lambda: Net(4)"
)
# Any stands for a map-style data set of any library: fedhet.core.objects.
SamplesLike = Samples | tuple[Any, Any] | Any


def _samples(value: SamplesLike, where: str, pid: int = -1) -> Samples:
    return value if isinstance(value, Samples) else Samples(*objects.read(value, where, pid))


class ClientData:
    """One client's data: a training set, and optional sets for validation and testing.

    Each part is a `Samples`, a pair (x, y) of tensors, NumPy arrays or lists, or a map-style data
    set of pairs (x, y). It is read into tensors once: by the `Task`, or on first access.

    Args:
        train: the training set. Training statistics are computed from this part only.
        val: the set for the selection of models; None if missing or empty.
        test: the set for reported scores only; None if missing or empty.
    """

    def __init__(
        self, train: SamplesLike, val: SamplesLike | None = None, test: SamplesLike | None = None
    ) -> None:
        self._given = {"train": train, "val": val, "test": test}
        self._read: dict[str, Samples | None] = {}

    def read(self, pid: int = -1) -> None:
        """Read the parts that are not in tensors yet.

        Args:
            pid: the client's number. Messages name it, and it seeds the random transforms of data
                sets. -1 for an unknown number.

        Raises:
            DataError: a part cannot be read; the message names the client, the part and the sample.
        """
        where = "" if pid < 0 else f"client {pid}, "
        for part, given in list(self._given.items()):
            missing = part != "train" and (given is None or not objects.length(given))
            self._read[part] = None if missing else _samples(given, f"{where}{part}", pid)
            del self._given[part]  # frees the memory of a data set

    @property
    def train(self) -> Samples:
        """The training set."""
        return self._part("train")  # type: ignore[return-value]

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


PARTS = ("train", "val", "test")


class HeldClients(Sequence[ClientData]):
    """All clients of a run. This process can access a client only if it holds the client's data.

    Args:
        part_sizes: the numbers of each client's training, validation and test samples; 0 for
            unknown numbers.
        here: the data of the clients that this process holds, by client.
        stated: whether `part_sizes` has the true numbers of training samples; if not, the nodes
            report them.

    Attributes:
        sizes: the number of each client's training samples.
        known: the clients with a known number of training samples.
    """

    place: ClassVar[str] = "on its own node, not in this process"

    def __init__(
        self,
        part_sizes: Sequence[Sequence[int]],
        here: Mapping[int, Any] = MappingProxyType({}),
        stated: bool = True,
    ) -> None:
        self.part_sizes = [tuple(sizes) for sizes in part_sizes]
        self.sizes = [train for train, *_ in self.part_sizes]
        self.here = here
        self.known = set(range(len(self.sizes)) if stated else ())

    def __len__(self) -> int:
        return len(self.sizes)

    # This sequence gives one client at a time, and no slices.
    def __getitem__(self, pid: int) -> ClientData:  # type: ignore[override]
        pid = range(len(self))[operator.index(pid)]
        if pid not in self.here:
            raise DataError(f"the data of client {pid} are {self.place}")
        return self._client(pid)

    def _client(self, pid: int) -> ClientData:
        return self.here[pid]  # type: ignore[no-any-return]

    def learn(self, pid: int, report: Mapping[str, object]) -> None:
        """Take the numbers of a client's samples from the report of its node.

        Raises:
            ValueError: the report lacks these numbers, or its number of training samples differs
                from the known one.
        """
        sizes = tuple(report.get(part) for part in PARTS)
        if not all(type(n) is int and 0 <= n <= MOST_SAMPLES for n in sizes):
            said = clean(repr(dict(zip(PARTS, sizes, strict=True))), 100)
            raise ValueError(
                f"its client has {said} samples; expected whole numbers from 0 to {MOST_SAMPLES}"
            )
        if pid in self.known and sizes[0] != self.sizes[pid]:
            raise ValueError(
                f"its client reports {sizes[0]} training samples; expected the number that was"
                f" declared or reported before, {self.sizes[pid]}"
            )
        self.known.add(pid)
        self.sizes[pid], self.part_sizes[pid] = sizes[0], sizes  # type: ignore[assignment,call-overload]

    def begin(self) -> None:
        """Treat clients of unknown size as empty, so that they never take part.

        Raises:
            DataError: no client has samples.
        """
        for pid in set(range(len(self))) - self.known:
            self.sizes[pid] = 0
        _check_any(self.sizes)


def _check_any(sizes: Sequence[int]) -> None:
    if not any(sizes):
        raise DataError(
            f"none of {counted(len(sizes), 'client')} has a training sample; at least one must"
        )


def _part_sizes(client: ClientData) -> tuple[int, int, int]:
    parts = client.train, client.val, client.test
    return tuple(0 if part is None else len(part) for part in parts)  # type: ignore[return-value]


def _read(given: Any, pid: int) -> ClientData:
    if not isinstance(given, ClientData):
        raise DataError(
            f"client {pid} is of type {type(given).__name__}; expected"
            " fedhet.ClientData(train=..., val=..., test=...)"
        )
    given.read(pid)
    return given


@dataclass
class Task:
    """The learning problem of a run.

    Args:
        model: builds a fresh module; FedNorm, MOON and others need its `features(x)` and `head(f)`.
        criterion: (output, y) -> per-sample losses (B,).
        clients: the data of clients 0, 1, ...: a list, or another sequence that loads a client
            on every access. Under Flower, a process does not need all data. A node gives its own
            client as a single `ClientData`. The server gives a list with each client's number of
            training samples; or only the number of clients, and then each node reports its own
            numbers.
        test: the global test set, in one of the forms that `ClientData` takes; or None.
        classes: the number of classes, labels or characters; not used for the targets "number" and
            "loss".
        transform: x -> model input, such as normalisation; x is floating point, in [0, 1] for
            images, or token numbers.
        sizes: the number of training samples per client; counted from `clients` if not given.
        augment: (model input (B, ...), generator) -> model input, applied to training batches
            only; the generator belongs to the client and is on the CPU.
        target: the kind of target, which decides how models are scored: "class" (accuracy);
            "number" (R2, MAE); "labels", y (n, classes) of zeros and ones (F1); "next_char"
            (accuracy); or "loss" for any other kind, which reports only the loss.
        target_scale: (mean, std) of each number, for a model that predicts (y - mean) / std; None
            for a model that predicts y itself.
        detailed: whether classes are also scored by AUC, sensitivity, ...; `eval.scores` overrides
            it.
        example: (1, ...) an input, for a process without data; NaN for unknown values. Few methods
            need one.

    Raises:
        DataError: no client has a training sample, samples cannot be read, an item of `clients` is
            no `ClientData`, or `sizes` differs from the clients.
        ConfigError: `target` is unknown or does not fit `classes`, `criterion` is no function,
            `model` cannot be called without arguments, or `clients` has a wrong type.
    """

    model: Callable[[], nn.Module]
    criterion: Callable[[Tensor, Tensor], Tensor]
    clients: Sequence[ClientData] | Any
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
        if isinstance(self.clients, ClientData):
            return  # `at` gets the client's number later
        sizes = self.sizes
        if (elsewhere := self._elsewhere()) is not None:
            self.clients, sizes = elsewhere, elsewhere.sizes
        elif not sizes or isinstance(self.clients, list | tuple):
            sizes = [len(_read(client, pid).train) for pid, client in enumerate(self.clients)]
        if self.sizes and list(self.sizes) != list(sizes):
            raise DataError(f"Task: sizes={self.sizes}, but the clients have {sizes}")
        self.sizes = sizes
        _check_any(sizes)

    def _elsewhere(self) -> HeldClients | None:
        """Return the clients if only their sizes or their number are given; else None."""
        given = self.clients
        if isinstance(given, HeldClients):
            return given
        if isinstance(
            given, Integral
        ):  # until the nodes report, each client counts as one with data
            return HeldClients([(1, 0, 0)] * integer("Task.clients", given, low=1), stated=False)
        if isinstance(given, str) or not hasattr(given, "__getitem__"):
            raise ConfigError(
                f"Task: clients={given!r}; expected a list of ClientData, one ClientData, a list of"
                " training sizes, or the number of clients"
            )
        if not isinstance(given, list | tuple) or not any(isinstance(n, Integral) for n in given):
            return None
        return HeldClients([(integer("Task.clients", n, low=0), 0, 0) for n in given])

    def at(self, pid: int, clients: int) -> Task:
        """Return the task for one client's node. This node reads no other client's data.

        Args:
            pid: the client.
            clients: the number of clients in the run.

        Raises:
            ConfigError: the task has another number of clients, or not this client's data.
            DataError: the client's data cannot be read.
        """
        own = self.clients
        if not isinstance(own, ClientData):
            if len(own) != clients:
                raise ConfigError(
                    f"{clients} SuperNodes for {len(own)} clients; fedhet.flower.client_app needs"
                    " one node for each client"
                )
            if isinstance(own, HeldClients) and pid not in own.here:
                raise ConfigError(
                    "Task: clients is a number or a list of sizes; on a node, give the data of its"
                    " own client, clients=ClientData(...)"
                )
            own = own[pid]
        _read(own, pid)
        sizes = [(0, 0, 0)] * clients
        sizes[pid] = _part_sizes(own)
        task = copy(self)
        task.clients, task.test = HeldClients(sizes, {pid: own}), None
        task.sizes = task.clients.sizes
        return task

    def _check_arguments(self) -> None:
        one_of("Task.target", self.target, targets.TARGETS)
        classes: Any = self.classes
        needed = self.target not in ("number", "loss")
        if not isinstance(classes, int) or isinstance(classes, bool) or classes < needed:
            raise ConfigError(
                f"Task: classes={classes!r} with target={self.target}: expected a whole number,"
                " >= 1. For regression set target=number; for any other criterion set target=loss,"
                " which reports only the loss"
            )
        if isinstance(self.criterion, type) or not callable(self.criterion):
            raise ConfigError(
                f"Task: criterion={self.criterion!r}; expected (output, y) -> losses (B,), such as"
                ' nn.CrossEntropyLoss(reduction="none")'
            )
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise ConfigError(
                f"Task: model is an object of type {type(self.model).__name__}; {_MODEL_HELP}"
            )
        try:
            inspect.signature(self.model).bind()
        except TypeError as error:
            raise ConfigError(f"Task: model={self.model!r}: {error}; {_MODEL_HELP}") from error

    def build(self) -> nn.Module:
        """Build a fresh module.

        Raises:
            ConfigError: `model` does not return a module, or its parameters do not exist yet.
        """
        model: Any = self.model()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"Task: model makes an object of type {type(model).__name__}; {_MODEL_HELP}"
            )
        if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
            raise ConfigError(
                f"Task: the module {type(model).__name__} has lazy layers, and their parameters do"
                " not exist yet: call it on a few inputs in the function that builds it"
            )
        return model

    @cached_property
    def part_sizes(self) -> list[tuple[int, int, int]]:
        """The numbers of each client's training, validation and test samples.

        They come from the attribute `part_sizes` of `clients`. If `clients` lacks it, this function
        accesses each client once.
        """
        return getattr(self.clients, "part_sizes", None) or list(map(_part_sizes, self.clients))

    @property
    def scoring(self) -> targets.Target:
        """The target of the task, which computes losses and scores."""
        mean, std = self.target_scale or ((), ())
        outputs = self.classes
        if self.target == "number":
            outputs = len(mean) or self._some("target=number").y[0].numel()
        return targets.make(self.target, outputs, mean, std, detailed=self.detailed)

    def check_classes(self, who: str) -> None:
        """Refuse a task without classes, for a method or plug-in that needs them.

        Raises:
            ConfigError: the message begins with `who`.
        """
        if self.target not in targets.WITH_CLASSES:
            raise ConfigError(
                f"{who} needs samples with one class each, target=class or next_char; this task has"
                f" target={self.target}"
            )

    @property
    def unsized(self) -> bool:
        """Whether no client's size is known yet. The nodes report the sizes."""
        return isinstance(self.clients, HeldClients) and not self.clients.known

    @property
    def inputs(self) -> Tensor:
        """Some inputs (n, ...) as they are stored, before the transform.

        These are `example`; without it, the inputs of the global test set; without that, the
        training inputs of the first client that has samples in this process.

        Raises:
            ConfigError: this process has no inputs.
        """
        return self._some("the method").x if self.example is None else self.example

    def _some(self, who: str) -> Samples:
        if self.test:
            return self.test
        clients = self.clients
        held = clients.here if isinstance(clients, HeldClients) else range(len(self.sizes))
        if (pid := next((pid for pid in held if self.sizes[pid]), None)) is None:
            raise ConfigError(
                f"{who} needs the shape and type of a sample, and this process has no samples: give"
                " the Task a global test set, or example=<one input (1, ...) as the clients have"
                " it>; with target=number, give target_scale"
            )
        return self.clients[pid].train

    def check_density(self, plugin: str) -> None:
        """Check that `inputs` are suitable for a plug-in that models densities on [0, 1].

        Raises:
            ConfigError: the inputs are token numbers, unknown, or outside [0, 1].
        """
        x = self._some(f"plugin {plugin!r}").x if self.example is None else self.example
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
                f"{requirement}; the server cannot check tables that stay at the sites; with data"
                " at the sites, use images"
            )
        low, high = (float(bound) for bound in x.aminmax())
        if not (low >= 0 and high <= 1):  # this is true for NaN, too
            raise MachineError(
                f"{requirement}; these inputs lie in [{low:g}, {high:g}]: scale them in your file"
            )
