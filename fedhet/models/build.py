"""The model that a configuration names, for the data that it is trained on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from torch import nn

from fedhet.config.targets import find_target, instantiate
from fedhet.errors import ConfigError

if TYPE_CHECKING:
    from fedhet.data.dataset import Dataset


def build_model(node: DictConfig, dataset: Dataset) -> nn.Module:
    """A new model for a dataset.

    Args:
        node: the settings `model`.
        dataset: the samples that it is for.

    Raises:
        ConfigError: the model cannot be built for such samples.
    """
    shape, outputs = dataset.shape, len(dataset.outputs)
    what = f"a sample of {dataset.name} is {shape}, {dataset.x.dtype}"
    predicts_token = dataset.padding is None and dataset.vocabulary == outputs
    reads_text = getattr(find_target(node), "text", True)
    if dataset.text and reads_text and not (predicts_token or _asks_for_vocabulary(node)):
        raise ConfigError(
            f"model: {node._target_.rpartition('.')[2]} predicts the next of its tokens; {what},"
            f" with {dataset.vocabulary} tokens, and has {outputs} outputs (target="
            f"{dataset.target}); model=text takes such texts"
        )
    model = _build(node, shape, outputs, dataset.vocabulary, dataset.padding)
    reads_text = getattr(model, "text", dataset.text)
    if reads_text != dataset.text:
        inputs = (
            "token numbers (T,), a text"
            if reads_text
            else "numbers (C, H, W) or (F,), images or a table"
        )
        raise ConfigError(f"model: {type(model).__name__} reads {inputs}; {what}")
    return model


def model_of(node: DictConfig, partition: Mapping[str, Any]) -> nn.Module:
    """The untrained model of a run.

    Args:
        node: the settings `model` of the run.
        partition: the content of its partition.json.
    """
    # The file of pretrained weights may no longer exist, and is not needed.
    changes: dict[str, Any] = {"weights": None} if "weights" in node else {}
    outputs = len(partition.get("numbers") or partition["classes"])
    text = partition.get("vocabulary", outputs), partition.get("padding")
    return _build(node, tuple(partition["shape"]), outputs, *text, **changes)


def _build(
    node: DictConfig,
    shape: tuple[int, ...],
    outputs: int,
    vocabulary: int,
    padding: int | None,
    **changes: Any,
) -> nn.Module:
    tokens = {"vocabulary": vocabulary, "padding": padding} if _asks_for_vocabulary(node) else {}
    model: nn.Module = instantiate(node, shape=shape, classes=outputs, **tokens, **changes)
    return model


def _asks_for_vocabulary(node: DictConfig) -> bool:
    return "vocabulary" in inspect.signature(find_target(node)).parameters
