"""The application from Python and notebooks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet import config
from fedhet.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

    from fedhet.build import Run
    from fedhet.task import Task


def run(overrides: Sequence[str] = (), *, task: Task | None = None) -> Run:
    """What `python -m fedhet <overrides>` does; `task` replaces the configured dataset, partition and model.

    Raises:
        ConfigError: a setting is unknown or out of range; nothing was run.
        RunFailed: the run ended with status "failed"; `error.folder` holds what it had.
    """
    settings = config.compose(list(overrides))  # before torch is imported: a mistyped name is told at once
    from fedhet.build import run_job

    return run_job(settings, task)


def load(run_dir: str | Path) -> Module:
    """The final global model of a run, from its folder, in eval mode. Its inputs are normalised as in training (conf/dataset).

    Raises:
        ConfigError: the folder is no run, or its model was given as an object and cannot be built from the record.
    """
    import safetensors.torch
    from omegaconf import OmegaConf

    from fedhet.objects import instantiate

    folder = Path(run_dir)
    try:
        about = json.loads((folder / "partition.json").read_text())
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        cfg = OmegaConf.load(folder / "config.yaml")
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is not the folder of a run that has ended: {error.filename} is missing") from error
    if "shape" not in about:
        raise ConfigError(f"{folder}: the run's model was given as an object; load model.safetensors into that model yourself")
    untrained = {"weights": None} if "weights" in cfg.model else {}  # the file of pretrained weights need not be there any more
    model: Module = instantiate(cfg.model, **untrained, shape=tuple(about["shape"]), classes=len(about["classes"]))
    model.load_state_dict(weights)
    return model.eval()
