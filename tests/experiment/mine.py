"""The experiment `mine`, which tests write and run, with runs as small as they can be."""

from __future__ import annotations

from fedhet.cli import main

SMALL = """
model: {hidden: [8]}
client: {epochs: 1}
partition: {clients: 3}
"""


def run(*lines: str) -> int:
    """Run it in this process, with these overrides; return the exit code."""
    return main.main(["experiment=mine", "hydra/launcher=basic", *lines])
