"""The application from Python and notebooks."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet import config
from fedhet.check import one_of
from fedhet.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

    from fedhet.job import Run
    from fedhet.task import Task

log = logging.getLogger("fedhet")


def run(overrides: Sequence[str] = (), *, task: Task | None = None) -> Run:
    """What `python -m fedhet <overrides>` does; `task` replaces the configured dataset, partition
    and model.

    Raises:
        ConfigError: a setting is unknown or out of range; nothing was run.
        RunFailed: the run ended with status "failed"; `error.folder` holds what it had.
    """
    # before torch is imported: a mistyped name is told at once
    settings = config.compose(list(overrides))
    from fedhet.job import run_job

    return run_job(settings, task)


def load(run_dir: str | Path, weights: str = "model") -> Module:
    """The global model of a run, from its folder, in eval mode. Its inputs are normalised as in
    training (conf/dataset).

    Args: weights: "model", the final one, or "best_val", the best one on the clients' validation
        data.

    Raises: ConfigError: the folder is no run, or one without these weights, or its model was given
        as an object and cannot be built from the record.
    """
    import safetensors.torch
    from omegaconf import OmegaConf

    from fedhet.config.targets import instantiate

    folder = Path(run_dir)
    file = folder / f"{one_of('weights', weights, ('model', 'best_val'))}.safetensors"
    try:
        about, summary = (
            json.loads((folder / f"{name}.json").read_text()) for name in ("partition", "summary")
        )
        cfg = OmegaConf.load(folder / "config.yaml")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} is not the folder of a run: {error.filename} is missing"
        ) from error
    if not file.exists():
        reason = (
            "the run has not ended"
            if weights == "model"
            else (
                "no evaluation has chosen a model; that takes a method with a global model,"
                " eval.clients=true and clients with validation samples (partition.split)"
            )
        )
        raise ConfigError(f"{file} is missing: {reason}")
    if "shape" not in about:
        raise ConfigError(
            f"{folder}: the run's model was given as an object; load model.safetensors into that"
            " model yourself"
        )
    untrained = (
        {"weights": None} if "weights" in cfg.model else {}
    )  # the file of pretrained weights need not be there any more
    if "global" not in summary.get("models", ["global"]):
        log.warning(
            "method=%s has no global model: %s holds what its clients share, and the rest as it was"
            " initialised",
            summary["method"],
            file,
        )
    model: Module = instantiate(
        cfg.model, **untrained, shape=tuple(about["shape"]), classes=len(about["classes"])
    )
    model.load_state_dict(safetensors.torch.load_file(file))
    return model.eval()
