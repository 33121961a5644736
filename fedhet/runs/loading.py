"""A run and its models, read back from the run folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.core.check import one_of
from fedhet.core.errors import ConfigError
from fedhet.runs.record.schema import read_config

if TYPE_CHECKING:
    from torch.nn import Module

    from fedhet.runs.record.outcome import Run

log = logging.getLogger("fedhet")


GLOBAL = ("model", "best_val")  # weights that `load` knows, of the global model
_NOT_CHOSEN = (
    "no evaluation has chosen a model; that takes a global model, which some methods and"
    " buffers=local do without, eval.clients=true and clients with validation samples"
    " (partition.split)"
)
OWN = ("personal", "personal_best_val", "finetuned", "finetuned_best_val", "best_val")


def load_run(folder: str | Path) -> Run:
    """Read a run back from its folder.

    Raises:
        ConfigError: the folder is not that of a run, or the run has not ended.
        DataError: a file in it is damaged.
    """
    from fedhet.runs.record.outcome import Run

    path = Path(folder)
    read_json(path, "summary.json")
    if not (path / "model.safetensors").exists():
        raise ConfigError(f"{path / 'model.safetensors'} is missing: the run has not ended")
    return Run.read(path)


def load(
    run_dir: str | Path | Run,
    weights: str = "model",
    *,
    client: int | None = None,
    model: Module | None = None,
) -> Module:
    """Load a model of a run, in eval mode.

    Its inputs must be normalised as in training: by the mean and std that the run's partition.json
    states as `normalised`, or under `own` for each client, there with the medians of missing cells.
    Where numbers are predicted, the prediction is output * std + mean, with the mean and std that
    it states as `target_scale`.

    Args:
        run_dir: the run folder, or the run itself.
        weights: of the global model "model", the final one, or "best_val", the best one on the
            clients' validation data. Of the client's own models "personal" or "finetuned", as they
            were evaluated last, and "personal_best_val" or "finetuned_best_val", at the best
            validation; "best_val" is short for the first of these two that the run has.
        client: the client whose own model is meant; None for the global model.
        model: takes the values, where the run's model was given as an object; else it is built.

    Raises:
        ConfigError: the folder is not that of a run, or of a run without these weights; or its
            model was given as an object, which cannot be rebuilt from the record.
        DataError: a file in the folder is damaged.
    """
    folder = Path(run_dir) if isinstance(run_dir, str | Path) else run_dir.dir
    if client is None:
        if weights in OWN and weights not in GLOBAL:
            raise ConfigError(f"weights={weights} are those of one client; name it with client=...")
        one_of("weights", weights, GLOBAL)
        return _load_global(folder, weights, model).eval()
    from fedhet.runs import delivery
    from fedhet.runs.config.instantiation import find_target
    from fedhet.runs.record import personal

    one_of("weights", weights, OWN)
    summary = read_json(folder, "summary.json")
    model = model or _built(folder)
    half = find_target(read_config(folder).method).client
    if "delivered" in summary:
        return delivery.load(folder, summary, weights, client, half, model).eval()
    return personal.load(folder, summary, weights, client, half, model).eval()


def _load_global(folder: Path, weights: str, model: Module | None) -> Module:
    """The model with the values in the folder's `<weights>.safetensors`."""
    from fedhet.data.storage import fitting, read_tensors

    file = folder / f"{weights}.safetensors"
    summary = read_json(folder, "summary.json")
    if not file.exists():
        why = _NOT_CHOSEN if weights == "best_val" else "the run has not ended"
        if "delivered" in summary:
            why = "it holds what was delivered to a site, the final models"
        raise ConfigError(f"{file} is missing: {why}")
    model = model or _built(folder)
    if "global" not in (summary.get("models") or ["global"]):
        local = read_config(folder).buffers == "local"
        log.warning(
            "method=%s%s has no global model: %s holds what its clients share, and the initial"
            " values of all other weights",
            summary["method"],
            " with buffers=local" if local else "",
            file,
        )
    values = read_tensors(file)
    with fitting(file):
        model.load_state_dict(values)
    return model


def _built(folder: Path) -> Module:
    """A model as the run's configuration describes it, with any values."""
    from fedhet.runs.model_building import model_of

    partition = read_json(folder, "partition.json")
    if "shape" not in partition:
        raise ConfigError(
            f"{folder}: the run's model was given as an object; give such an object to"
            " fedhet.load, as model=..."
        )
    return model_of(read_config(folder).model, partition)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """What the summary.json or the partition.json of a run says.

    Raises:
        ConfigError: the folder is not that of a run.
        DataError: the file is damaged.
    """
    from fedhet.data.forms import read_object
    from fedhet.runs.record.schema import SUMMARY, read_partition

    try:
        if name == "partition.json":
            return read_partition(folder / name)
        return read_object(folder / name, SUMMARY, ("status", "method"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {name} is missing") from error
