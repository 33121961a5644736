"""The device's tensors, and the device as torch knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_unflatten

from pretend_device.copies import count
from pretend_device.rules import DEVICE, check, each, leaves, operation, place, refusal

# torch computes these on an accelerator by kernels that the CPU does not have.
RECURRENT = {
    torch.gru,
    torch.gru_cell,
    torch.lstm,
    torch.lstm_cell,
    torch.rnn_relu,
    torch.rnn_tanh,
}


class PretendTensor(Tensor):
    """A tensor on the device; `raw` has its data, on the CPU."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False) -> PretendTensor:
        made: PretendTensor = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return compute(op, *args, **kwargs or {})

    def __repr__(self, **how: Any) -> str:
        return f"{self.raw!r} on {DEVICE}"

    # With these two, Module.to keeps a parameter's identity, as it does for CUDA.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *about: Any) -> PretendTensor:
        return PretendTensor(inner["raw"])

    # ---- what torch does without its dispatcher
    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"numpy() cannot read {DEVICE}; use .cpu() first: {place()}")
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, **{"device": self.device, **how})

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_as_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_as_tensors(index), value)

    def __format__(self, how: str) -> str:
        return format(repr(self) if self.dim() else self.item(), how)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.raw.detach(), self.requires_grad, hasattr(self, "_is_param"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        rebuild, (raw, *about) = self.__reduce_ex__(None)
        return memo.setdefault(id(self), rebuild(raw.clone(), *about))


def _as_tensors(index: Any) -> Any:
    """An index in which lists are tensors."""
    if isinstance(index, tuple):
        return tuple(map(_as_tensors, index))
    return torch.tensor(index) if isinstance(index, list) else index


def _rebuilt(raw: Tensor, requires_grad: bool, parameter: bool) -> Tensor:
    made = PretendTensor(raw, requires_grad)
    return torch.nn.Parameter(made, requires_grad) if parameter else made


def _on_device(t: Any) -> bool:
    return isinstance(t, PretendTensor)


def _raw(t: Tensor) -> Tensor:
    return t.raw if isinstance(t, PretendTensor) else t


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What an operation gives on the device."""
    about = operation(op)
    check(about, args, kwargs, _on_device)
    count(about.name, args, kwargs, _on_device)
    raw_args, raw_kwargs = each((args, kwargs), _raw)
    device = kwargs.get("device")
    if device is not None:
        raw_kwargs["device"] = torch.device("cpu")
    result = op(*raw_args, **raw_kwargs)
    given: dict[int, Tensor] = {}
    if about.written:  # what is changed in place is returned as the object that it was
        given = {id(_raw(t)): t for t in leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in given.values():
            if isinstance(t, PretendTensor) and t.raw.shape != t.shape:  # `out` was resized
                t.data = PretendTensor(t.raw)
    to_cpu = device is not None and torch.device(device).type == "cpu"
    wrap = (lambda t: t) if to_cpu else PretendTensor
    return each(result, lambda t: given[id(t)] if id(t) in given else wrap(t))


# ---- the device
class _PythonInterface(TorchFunctionMode):
    """Functions that call no dispatcher, or a kernel that only CUDA has."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device"):
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if function in RECURRENT:
            inputs, structure = tree_flatten((args, kwargs))
            if any(map(_on_device, inputs)):
                outputs = _ByCPU.apply(function, structure, *inputs)
                return outputs if len(outputs) > 1 else outputs[0]
        return function(*args, **kwargs)


class _ByCPU(torch.autograd.Function):
    """A function of tensors on the device, and its derivative, by the CPU's kernels."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], structure: Any, *inputs: Any) -> Any:
        for t in inputs:
            if isinstance(t, Tensor) and not _on_device(t):
                raise RuntimeError(refusal(function.__name__, t))
        ctx.inputs = [
            t.raw.detach().requires_grad_(t.requires_grad) if _on_device(t) else t for t in inputs
        ]
        args, kwargs = tree_unflatten(ctx.inputs, structure)
        with torch.enable_grad():
            outputs = function(*args, **kwargs)
        ctx.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(PretendTensor(t.detach()) for t in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wanted = [isinstance(t, Tensor) and t.requires_grad for t in ctx.inputs]
        inputs = [t for t, needed in zip(ctx.inputs, wanted, strict=True) if needed]
        derivatives = iter(torch.autograd.grad(ctx.outputs, inputs, list(map(_raw, grads))))
        return None, None, *(PretendTensor(next(derivatives)) if n else None for n in wanted)


class _Module(backend_registration._DummyBackendModule):
    """What torch.cuda is for CUDA; random draws come from the CPU's stream."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


@cache
def _registered() -> torch.library.Library:
    """Make the device known to torch, once in a process; it cannot be taken back."""
    # Autograd counts the devices when it is first used, and starts a thread for each. Such a
    # process cannot be forked, so the device must come later.
    torch.ones((), requires_grad=True).backward()
    backend_registration._setup_privateuseone_for_python_backend(
        DEVICE.partition(":")[0], backend_module=_Module()
    )
    library = torch.library.Library("_", "IMPL")
    library.fallback(compute, "PrivateUse1")
    return library


@contextmanager
def pretend_device() -> Iterator[torch.device]:
    """The device, which can be used inside the block; as "cuda", it has no index."""
    _registered()
    # In this thread, autograd needs no thread of the device, and an error has its Python line.
    with torch.autograd.set_multithreading_enabled(False), _PythonInterface():
        yield torch.device(DEVICE.partition(":")[0])
