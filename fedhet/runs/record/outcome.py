"""Reads a finished run and its models from the run folder."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from fedhet.core.check import one_of
from fedhet.core.errors import ConfigError, log
from fedhet.core.trees import Tree
from fedhet.data.forms import read_object
from fedhet.data.storage import fitting, read_tensors
from fedhet.runs import delivery
from fedhet.runs.config.instantiation import find_target
from fedhet.runs.model_building import model_of
from fedhet.runs.record import personal
from fedhet.runs.record.schema import (
    COLUMNS,
    SUMMARY,
    read_config,
    read_partition,
    read_steps,
)
from fedhet.runs.record.scores import headline, method_name
from fedhet.runs.record.terminal import summary_rows

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedhet.runs.record.figures import Picture

GLOBAL = ("model", "best_val")  # the weights of the global model that `load` accepts
_NOT_CHOSEN = (
    "no evaluation has chosen a best model; this needs a global model (some methods and"
    " buffers=local have none), eval.clients=true, and clients with validation samples"
    " (partition.split)"
)
OWN = ("personal", "personal_best_val", "finetuned", "finetuned_best_val", "best_val")


@dataclass(repr=False)
class Run:
    """A run that has ended. A notebook shows it as a table with figures.

    Attributes:
        summary: the content of summary.json.
        dir: the run folder.
        weights: the tensors of the final global model.
    """

    summary: dict[str, Any]
    dir: Path
    weights: Tree

    @cached_property
    def rounds(self) -> DataFrame:
        """The lines of rounds.jsonl, a row per step; nested values are columns `seconds.train`."""
        import pandas as pd

        return pd.json_normalize(self._steps)

    @cached_property
    def clients(self) -> DataFrame:
        """The clients' scores at every evaluation in long format, as in clients/*.parquet."""
        import pandas as pd
        import pyarrow.dataset as parquet

        if not (self.dir / "clients").is_dir():
            return pd.DataFrame(columns=[*COLUMNS])
        return parquet.dataset(self.dir / "clients").to_table().to_pandas()

    def plot(self, figure: str = "accuracy") -> Picture:
        """Draw a figure of the run, for a notebook to show or for `savefig`.

        Args:
            figure: "accuracy" for the rounds, or "labels" for the samples of each client by class.

        Raises:
            ConfigError: there is no such figure, or the run has nothing to show in it.
        """
        from fedhet.runs.record.figures import accuracy, labels

        one_of("figure", figure, ("accuracy", "labels"))
        partition = read_partition(self.dir / "partition.json", ("name", "clients"))
        picture = (
            labels(partition, self.summary)
            if figure == "labels"
            else accuracy(self.summary, self._steps, partition)
        )
        if picture is None:
            raise ConfigError(f"figure={figure}: this run has no values for this figure")
        return picture

    @property
    def _steps(self) -> list[dict[str, Any]]:
        return list(read_steps(self.dir / "rounds.jsonl"))

    @property
    def _place(self) -> str:
        """The run folder, relative to the current folder if it lies inside it."""
        here = Path.cwd()
        return str(self.dir.relative_to(here) if self.dir.is_relative_to(here) else self.dir)

    def __repr__(self) -> str:
        summary = self.summary
        data = summary["dataset"] or "data given as a Task"
        data += f", {summary['partition']['clients']} clients"
        parts = [f"{method_name(summary)} on {data}: {summary['status']}", *headline(summary)]
        return f"Run({', '.join(parts)}; {self._place})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left">{html.escape(name)}</th>'
            f'<td style="text-align:left">{html.escape(value)}</td></tr>'
            for name, value in [*summary_rows(self.summary), ("folder", self._place)]
        )
        images = "".join(
            f'<img style="max-width:49%" alt="{path.stem}" src="data:image/png;base64,'
            f'{base64.b64encode(path.read_bytes()).decode()}">'
            for path in sorted((self.dir / "figures").glob("*.png"))
        )
        return f"<b>{html.escape(method_name(self.summary))}</b><table>{rows}</table>{images}"


