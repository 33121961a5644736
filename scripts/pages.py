"""What the scripts share that write pages of docs/ from kept results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Finished(NamedTuple):
    """A cell of an experiment that has ended, well or not.

    Attributes:
        cell: its entry in experiment.json.
        folder: its folder.
        code: the version of the code that ran it, as `Code.text` takes it.
        summary: the content of its summary.json.
    """

    cell: dict[str, Any]
    folder: Path
    code: dict[str, Any]
    summary: dict[str, Any]


def finished(folder: Path, record: dict[str, Any]) -> Iterator[Finished]:
    """The finished cells of an experiment's folder, whose experiment.json is `record`."""
    for cell in record["cells"]:
        home = folder / cell["folder"]
        state = home / "cell.json"
        known = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
        if known.get("status") == "finished":
            summary = json.loads((home / "summary.json").read_text(encoding="utf-8"))
            yield Finished(cell, home, known.get("code", {}), summary)


def head(names: Sequence[str]) -> str:
    """The first two lines of a table."""
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def write_or_check(root: Path, page: str, text: str, script: str, *, check: bool) -> int:
    """Write a page, or with `check` say whether it is up to date; return 1 if it is not."""
    path = root / page
    if not check:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{page} is not up to date: python scripts/{script}")
    return 1
