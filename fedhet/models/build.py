"""The configured model, built for a dataset: one of fedhet's, or a module of your own."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from fedhet.config.targets import instantiate
from fedhet.data.dataset import Dataset
from fedhet.errors import ConfigError
from fedhet.models.base import trial_output


def build_model(node: DictConfig, dataset: Dataset) -> nn.Module:
    """Build what the group `model` of a configuration names.

    Its constructor gets the settings of the group and, as keyword arguments, `shape`, that of one
    sample, (C, H, W), (F,) or (T,), and `classes`, their number.

    Raises:
        ConfigError: the constructor does not take these arguments, or the model does not read such
            samples; or a model of your own is no module with one output for each class.
    """
    classes = len(dataset.classes)
    model: Any = instantiate(node, shape=dataset.shape, classes=classes)
    own = not node._target_.startswith("fedhet.")
    if own and not isinstance(model, nn.Module):
        raise ConfigError(
            f"model._target_={node._target_} makes a {type(model).__name__}; expected a"
            " torch.nn.Module"
        )
    reads_text = getattr(model, "text", dataset.text)
    if reads_text != dataset.text:
        inputs = (
            "token numbers (T,), a text"
            if reads_text
            else "numbers (C, H, W) or (F,), images or a table"
        )
        raise ConfigError(
            f"model: {type(model).__name__} reads {inputs}; a sample of {dataset.name} is"
            f" {dataset.shape}, {dataset.x.dtype}"
        )
    if own:
        _try(model, dataset, node._target_)
    return model  # type: ignore[no-any-return]


def _try(model: nn.Module, dataset: Dataset, target: str) -> None:
    """Check that an own model returns one number for each sample and class."""
    x = torch.zeros(2, *dataset.shape, dtype=dataset.x.dtype if dataset.text else torch.float32)
    shape, expected = dataset.shape, (2, len(dataset.classes))
    output = trial_output(
        model, x, f"model._target_={target} does not take two samples of shape {shape}"
    )
    returned = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if returned != expected:
        raise ConfigError(
            f"model._target_={target} returns {returned} for two samples of {dataset.name};"
            f" expected {expected}, one number for each class"
        )
