"""Checks a task that is given as Python objects, and records it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from fedhet.core.errors import ConfigError, DataError, MachineError
from fedhet.core.targets import WITH_CLASSES
from fedhet.core.task import ClientData, HeldClients, Samples, Task
from fedhet.core.workspace import Workspace
from fedhet.data.dataset import check_targets
from fedhet.models.base import trial_output
from fedhet.runs.config import Config, compose
from fedhet.runs.config.lines import key_of

# The settings that a task replaces.
REPLACED = ("dataset", "partition", "model", "data_dir")
# Samples in a trial: more than one, so that a criterion that averages over them is noticed.
TRIAL = 3


def check_settings(settings: Config) -> None:
    """Refuse settings that have no effect with a task.

    Raises:
        ConfigError: there are such settings; the message names them, or the groups that an
            experiment sets.
    """
    keys = {override: key_of(override) for override in settings.overrides}
    ignored = [each for each, key in keys.items() if key.partition(".")[0] in REPLACED]
    if "experiment" in keys.values() and not ignored:
        default = compose([]).cfg
        ignored = [key for key in REPLACED if settings.cfg[key] != default[key]]
    if ignored:
        raise ConfigError(
            f"{', '.join(ignored)} with a Task: a Task has its own data, clients and model, so"
            " settings of dataset, partition, model and data_dir have no effect; leave them out"
        )


def check_task(workspace: Workspace) -> None:
    """Check that model, criterion, classes and data of the task fit together.

    If the clients are a list, every client is checked. If another sequence loads them, only the
    first client that has samples is checked. The model is tried on a few samples of each shape.

    Raises:
        ConfigError: the model does not take the inputs, the criterion does not return one loss per
            sample, or `classes` does not fit the targets and the model's output.
        DataError: a target or an input is out of range; the message names client, part and sample.
    """
    task = workspace.task
    tried = set()
    for where, samples in _parts(task, workspace.simulated):
        check_targets(where, samples.y, task.target, task.classes)
        if task.target in ("number", "loss") and samples.y.is_floating_point():
            _check_finite(where, "target", samples.y)
        x = samples.x
        numbers = x.is_floating_point() and x.numel()
        if numbers and not all(bound.isfinite() for bound in x.aminmax()):
            if task.transform is not None:  # it may replace such values
                x = workspace.prepared(Samples(x.clone(), samples.y)).x
            _check_finite(where, "input", x)
        kind = (samples.x.shape[1:], samples.x.dtype, samples.y.shape[1:], samples.y.dtype)
        if kind not in tried:
            tried.add(kind)
            _try(where, samples, workspace)


def _parts(task: Task, simulated: bool) -> Iterator[tuple[str, Samples]]:
    """Yield the samples to check, each with its place; of a lazy sequence only one client.

    Raises:
        ConfigError: the task has the data of a single node.
        DataError: a simulation lacks the data of its clients.
    """
    if isinstance(task.clients, ClientData):
        raise ConfigError(
            "Task: clients is a single ClientData, as for the node of a fedhet.flower.client_app;"
            " expected a list of ClientData, or, for fedhet.flower.strategy, the training sizes or"
            " the number of clients"
        )
    pids = [pid for pid, size in enumerate(task.sizes) if size][:1]
    if isinstance(task.clients, list | tuple):
        pids = list(range(len(task.sizes)))
    elif isinstance(task.clients, HeldClients) and not simulated:
        pids = list(task.clients.here)
    for pid in pids:
        client = task.clients[pid]
        for part in ("train", "val", "test"):
            samples = getattr(client, part)
            if samples is not None and len(samples):
                yield f"client {pid}, {part}", samples
    if task.test is not None:
        yield "the global test set", task.test


def _check_finite(where: str, what: str, values: Tensor) -> None:
    wrong = (~values.flatten(1 if values.ndim > 1 else 0).isfinite()).nonzero()
    if len(wrong):
        row = int(wrong[0, 0])
        value = values[row].flatten()[int(wrong[0, 1]) if values.ndim > 1 else 0].item()
        raise DataError(
            f"{where}, sample {row}: the {what} contains {value}; expected finite numbers"
        )


def _try(where: str, samples: Samples, workspace: Workspace) -> None:
    """Try model and criterion on a batch of several samples, and the criterion on one sample."""
    task = workspace.task
    few = torch.arange(TRIAL) % len(samples)
    batch = workspace.prepared(Samples(samples.x[few], samples.y[few]))
    name = type(workspace.model).__name__
    with workspace.seeded("trial"), torch.no_grad():
        output = trial_output(
            workspace.model,
            batch.x,
            f"Task: the model {name}, whose parameters are {workspace.parameters[0].dtype}, does"
            f" not take {TRIAL} samples of {where}, {batch.x.dtype} of shape"
            f" {tuple(batch.x.shape)}",
        )
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            raise ConfigError(f"Task: the model {name} returns a {kind}, not a tensor")
        shape = tuple(output.shape)
        returned = f"Task: for {TRIAL} samples the model {name} returns shape {shape}"
        if task.target not in ("number", "loss") and shape != (TRIAL, task.classes):
            raise ConfigError(
                f"{returned}; with classes={task.classes} it must be {(TRIAL, task.classes)}, one"
                " number for each class"
            )
        if shape[:1] != (TRIAL,):
            raise ConfigError(
                f"{returned}; its first dimension must be the number of samples, {TRIAL}"
            )
        for n in (TRIAL, 1):
            _check_losses(where, task.criterion, output[:n], batch.y[:n])


def _check_losses(where: str, criterion: Any, output: Tensor, y: Tensor) -> None:
    n = len(y)
    name = _name(criterion)
    batch = f"for a batch of {n} from {where}"
    try:
        losses = criterion(output, y)
    except Exception as error:
        raise MachineError(
            f"Task: {batch}, the criterion {name} does not take the model's output,"
            f" {output.dtype} of shape {tuple(output.shape)}, with targets that are {y.dtype} of"
            f" shape {tuple(y.shape)}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    if isinstance(losses, Tensor) and losses.shape == (n,):
        return
    returned = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses)
    raise ConfigError(
        f"Task: {batch}, the criterion {name} returns {returned} for outputs of shape"
        f" {tuple(output.shape)} and targets of shape {tuple(y.shape)}; expected one loss for each"
        f' sample, shape ({n},); torch\'s losses return it with reduction="none" if outputs and'
        " targets have the same shape"
    )


def _name(thing: Any) -> str:
    """Return the name of a function, or the class name of another object."""
    named = thing if hasattr(thing, "__name__") else type(thing)
    return str(named.__name__)


# ---- the record
def recorded_config(cfg: DictConfig, workspace: Workspace) -> DictConfig:
    """Return the configuration with an entry `task` in place of the settings it replaces."""
    task = workspace.task
    kept = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in REPLACED])
    model = type(workspace.model)
    given = {
        "model": f"{model.__module__}.{model.__qualname__}",
        "criterion": _name(task.criterion),
        "transform": None if task.transform is None else _name(task.transform),
        "augment": None if task.augment is None else _name(task.augment),
        "target": task.target,
        "classes": task.classes,
        "clients": len(task.sizes),
    }
    return OmegaConf.merge(OmegaConf.create({"task": given}), kept)  # type: ignore[return-value]


def partition_record(task: Task) -> dict[str, Any]:
    """Return the content of partition.json for a task given as objects.

    If the clients are a list and the targets have classes, it counts samples by client and class.
    """
    record: dict[str, Any] = {
        "name": "task",
        "clients": len(task.sizes),
        "hash": None,
        "train_sizes": list(task.sizes),
        "target": task.target,
    }
    if task.target not in WITH_CLASSES or not isinstance(task.clients, list | tuple):
        return record
    parts = [(client.train, client.val, client.test) for client in task.clients]
    ys = [torch.cat([samples.y for samples in own if samples is not None]) for own in parts]
    return {**record, "counts": [torch.bincount(y, minlength=task.classes).tolist() for y in ys]}
