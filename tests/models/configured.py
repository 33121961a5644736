"""Models as conf/model configures them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from fedhet.models import Classifier
from fedhet.runs.config.instantiation import instantiate

CONF = Path(__file__).parents[2] / "conf" / "model"


def model_of(name: str, shape: tuple[int, ...], classes: int, **settings: Any) -> Classifier:
    config = OmegaConf.create({"model": OmegaConf.load(CONF / f"{name}.yaml")}).model
    model: Classifier = instantiate(config, shape=shape, classes=classes, **settings)
    return model


def size(model: nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def layer(inputs: int, outputs: int, area: int = 1) -> int:
    """The number of weights and biases of a layer."""
    return (inputs * area + 1) * outputs
