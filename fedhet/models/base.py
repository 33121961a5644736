"""The common base of all models, and checks of models for training and methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhet.core import check
from fedhet.core.errors import ConfigError, MachineError
from fedhet.core.workspace import Workspace


class Classifier(nn.Module):
    """A model of the form `head(features(x))`.

    `features` returns the output of `body`, unless a model overrides it. `head` is an `nn.Linear`
    from d features to the outputs, one for each class, label or number. It is the last entry of the
    state dictionary.
    """

    body: Any
    head: nn.Linear
    text: ClassVar[bool] = False  # whether the inputs x (B, T) are token numbers

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the head: x (B, *shape) -> (B, d)."""
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, the logits of classes and labels: x (B, *shape) -> (B, classes)."""
        return self.head(self.features(x))


def require_features(model: nn.Module, who: str) -> None:
    """Refuse a model without features(x) and head(f), for a method that reads the features.

    Raises:
        ConfigError: the model lacks one of them; the message begins with `who`.
    """
    if missing := [part for part in ("features", "head") if not hasattr(model, part)]:
        raise ConfigError(
            f"{who} needs a model with features(x) and head(f); {type(model).__name__} has no"
            f" {' and no '.join(missing)}"
        )


def image_shape(model: str, shape: tuple[int, ...], smallest: int = 1) -> tuple[int, int, int]:
    """Return `shape` if it is (C, H, W) with H and W of at least `smallest` pixels.

    Raises:
        ConfigError: it is not; the message says what the model takes and what shape the data have.
    """
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ConfigError(
            f"model: the {model} takes images (C, H, W) of at least {smallest}x{smallest} pixels;"
            f" the samples have the shape {tuple(shape)}"
        )
    return shape


def trial_output(model: nn.Module, x: Tensor, problem: str) -> Any:
    """Return the model's output for a few inputs.

    The model's buffers and the global random state do not change.

    Raises:
        ConfigError: the model raised an error; the message is `problem` and the error's first line.
    """
    buffers = {name: t.clone() for name, t in model.named_buffers()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # so that dropout is the same in every trial
        try:
            return functional_call(model, buffers, (x,))
        except Exception as error:
            line = str(error).partition("\n")[0]
            raise MachineError(f"{problem}: {type(error).__name__}: {line}") from error


def norm_layer(norm: str, groups: int) -> Callable[[int], nn.Module]:
    """Return the constructor (channels) -> batch norm, or group norm with `groups` groups.

    Group norm has no running statistics, so there are none to average.

    Raises:
        ConfigError: `norm` is neither "batch" nor "group".
    """
    check.one_of("model.norm", norm, ("batch", "group"))
    return nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)


def require_feature_head(workspace: Workspace, who: str, why: str) -> None:
    """Refuse a task or a model for a method that generates or compares features by class.

    Args:
        workspace: has the task and the model, which need not be a Classifier.
        who: the beginning of the error message.
        why: what the method does; the message continues with it.

    Raises:
        ConfigError: the samples do not have one class each, or the model has no features(x) or no
            linear `head`.
    """
    workspace.task.check_classes(who)
    model = workspace.model
    if not hasattr(model, "features") or not isinstance(getattr(model, "head", None), nn.Linear):
        raise ConfigError(
            f"{who} {why}: it needs a model with features(x) and a linear layer `head`; this is"
            f" {type(model).__name__}"
        )
