"""Imports of a process that is ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import gc
from fedhet import process

class Told:
    def __del__(self):
        print("collected")

try:
    with process.imports():
        assert not gc.isenabled()
        raise ImportError
except ImportError:
    assert gc.isenabled() and gc.get_freeze_count() > 0
told = Told()
told.itself = told
del told
"""


def test_triton_finds_no_leaks_at_the_end(tmp_path: Path) -> None:
    """torch.optim imports it; what is left uncollected is told as a leak."""
    command = [
        sys.executable,
        "-m",
        "fedhet",
        "rounds=1",
        "client=adam",
        "eval.clients=false",
        "partition.clients=2",
        "hydra.run.dir=run",
    ]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "leaked" not in found.stderr


def test_nothing_is_collected_while_importing_nor_at_the_end() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert found.stdout == found.stderr == ""
