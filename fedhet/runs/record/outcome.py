"""A finished run, read back from its folder."""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.core.check import one_of
from fedhet.core.errors import ConfigError
from fedhet.core.trees import Tree
from fedhet.data.forms import read_object
from fedhet.data.storage import read_tensors
from fedhet.runs.record.schema import COLUMNS, SUMMARY, read_partition, read_steps
from fedhet.runs.record.summary import headline, method_name
from fedhet.runs.record.terminal import summary_rows

if TYPE_CHECKING:
    from pandas import DataFrame

    from fedhet.runs.record.figures import Picture


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

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read the run from its folder."""
        needed = ("status", "method", "plugins", "partition", "models", "seconds")
        summary = read_object(folder / "summary.json", SUMMARY, needed)
        return cls(summary, folder, read_tensors(folder / "model.safetensors"))

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
