"""The objects that the clients of one process share: task, device, model and prepared data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.core import streams
from fedhet.core.client import functional
from fedhet.core.client.descent import Batcher
from fedhet.core.errors import ConfigError
from fedhet.core.groups import OFF, Evaluation, Noise, Speed
from fedhet.core.limits import UNLIMITED, Limits
from fedhet.core.objects import are_pixels
from fedhet.core.task import Samples, Task
from fedhet.core.trees import AnyTree, Tree

# The largest size, in bytes, of the prepared inputs that stay on the device. Above it, the data of
# the least recently used clients are dropped.
CACHE_BYTES = 2**30


@dataclass(frozen=True)
class Scope:
    """Which parameters a client trains, and which parameters and buffers it shares, by name.

    The server averages shared tensors. The client keeps the other tensors that change during its
    training. All tensors that never change have the common initial values, and are never sent. The
    run's setting `buffers` decides which buffers change and which of them may be shared. `why`
    begins the error message if nothing is trained.
    """

    trained: Callable[[str], bool] = lambda name: True
    shared: Callable[[str], bool] = lambda name: True
    why: str = "clients train the parameters of the model"


class Workspace:
    """The task, the model and the data of all clients in one process.

    There is one model object; each client in turn loads its own tensors into the model.

    Args:
        task: the learning problem.
        device: the device for training and evaluation.
        seed: the run's seed.
        buffers: "average" shares buffers (batch statistics), "local" keeps them with the client,
            "frozen" keeps the initial ones.
        scope: (model) -> the names that the method's clients train and share.
        simulated: whether it is certain that all clients run on this machine or cluster. Under
            `flwr run`, clients may be real.
        noise: the noise on the clients' replies.
        release: (client, update, public names) -> None. It clips and noises the update, and counts
            its releases in the privacy account. Without this function, noise is refused.
        min_count: a client sends no statistic of fewer samples than this.
        limits: what the node of this process allows; a run cannot change it.
        evaluation: when and what the run evaluates.
        speed: how local steps are computed.

    Attributes:
        model: the model.
        initial: a copy of its initial state, the same in every process of the run.
        trainable: the names of the parameters that the model has not frozen.
        trained: the names of the parameters that the clients train.
        shared: the names of the tensors that travel, in state-dict order.
        mergeable: the names in both `trained` and `shared`; merges, plug-ins and server optimisers
            see these tensors.
        variances: the names of batch norm's running variances, which are >= 0.
        kept: the names of the tensors that a client keeps for itself.
        batcher: carries out the gradient steps and forward passes of several clients in one batch;
            None: each client computes alone.
        local_statistics: whether there is no global model. This is so under buffers="local" if the
            model has floating-point buffers that clients would otherwise share.
        frozen_norms: whether batch norm runs in eval mode during training.

    Raises:
        ConfigError: nothing is trained, two names share one parameter, or there is noise without
            `release`.
    """

    batcher: Batcher | None = None

    def __init__(
        self,
        task: Task,
        *,
        device: torch.device,
        seed: int,
        buffers: str = "average",
        scope: Callable[[nn.Module], Scope] = lambda model: Scope(),
        simulated: bool = True,
        noise: Noise = OFF,
        release: Callable[..., None] | None = None,
        min_count: int = 0,
        limits: Limits = UNLIMITED,
        evaluation: Evaluation = Evaluation(),
        speed: Speed = Speed(),
    ) -> None:
        self.task = task
        if evaluation.scores != "auto":
            self.task = copy(task)
            self.task.detailed = evaluation.scores == "all"
        self.device = device
        self.seed = seed
        self.simulated = simulated
        self.noise = noise
        if release is not None:
            self.release = release
        elif noise:
            raise ConfigError(
                f"privacy.noise={noise.multiplier:g} needs an account of the noise: pass"
                " release=fedhet.runs.privacy.account.release to the workspace"
            )
        self.min_count = min_count
        self.limits = limits
        self.evaluation = evaluation
        self.speed = speed
        self.frozen_norms = buffers == "frozen"
        with self.seeded("init"):
            self.model = task.build().to(device)
        if speed.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._state = self.model.state_dict(keep_vars=True)
        self.initial: Tree = self.read(list(self._state))
        self._set_scope(scope(self.model), buffers)
        self._data: OrderedDict[int, dict[str, Samples | None]] = OrderedDict()  # by client
        self._cached_bytes = 0

    def _set_scope(self, scope: Scope, buffers: str) -> None:
        parameters = dict(self.model.named_parameters())
        model = type(self.model).__name__
        for name, t in self._state.items():
            if isinstance(t, nn.Parameter) and name not in parameters:
                raise ConfigError(
                    f"the model {model} has {name!r} tied to another parameter, and the server"
                    " would average each of them separately; give the parameter one name"
                )
        self.trainable = [name for name, p in parameters.items() if p.requires_grad]
        self.require(scope.trained, scope.why)
        self.trained = [name for name in self.trainable if scope.trained(name)]
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in self.trained)
        own_buffers = [name for name in self._state if name not in parameters]
        averaged = {*self.trained, *(own_buffers if buffers == "average" else ())}
        changing = {*self.trained, *(own_buffers if buffers != "frozen" else ())}
        self.shared = [name for name in self._state if name in averaged and scope.shared(name)]
        self.kept = [name for name in self._state if name in changing and name not in self.shared]
        self.variances = [
            f"{name}.running_var".lstrip(".")
            for name, module in self.model.named_modules()
            if isinstance(module, _BatchNorm) and module.running_var is not None
        ]
        self.mergeable = [name for name in self.trained if name in self.shared]
        # Buffers that the scope never shares (FedBN) do not count: the method handles them.
        self.local_statistics = buffers == "local" and any(
            self._state[name].is_floating_point() for name in own_buffers if scope.shared(name)
        )

    def require(self, part: Callable[[str], bool], why: str) -> None:
        """Refuse the model if a separately trained part of it has no trainable parameters.

        Args:
            part: (name) -> whether the parameter belongs to the part.
            why: the beginning of the message: who trains the part, and which part it is.

        Raises:
            ConfigError: the part has no parameters, or all of them are frozen.
        """
        if not any(map(part, self.trainable)):
            frozen = any(part(name) for name, _ in self.model.named_parameters())
            found = "all of them are frozen (requires_grad=False)" if frozen else "there are none"
            raise ConfigError(
                f"{why}, and {found}: the model {type(self.model).__name__} has no parameter to"
                " train"
            )

    def clone(self, batcher: Batcher) -> Workspace:
        """Return a copy with its own model, for a client that trains in one batch with others."""
        other = copy(self)
        other.model = deepcopy(self.model)
        other._state = other.model.state_dict(keep_vars=True)
        other.batcher = batcher
        for name in ("teacher", "compiled"):
            vars(other).pop(name, None)
        return other

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order of `trained`."""
        return [self._state[name] for name in self.trained]  # type: ignore[misc]

    @contextmanager
    def seeded(self, purpose: str, phase: str = "", step: int = 0, pid: int = -1) -> Iterator[None]:
        """Inside the block, take torch's global random draws from the named stream.

        These are the draws of initialisation and dropout. The caller's own random state is restored
        at the end of the block.
        """
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            seed = streams.integer(self.seed, purpose, phase, step, pid)
            # torch.manual_seed visits every backend, which takes 0.2 ms for each message.
            torch.default_generator.manual_seed(seed)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(seed)
            yield

    @torch.no_grad()
    def load(self, tree: AnyTree) -> nn.Module:
        """Load these values into the model, and return the model.

        Tensors that the tree lacks keep their values.

        Raises:
            ValueError: the tree has a name or a shape that the model does not have.
        """
        if unknown := [name for name in tree if name not in self._state]:
            raise ValueError(
                f"the weights name {unknown[:3]}, which this model does not have; it has"
                f" {list(self._state)[:3]} ..."
            )
        for name in tree:
            if tree[name].shape != self._state[name].shape:
                raise ValueError(
                    f"weights {name!r} have shape {tuple(tree[name].shape)}, but this model needs"
                    f" {tuple(self._state[name].shape)}"
                )
        torch._foreach_copy_([self._state[name] for name in tree], list(tree.values()))
        return self.model

    @torch.no_grad()
    def completed(self, tree: AnyTree) -> Tree:
        """Return copies of these values; for all other tensors, copies of the initial values.

        The copies have the model's memory layout, for `teacher`.
        """
        values = {**self.initial, **tree}
        state = {name: torch.empty_like(t) for name, t in self._state.items()}
        torch._foreach_copy_(list(state.values()), [values[name] for name in state])
        return state

    @cached_property
    def teacher(self) -> functional.Frozen:
        """The model in eval mode as a function of its tensors, for use without gradients."""
        return functional.Frozen(deepcopy(self.model))

    def read(self, names: list[str]) -> Tree:
        """Return copies of the model's tensors with these names."""
        return {
            name: self._state[name].detach().clone(memory_format=torch.contiguous_format)
            for name in names
        }

    # ---- the local steps
    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which training runs its forward passes."""
        if self.speed.amp:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    @cached_property
    def compiled(self) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, list[Tensor]]]:
        """The gradient of the batch loss as a function compiled by torch.compile."""
        return functional.compiled(self)

    # ---- data
    def floating(self, samples: Samples) -> Samples:
        """Return the samples on the device, with images in [0, 1]."""
        samples = samples.to(self.device)
        x = samples.x.float().div_(255) if are_pixels(samples.x) else self._typed(samples.x)
        return Samples(x, samples.y)

    def transformed(self, x: Tensor) -> Tensor:
        """Return the inputs after the task's transform, ready for the model."""
        x = x if self.task.transform is None else self.task.transform(x)
        return self._laid_out(self._typed(x))

    def augmented(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return training inputs after the task's augmentation."""
        return self._laid_out(x if self.task.augment is None else self.task.augment(x, generator))

    def _typed(self, x: Tensor) -> Tensor:
        """Return float64 inputs in the model's type, and other inputs unchanged."""
        return x.to(self.parameters[0].dtype) if x.dtype == torch.float64 else x

    def _laid_out(self, x: Tensor) -> Tensor:
        if self.speed.channels_last and x.ndim == 4:
            return x.contiguous(memory_format=torch.channels_last)
        return x

    def prepared(self, samples: Samples) -> Samples:
        """Return the samples on the device, ready for the model."""
        samples = samples.to(self.device)
        x = samples.x.float().div_(255) if are_pixels(samples.x) else samples.x
        in_place = getattr(self.task.transform, "in_place", None)
        if in_place is None or x is samples.x:
            return Samples(self.transformed(x), samples.y)
        return Samples(self._laid_out(in_place(x)), samples.y)

    def parts(self, pid: int, *names: str) -> dict[str, Samples]:
        """Return the named sets (`train`, `val`, `test`) of client `pid`, ready for the model.

        A set that the client lacks is left out. The sets are cached. If the inputs in the cache
        exceed CACHE_BYTES, the least recently used clients are dropped.
        """
        known = self._data.setdefault(pid, {})
        self._data.move_to_end(pid)
        if missing := [name for name in names if name not in known]:
            own = self.task.clients[pid]
            for name in missing:
                samples = getattr(own, name)
                known[name] = None if samples is None else self.prepared(samples)
                self._cached_bytes += _nbytes(known[name])
            while self._cached_bytes > CACHE_BYTES and len(self._data) > 1:
                _, dropped = self._data.popitem(last=False)
                self._cached_bytes -= sum(map(_nbytes, dropped.values()))
        return {name: part for name in names if (part := known[name]) is not None}

    def unit(self, pid: int) -> Samples:
        """Return the training set of client `pid` with inputs in [0, 1], not normalised.

        Raises:
            ValueError: an input is outside [0, 1].
        """
        data = self.floating(self.task.clients[pid].train)
        if not ((data.x >= 0) & (data.x <= 1)).all():  # this is true for NaN, too
            raise ValueError(
                f"client {pid} has inputs outside [0, 1]; densities are modelled on [0, 1] only"
            )
        return data

    def train_data(self, pid: int) -> Samples:
        """Return the training set of client `pid`, ready for the model."""
        return self.parts(pid, "train")["train"]

    @cached_property
    def test_data(self) -> Samples | None:
        """The global test set, ready for the model; None if the task has none."""
        return None if self.task.test is None else self.prepared(self.task.test)


def _nbytes(samples: Samples | None) -> int:
    return 0 if samples is None else samples.x.nbytes
