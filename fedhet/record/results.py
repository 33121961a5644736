"""A finished run, read back from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedhet.trees import Tree


@dataclass
class Run:
    """A run that has ended.

    Attributes:
        summary: the content of summary.json.
        dir: the run folder.
        weights: the final global model's tensors.
    """

    summary: dict[str, Any]
    dir: Path
    weights: Tree = field(repr=False)

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read the run from its folder."""
        import safetensors.torch

        summary = json.loads((folder / "summary.json").read_text())
        return cls(summary, folder, safetensors.torch.load_file(folder / "model.safetensors"))
