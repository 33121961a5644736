"""What the scripts share that write pages of docs/ from kept results."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedhet.config.lines import key_of
from fedhet.experiment import definition

AsWritten = argparse.RawDescriptionHelpFormatter


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


def check_experiment(folder: Path, record: dict[str, Any], name: str) -> None:
    """Refuse a folder whose runs are not those of an experiment's file.

    Args:
        folder: the folder.
        record: its experiment.json.
        name: the experiment's name.

    Raises:
        SystemExit: it holds another experiment, or this one with other settings.
    """
    if record["experiment"] != name:
        raise SystemExit(f"{folder} holds the experiment {record['experiment']}, not {name}")
    experiment = definition.read([f"experiment={name}"])
    assert experiment is not None
    others = [line for line in record["fixed"] if line not in experiment.fixed]
    others = [line for line in others if key_of(line) not in definition.WITHOUT_EFFECT]
    of_file = {
        "digest": experiment.digest,
        "axes": experiment.labels,
        "tune": experiment.tuning.record() if experiment.tuning else None,
    }
    of_file = json.loads(json.dumps(of_file))
    others += [f"another {key}" for key, value in of_file.items() if record[key] != value]
    if others:
        raise SystemExit(
            f"{folder}: its runs are not those of conf/experiment/{name}.yaml: {', '.join(others)}"
        )


def filled(text: str, block: str, lines: str, end: str) -> str:
    """The text of a page with `lines` between two comments.

    Raises:
        SystemExit: the page does not have these comments once.
    """
    pattern = re.compile(rf"({re.escape(block)}\n).*?({re.escape(end)})", re.DOTALL)
    text, found = pattern.subn(lambda m: f"{m[1]}{lines}\n{m[2]}", text)
    if found != 1:
        raise SystemExit(f"the page has {block} ... {end} {found} times; once is expected")
    return text


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
