"""Builds the model that a configuration names, for the data on which it is trained."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from fedhet.core import trees
from fedhet.core.errors import ConfigError
from fedhet.models.base import trial_output
from fedhet.runs.config.instantiation import find_target, instantiate

if TYPE_CHECKING:
    from fedhet.data.dataset import Dataset


def build_model(node: DictConfig, dataset: Dataset, most: int = 0) -> nn.Module:
    """Build the model that the group `model` of a configuration names.

    The constructor gets the settings of the group and two keyword arguments: `shape`, the shape of
    one sample ((C, H, W), (F,) or (T,)), and `classes`, the number of outputs. If it has these
    parameters, it also gets `vocabulary`, the number of tokens, and `padding`, the token that fills
    up short texts, or None.

    Args:
        node: the settings of the group.
        dataset: the data on which the model is trained.
        most: the largest allowed size, in MB of parameters and buffers; 0: no limit.

    Raises:
        ConfigError: the model is larger; or the constructor does not take these arguments; or the
            model does not read such samples; or a user's own model is no module, or does not return
            one number for each output.
    """
    shape, outputs = dataset.shape, len(dataset.outputs)
    what = f"a sample of {dataset.name} is {shape}, {dataset.x.dtype}"
    predicts_token = dataset.padding is None and dataset.vocabulary == outputs
    reads_text = getattr(find_target(node), "text", True)
    if dataset.text and reads_text and not (predicts_token or _asks_for_vocabulary(node)):
        raise ConfigError(
            f"model: {node._target_.rpartition('.')[2]} predicts the next token; {what},"
            f" with {dataset.vocabulary} tokens, and has {outputs} outputs (target="
            f"{dataset.target}); model=text reads such texts"
        )
    if most:
        _check_size(node, most, shape, outputs, dataset.vocabulary, dataset.padding)
    model = _build(node, shape, outputs, dataset.vocabulary, dataset.padding)
    if getattr(model, "text", dataset.text) != dataset.text:
        reads = "images or tables of numbers" if dataset.text else "texts, token numbers (T,)"
        raise ConfigError(
            f"model: {type(model).__name__} reads {reads}; {what}. For texts, use model=text, or"
            " model=char_lstm to predict the next character"
        )
    if not node._target_.startswith("fedhet."):
        _try(model, dataset, node._target_)
    return model


def model_of(node: DictConfig, partition: Mapping[str, Any]) -> nn.Module:
    """Return the untrained model of a run.

    Args:
        node: the settings `model` of the run.
        partition: the content of the run's partition.json.
    """
    outputs = len(partition.get("numbers") or partition["classes"])
    text = partition.get("vocabulary", outputs), partition.get("padding")
    # The file of pretrained weights is not needed, and may no longer exist.
    return _build(node, tuple(partition["shape"]), outputs, *text, pretrained=False)


def _build(
    node: DictConfig,
    shape: tuple[int, ...],
    outputs: int,
    vocabulary: int,
    padding: int | None,
    *,
    pretrained: bool = True,
) -> nn.Module:
    more: dict[str, Any] = {} if pretrained or "weights" not in node else {"weights": None}
    if _asks_for_vocabulary(node):
        more |= {"vocabulary": vocabulary, "padding": padding}
    model: Any = instantiate(node, shape=shape, classes=outputs, **more)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model._target_={node._target_} makes a {type(model).__name__}; expected a"
            " torch.nn.Module"
        )
    return model


def _check_size(node: DictConfig, most: int, *about: Any) -> None:
    """Refuse a model that is too large, before memory is allocated for it."""
    try:
        with torch.device("meta"):
            model = _build(node, *about, pretrained=False)
    except NotImplementedError:
        return  # some models of torchvision and timm cannot be built without values
    size = trees.nbytes(model.state_dict()) / 1e6
    if size > most:
        raise ConfigError(
            f"model: {size:.0f} MB of parameters and buffers; this node builds at most max-model"
            f"={most} MB (set in its site.toml or node config)"
        )


def _asks_for_vocabulary(node: DictConfig) -> bool:
    return "vocabulary" in inspect.signature(find_target(node)).parameters


def _try(model: nn.Module, dataset: Dataset, target: str) -> None:
    """Check that a user's own model returns one number for each sample and output."""
    x = torch.zeros(2, *dataset.shape, dtype=dataset.x.dtype if dataset.text else torch.float32)
    shape, expected = dataset.shape, (2, len(dataset.outputs))
    output = trial_output(
        model, x, f"model._target_={target} does not take two samples of shape {shape}"
    )
    returned = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if returned != expected:
        raise ConfigError(
            f"model._target_={target} returns {returned} for two samples of {dataset.name};"
            f" expected {expected}, one number for each output"
        )
