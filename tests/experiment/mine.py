"""The experiment `mine`, which tests write and run, with runs as small as they can be."""

from __future__ import annotations

from pathlib import Path

from fedhet import __main__ as main
from fedhet.runs.config.lines import key_of

SMALL = """
model: {hidden: [8]}
client: {epochs: 1}
partition: {clients: 3}
"""


def run(*lines: str) -> int:
    """Run it with these overrides, in this process unless one names a launcher; the exit code."""
    launcher = [] if "hydra/launcher" in map(key_of, lines) else ["hydra/launcher=basic"]
    return main.main(["experiment=mine", *launcher, *lines])


def written() -> dict[str, int]:
    """The cells that are there, each with the time of its summary in ns."""
    files = sorted(Path("experiments/mine/cells").glob("*/summary.json"))
    return {file.parent.name: file.stat().st_mtime_ns for file in files}
