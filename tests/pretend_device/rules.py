"""Which tensors an operation on the device may read, as CUDA's operations do.

Most operations compare the devices of all their tensors before they call the kernel. torch's own
table of operators says which do not. Those are of three kinds: copies; indexing, whose indices may
lie on the CPU; and arithmetic, which takes one number of the CPU, a tensor without dimensions.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchgen
from torch import Tensor

import fedhet

DEVICE = "pretend:0"
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
INDEXING = {"index.Tensor", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
# These do not appear in the table as comparing devices; their kernels on CUDA do it.
STRICT = {"_foreach_add.Tensor", "_foreach_add_.Tensor"}

PACKAGE = Path(fedhet.__file__).parent
ROOT = PACKAGE.parent
# Files with no line that an author would look for.
FOREIGN = (
    "<",
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


class Operation(NamedTuple):
    """An operation of torch.

    Attributes:
        name: its name in torch's table, such as "add.Tensor".
        takes_numbers: whether a tensor of the CPU without dimensions may be read.
        written: the names and positions of the arguments that it changes.
    """

    name: str
    takes_numbers: bool
    written: tuple[tuple[str, int], ...]


@cache
def operation(op: Any) -> Operation:
    """What matters here about an operation, an OpOverload of torch."""
    overload = op._overloadname
    name = op._schema.name.removeprefix("aten::")
    name = name if overload == "default" else f"{name}.{overload}"
    written = tuple(
        (argument.name, position)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return Operation(name, name in unchecked() - STRICT, written)


@cache
def unchecked() -> frozenset[str]:
    """The operations whose tensors torch does not compare before it calls the kernel."""
    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = table.read_text(encoding="utf-8").split("\n- func: ")[1:]
    return frozenset(e.partition("(")[0] for e in entries if "\n  device_check: NoCheck" in e)


def check(
    about: Operation, args: Sequence[Any], kwargs: dict[str, Any], on_device: Callable[[Any], bool]
) -> None:
    """Raise what CUDA would raise; a tensor among the arguments, or the result, is on the device.

    Args:
        about: the operation.
        args: its positional arguments.
        kwargs: the others.
        on_device: whether a tensor is on the device.

    Raises:
        RuntimeError: the operation cannot work on these devices. The message names the operation,
            the devices and the line.
    """
    found = leaves((args, kwargs))
    for leaf in found:
        if isinstance(leaf, torch.Generator):
            raise RuntimeError(
                f"{about.name} on {DEVICE} needs a generator of this device, but one is on"
                f" {leaf.device}: {place()}"
            )
    others = [t for t in found if isinstance(t, Tensor) and not on_device(t)]
    if not others or about.name in COPIES:
        return
    if about.name in INDEXING and on_device(args[0]):
        indices = {id(t) for t in args[1]}
        others = [t for t in others if id(t) not in indices]
    if about.takes_numbers:
        several = len(others) > 1 and not about.name.startswith(("where", "_foreach"))
        written = [kwargs.get(name, args[at : at + 1]) for name, at in about.written]
        changed = {id(t) for t in leaves(written)}
        others = [t for t in others if several or t.dim() or id(t) in changed]
    if others:
        raise RuntimeError(refusal(about.name, others[0]))


def refusal(name: str, other: Tensor) -> str:
    """The error about a tensor on another device."""
    return (
        f"{name}: all tensors must be on {DEVICE}, but a {other.dtype} tensor of shape"
        f" {tuple(other.shape)} is on {other.device}: {place()}"
    )


def place() -> str:
    """The innermost line that is not a library's: "fedhet/core/trees.py, line 3, in add"."""
    frame: Any = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(PACKAGE)) or not file.startswith(FOREIGN):
            path = Path(file)
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            return f"{shown.as_posix()}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return "at a line that is not known"


def leaves(value: Any) -> list[Any]:
    """What is in lists, tuples and dictionaries. torch's tree_leaves takes ten times as long."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return [value]
    found = []
    for item in value:
        if isinstance(item, list | tuple | dict):
            found += leaves(item)
        else:
            found.append(item)
    return found


def each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with every tensor changed, also those in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: each(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([each(item, change) for item in value])
    return value
