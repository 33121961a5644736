"""What the clients of one process share: the task, the device, one model, and the data that stay on
the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedhet import streams
from fedhet.errors import ConfigError
from fedhet.functional import Compiled
from fedhet.task import Samples, Task
from fedhet.trees import AnyTree, Tree

if TYPE_CHECKING:
    from collections.abc import Iterator

# prepared data that stay on the device; the least recently used client leaves first
CACHE_BYTES = 2**30


@dataclass(frozen=True)
class Speed:
    """How the local steps are computed (conf/engine/*.yaml); each changes the last bits, so the
    defaults are off.

    compile: the gradient of the batch loss by torch.compile. amp: forward passes in bfloat16 where
    torch.autocast allows. channels_last: images and convolutions in NHWC."""

    compile: bool = False
    amp: bool = False
    channels_last: bool = False


@dataclass(frozen=True)
class Scope:
    """Which names a client trains, and which it shares.

    Trained and not shared: kept by the client. Shared: averaged by the server. Neither: the common
    initial value, never sent."""

    trained: Callable[[str], bool] = lambda name: True
    shared: Callable[[str], bool] = lambda name: True


class Site:
    """One per process. The model is one object whose tensors are overwritten; clients of a process
    run one at a time.

    `simulated`: all clients are known to be processes of this machine or cluster; under `flwr run`
    they may be real ones."""

    def __init__(
        self,
        task: Task,
        *,
        device: torch.device,
        seed: int,
        buffers: str = "average",
        scope: Callable[[nn.Module], Scope] = lambda model: Scope(),
        simulated: bool = True,
        speed: Speed = Speed(),
    ) -> None:
        self.task, self.device, self.seed, self.simulated, self.speed = (
            task,
            device,
            seed,
            simulated,
            speed,
        )
        with self.seeded("init"):
            self.model = task.model().to(device)
        if speed.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        rules = scope(self.model)
        state = self.model.state_dict(keep_vars=True)
        parameters = dict(self.model.named_parameters())
        if tied := [
            name
            for name, t in state.items()
            if isinstance(t, nn.Parameter) and name not in parameters
        ]:
            raise ConfigError(
                f"the model {type(self.model).__name__} has {tied[0]!r} tied to another parameter:"
                " each would be averaged by itself; give it one name"
            )
        self.trained = [n for n, p in parameters.items() if p.requires_grad and rules.trained(n)]
        averaged = [n for n in state if n not in parameters and buffers == "average"]
        self.shared = [n for n in state if (n in self.trained or n in averaged) and rules.shared(n)]
        kept = [
            n for n in state if n in self.trained or (n not in parameters and buffers != "frozen")
        ]
        self.kept = [n for n in kept if n not in self.shared]
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in self.trained)
        self.frozen_norms = buffers == "frozen"
        self.initial: Tree = {name: _copy(t) for name, t in state.items()}
        self._state = state
        self._frozen: dict[str, nn.Module] = {}
        self._data: OrderedDict[int, Samples] = OrderedDict()
        self._bytes = 0
        if not self.trained:
            raise ConfigError(f"the model {type(self.model).__name__} has no parameter to train")

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order of `trained`."""
        return [self._state[name] for name in self.trained]  # type: ignore[misc]

    @contextmanager
    def seeded(self, purpose: str, phase: str = "", step: int = 0, pid: int = -1) -> Iterator[None]:
        """Global random draws (initialisation, dropout) come from this stream; the caller's own
        state is put back."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            seed = streams.integer(self.seed, purpose, phase, step, pid)
            # torch.manual_seed visits every backend: 0.2 ms for each message
            torch.default_generator.manual_seed(seed)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(seed)
            yield

    @torch.no_grad()
    def load(self, tree: AnyTree) -> nn.Module:
        """The model with these values; names that the tree lacks keep what they have."""
        if unknown := [name for name in tree if name not in self._state]:
            raise ValueError(
                f"the weights name {unknown[:3]}, which this model does not have; it has"
                f" {list(self._state)[:3]} ..."
            )
        for name in tree:
            if tree[name].shape != self._state[name].shape:
                raise ValueError(
                    f"weights {name!r} have shape {tuple(tree[name].shape)}, this model"
                    f" {tuple(self._state[name].shape)}"
                )
        torch._foreach_copy_([self._state[name] for name in tree], list(tree.values()))
        return self.model

    @torch.no_grad()
    def frozen(self, key: str, tree: AnyTree) -> nn.Module:
        """A further module like the model, with these values and else the initial ones, in eval
        mode and without gradients: a teacher.

        There is one object for each key, which the next call overwrites.
        """
        if key not in self._frozen:
            self._frozen[key] = deepcopy(self.model).requires_grad_(False)
        module = self._frozen[key].eval()
        state = module.state_dict()
        values = {**self.initial, **tree}
        torch._foreach_copy_(list(state.values()), [values[name] for name in state])
        return module

    def read(self, names: list[str]) -> Tree:
        """Copies of the model's tensors of these names."""
        return {name: _copy(self._state[name]) for name in names}

    # ---- the local steps
    def autocast(self) -> AbstractContextManager[object]:
        """In which training's forward passes run."""
        return (
            torch.autocast(self.device.type, dtype=torch.bfloat16)
            if self.speed.amp
            else nullcontext()
        )

    @cached_property
    def compiled(self) -> Compiled:
        return Compiled(self)

    # ---- data
    def floating(self, samples: Samples) -> Samples:
        """On the device, images in [0, 1]."""
        samples = samples.to(self.device)
        return (
            Samples(samples.x.float().div_(255), samples.y)
            if samples.x.dtype == torch.uint8
            else samples
        )

    def transformed(self, x: Tensor) -> Tensor:
        return self._laid_out(x if self.task.transform is None else self.task.transform(x))

    def gathered(self, x: Tensor, index: Tensor) -> Tensor:
        """`x[index]`, in a third of the time."""
        return self._laid_out(x.index_select(0, index))

    def augmented(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Training inputs as the task's augmentation changes them."""
        return x if self.task.augment is None else self._laid_out(self.task.augment(x, generator))

    def _laid_out(self, x: Tensor) -> Tensor:
        return (
            x.contiguous(memory_format=torch.channels_last)
            if self.speed.channels_last and x.ndim == 4
            else x
        )

    def prepared(self, samples: Samples) -> Samples:
        """On the device and ready for the model."""
        in_place = getattr(self.task.transform, "in_place", None)
        if in_place is None or samples.x.dtype != torch.uint8:
            samples = self.floating(samples)
            return Samples(self.transformed(samples.x), samples.y)
        samples = self.floating(samples)  # a tensor that nobody else has
        return Samples(self._laid_out(in_place(samples.x)), samples.y)

    def train_data(self, pid: int) -> Samples:
        """Client pid's training set, prepared; it stays on the device as long as CACHE_BYTES
        lasts."""
        if pid not in self._data:
            data = self.prepared(self.task.clients[pid].train)
            self._bytes += data.x.nbytes
            self._data[pid] = data
            while self._bytes > CACHE_BYTES and len(self._data) > 1:
                self._bytes -= self._data.popitem(last=False)[1].x.nbytes
        self._data.move_to_end(pid)
        return self._data[pid]


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format)
