"""What differs between runs that no experiment names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from fedhet.config.aliases import unfolded
from fedhet.record.summary import method_name
from fedhet.report.folders import OF_THE_LABEL, FoundRun


def scalar(value: Any) -> Any:
    """The value in a form that a column can hold."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def differing(cells: Sequence[FoundRun]) -> dict[str, list[Any]]:
    """The axes of runs that no experiment names, which are also entered into the cells."""
    readable = [cell for cell in cells if cell.summary]
    names = dict.fromkeys(
        key for cell in readable for key in cell.overrides if key not in (*OF_THE_LABEL, "seed")
    )
    for cell in readable:
        cell.axes = {"method": method_name(cell.summary)}
        cell.axes["dataset"] = cell.summary.get("dataset") or "a Task"
        cell.axes |= {
            name: cell.overrides[name] if name in cell.overrides else _configured(cell, name)
            for name in names
        }
        cell.axes["seed"] = cell.summary["seed"]
    every = {
        axis: list(dict.fromkeys(cell.axes[axis] for cell in readable))
        for axis in (readable[0].axes if readable else ())
    }
    kept = {
        axis: values
        for axis, values in every.items()
        if len(values) > 1 or axis in ("method", "seed")
    }
    for cell in readable:
        cell.axes = {axis: cell.axes[axis] for axis in kept}
    if "seed" in kept:
        kept["seed"] = sorted(kept["seed"])
    return kept


def _configured(cell: FoundRun, name: str) -> Any:
    """The value that a setting had without an override, from the run's config.yaml."""
    try:
        node = yaml.safe_load(unfolded((cell.folder / "config.yaml").read_text(encoding="utf-8")))
        for part in name.split("."):
            node = node[part]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return "default"
    if isinstance(node, dict):
        return node.get("name", "default")
    return scalar(node)
