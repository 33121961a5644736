"""The sweep or experiment to which a run folder belongs, as its files tell on every machine."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

DEPTH = 3  # how far below its folder the runs of a sweep may lie
A_TIME = re.compile(r"\d\d-\d\d-\d\d")


def sweep_of(folder: Path) -> Path | None:
    """The folder of the sweep or experiment to which a run folder belongs; None for a run alone.

    A sweep writes multirun.yaml, and an experiment its experiment.json, before the first run
    begins.
    """
    marks = ("experiment.json", "multirun.yaml")
    above = folder.resolve().parents[:DEPTH]
    return next((up for up in above if any((up / mark).is_file() for mark in marks)), None)


def group_of(sweep: Path | None) -> str | None:
    """The name of an experiment, or that of the sweep's folder, with the day if it is a time."""
    if sweep is None:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(
            json.loads((sweep / "experiment.json").read_text(encoding="utf-8"))["experiment"]
        )
    return f"{sweep.parent.name}/{sweep.name}" if A_TIME.fullmatch(sweep.name) else sweep.name
