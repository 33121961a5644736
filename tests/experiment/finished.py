"""An experiment that was run once, for the tests that only read what it leaves and what it says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiment.mine import SMALL

TUNED = f"""
rounds: 2{SMALL}
axes:
  method: {{FedAvg: method=fedavg, FedSGD: method=fedsgd}}
  seed: [0]
tune: {{seeds: [7], space: {{client.lr: [0.001, 0.3]}}}}
"""


@dataclass(frozen=True)
class Finished:
    """What is there.

    Attributes:
        folder: the experiment's folder.
        code: the exit code.
        out: what was printed.
        err: what was printed to stderr.
    """

    folder: Path
    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        """The content of experiment.json."""
        content: dict[str, Any] = json.loads((self.folder / "experiment.json").read_text())
        return content

    def summary(self, cell: dict[str, Any]) -> dict[str, Any]:
        """The summary of a cell of the record."""
        content: dict[str, Any] = json.loads(
            (self.folder / cell["folder"] / "summary.json").read_text()
        )
        return content
