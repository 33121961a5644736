"""A finished run and its models, read back from its folder."""

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
from fedhet.runs.record.summary import headline, method_name
from fedhet.runs.record.terminal import summary_rows

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedhet.runs.record.figures import Picture

GLOBAL = ("model", "best_val")  # weights that `load` knows, of the global model
_NOT_CHOSEN = (
    "no evaluation has chosen a model; that takes a global model, which some methods and"
    " buffers=local do without, eval.clients=true and clients with validation samples"
    " (partition.split)"
)
OWN = ("personal", "personal_best_val", "finetuned", "finetuned_best_val", "best_val")


@dataclass(repr=False)
class Run:
    """A run that has ended. In a notebook it shows its table and its figures.

    Attributes:
        summary: the content of summary.json.
        dir: the run folder.
        weights: the final global model's tensors.
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
            return pd.DataFrame(columns=COLUMNS)
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
        if figure == "labels":
            picture = labels(partition, self.summary)
        else:
            picture = accuracy(self.summary, self._steps, partition)
        if picture is None:
            raise ConfigError(f"figure={figure}: this run has recorded nothing for it")
        return picture

    @property
    def _steps(self) -> list[dict[str, Any]]:
        return list(read_steps(self.dir / "rounds.jsonl"))

    @property
    def _place(self) -> str:
        """The folder, relative to the current one where it is below it."""
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
    """Read a run back from its folder.

    Raises:
        ConfigError: the folder is not that of a run, or the run has not ended.
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
    one_of("weights", weights, OWN)
    summary = read_json(folder, "summary.json")
    model = model or _built(folder)
    half = find_target(read_config(folder).method).client
    if "delivered" in summary:
        return delivery.load(folder, summary, weights, client, half, model).eval()
    return personal.load(folder, summary, weights, client, half, model).eval()


def _load_global(folder: Path, weights: str, model: Module | None) -> Module:
    """The model with the values in the folder's `<weights>.safetensors`."""
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
    partition = read_json(folder, "partition.json")
    if "shape" not in partition:
        raise ConfigError(
            f"{folder}: the run's model was given as an object; give such an object to"
            " fedhet.load, as model=..."
        )
    return model_of(read_config(folder).model, partition)


def read_json(
    folder: Path, name: str, needed: Sequence[str] = ("status", "method")
) -> dict[str, Any]:
    """What the summary.json or the partition.json of a run says.

    Raises:
        ConfigError: the folder is not that of a run.
        DataError: the file is damaged.
    """
    try:
        if name == "partition.json":
            return read_partition(folder / name)
        return read_object(folder / name, SUMMARY, needed)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {name} is missing") from error
