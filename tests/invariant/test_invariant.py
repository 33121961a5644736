"""Every method's weights and scores are those that hashes.json keeps for this machine, bit for bit.

Processors and libraries differ in their last bits, so the hashes are kept for each kind of machine;
`python scripts/invariant --hashes` writes those of this one, after a change that should change
numbers. `python scripts/invariant BASE` compares two trees in ten times as many configurations.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fedhet.runs.record.outcome import Run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "invariant"
CASES = runpy.run_path(str(SCRIPT / "cases.py"))
FAST: dict[str, list[str]] = CASES["fast"](*CASES["names_in"](ROOT / "conf"))
VALUES = runpy.run_path(str(SCRIPT / "values.py"))
KIND: str = runpy.run_path(str(SCRIPT / "machine.py"))["kind"]()
KEPT: dict[str, str] | None = json.loads((Path(__file__).parent / "hashes.json").read_text()).get(
    KIND
)
# Where no hashes are kept: methods whose clients keep state, send more than weights, or both.
BETWEEN_ENGINES = ["fedavg", "scaffold", "fedgmm", "ditto"]

Launch = Callable[..., "Run"]


def test_hashes_are_kept_for_this_kind_of_machine() -> None:
    if KEPT is None:
        pytest.skip(f"no hashes are kept for {KIND}; engines are compared instead")


def digest(run: Run) -> str:
    """A hash of the weights after each step and of all scores, those of personal models too."""
    return str(VALUES["digest"](VALUES["read"](run.dir)))


@pytest.mark.parametrize("name", FAST if KEPT is not None else BETWEEN_ENGINES)
def test_the_weights_are_the_same(name: str, launch: Launch) -> None:
    found = digest(launch(*FAST[name]))
    if KEPT is None or name not in KEPT:  # `python scripts/invariant --hashes` adds it
        again = digest(launch(*FAST[name], "engine.workers=2"))
        assert found == again, "one and two processes compute different weights or scores"
        return
    assert found == KEPT[name], (
        f"{name} computes other weights or scores than before. If it should:"
        " `python scripts/invariant --hashes`, and say why in the commit"
    )