# ---- reading
def load_run(folder: str | Path) -> Run:
    """Read a run from its folder.

    Raises:
        ConfigError: the folder is no run folder, or the run has not ended.
        DataError: a file in it is damaged.
    """
    path = Path(folder)
    read_json(path, "summary.json")
    if not (path / "model.safetensors").exists():
        raise ConfigError(f"{path / 'model.safetensors'} is missing: the run has not ended")
    needed = ("status", "method", "plugins", "partition", "models", "seconds")
    summary = read_json(path, "summary.json", needed)
    return Run(summary, path, read_tensors(path / "model.safetensors"))


def load(
    run_dir: str | Path | Run,
    weights: str = "model",
    *,
    client: int | None = None,
    model: Module | None = None,
) -> Module:
    """Load a model of a run, in eval mode.

    The inputs of the model must be normalised as in training. The run's partition.json has the mean
    and std as `normalised`, or under `own` for each client, with the medians for missing values.
    If numbers are predicted, the prediction is output * std + mean, with the mean and std in
    `target_scale` of partition.json.

    Args:
        run_dir: the run folder, or the run itself.
        weights: for the global model: "model" (the final one) or "best_val" (the best one on the
            clients' validation data). For a client's own model: "personal" or "finetuned" (at the
            last evaluation), or "personal_best_val" or "finetuned_best_val" (at the best
            validation); "best_val" means the first of these two that the run has.
        client: load the own model of this client; None: the global model.
        model: a module that receives the values, if the run's model was given as an object; None:
            the model is built.

    Raises:
        ConfigError: the folder is no run folder, or the run has no such weights; or its model was
            given as an object and cannot be rebuilt from the record.
        DataError: a file in the folder is damaged.
    """
    folder = Path(run_dir) if isinstance(run_dir, str | Path) else run_dir.dir
    if client is None:
        if weights in OWN and weights not in GLOBAL:
            raise ConfigError(
                f"weights={weights} belong to one client; name the client with client=<number>"
            )
        one_of("weights", weights, GLOBAL)
        return _load_global(folder, weights, model).eval()
    one_of("weights", weights, OWN)
    summary = read_json(folder, "summary.json")
    model = model or _built(folder)
    half = find_target(read_config(folder).method).client
    if "delivered" in summary:
        return delivery.load(folder, summary, weights, client, half, model).eval()
    return personal.load(folder, summary, weights, client, half, model).eval()


def _load_global(folder: Path, weights: str, model: Module | None) -> Module:
    """Return the model with the values in the folder's `<weights>.safetensors`."""
    file = folder / f"{weights}.safetensors"
    summary = read_json(folder, "summary.json")
    if not file.exists():
        why = _NOT_CHOSEN if weights == "best_val" else "the run has not ended"
        if "delivered" in summary:
            why = "the folder holds only the final models that were delivered to a site"
        raise ConfigError(f"{file} is missing: {why}")
    model = model or _built(folder)
    if "global" not in (summary.get("models") or ["global"]):
        local = read_config(folder).buffers == "local"
        log.warning(
            "method=%s%s has no global model: %s holds the weights that clients share, and the"
            " initial values of all other weights",
            summary["method"],
            " with buffers=local" if local else "",
            file,
        )
    values = read_tensors(file)
    with fitting(file):
        model.load_state_dict(values)
    return model


def _built(folder: Path) -> Module:
    """Return a model built from the run's configuration; its values do not matter."""
    partition = read_json(folder, "partition.json")
    if "shape" not in partition:
        raise ConfigError(
            f"{folder}: the run's model was given as an object; pass an object of the same class to"
            " fedhet.load as model=..."
        )
    return model_of(read_config(folder).model, partition)


def read_json(
    folder: Path, name: str, needed: Sequence[str] = ("status", "method")
) -> dict[str, Any]:
    """Return the content of the summary.json or the partition.json of a run.

    Raises:
        ConfigError: the folder is no run folder.
        DataError: the file is damaged.
    """
    try:
        if name == "partition.json":
            return read_partition(folder / name)
        return read_object(folder / name, SUMMARY, needed)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {name} is missing") from error
