"""The application from Python and notebooks."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet import config
from fedhet.check import one_of
from fedhet.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

    from fedhet.record.results import Run
    from fedhet.task import Task

log = logging.getLogger("fedhet")


def run(overrides: Sequence[str] = (), *, task: Task | None = None) -> Run:
    """Do what `python -m fedhet <overrides>` does.

    Args:
        overrides: the settings, such as `["method=scaffold", "rounds=5"]`.
        task: replaces the configured dataset, partition and model.

    Raises:
        ConfigError: a setting is unknown or out of range; nothing was run.
        RunFailed: the run ended with status "failed"; `error.folder` holds what it recorded.
    """
    # Before torch is imported, so that a misspelled name is reported immediately.
    settings = config.compose(list(overrides))
    from fedhet.job import run_job

    return run_job(settings, task)


def load(run_dir: str | Path, weights: str = "model") -> Module:
    """Load the global model of a run from its folder, in eval mode.

    Its inputs must be normalised as in training: by the mean and std that the run's partition.json
    states as `normalised`. Where numbers are predicted, the prediction is output * std + mean, with
    the mean and std that it states as `target_scale`.

    Args:
        run_dir: the run folder.
        weights: "model", the final one, or "best_val", the best one on the clients' validation
            data.

    Raises:
        ConfigError: the folder is not that of a run, or of a run without these weights; or its
            model was given as an object, which cannot be rebuilt from the record.
    """
    import safetensors.torch
    from omegaconf import OmegaConf

    from fedhet.models.build import model_of

    folder = Path(run_dir)
    file = folder / f"{one_of('weights', weights, ('model', 'best_val'))}.safetensors"
    try:
        partition = _read_json(folder / "partition.json")
        summary = _read_json(folder / "summary.json")
        cfg = OmegaConf.load(folder / "config.yaml")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} is not the folder of a run: {error.filename} is missing"
        ) from error
    if not file.exists():
        raise ConfigError(f"{file} is missing: {_why_missing(weights)}")
    if "shape" not in partition:
        raise ConfigError(
            f"{folder}: the run's model was given as an object; load model.safetensors into that"
            " model yourself"
        )
    if "global" not in summary.get("models", ["global"]):
        log.warning(
            "method=%s%s has no global model: %s holds what its clients share, and the initial"
            " values of all other weights",
            summary["method"],
            " with buffers=local" if cfg.buffers == "local" else "",
            file,
        )
    model = model_of(cfg.model, partition)
    model.load_state_dict(safetensors.torch.load_file(file))
    return model.eval()


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _why_missing(weights: str) -> str:
    if weights == "model":
        return "the run has not ended"
    return (
        "no evaluation has chosen a model; that takes a global model, which some methods and"
        " buffers=local do without, eval.clients=true and clients with validation samples"
        " (partition.split)"
    )
