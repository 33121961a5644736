"""Garbage collection around imports, and the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedhet.core.errors import ConfigError
from fedhet.process import choose_device

ROOT = Path(__file__).parents[2]
CODE = """
import gc
from fedhet import process

class Loud:
    def __del__(self):
        print("collected")

try:
    with process.imports():
        assert not gc.isenabled()
        raise ImportError
except ImportError:
    assert gc.isenabled() and gc.get_freeze_count() > 0
loud = Loud()
loud.itself = loud
del loud
"""


@pytest.mark.slow
def test_triton_reports_no_leaks_at_the_end(tmp_path: Path) -> None:
    """torch.optim imports it; it reports whatever was not collected as a leak."""
    command = [
        sys.executable,
        "-m",
        "fedhet",
        "rounds=1",
        "client=adam",
        "eval.clients=false",
        "partition.clients=2",
        f"hydra.run.dir={tmp_path}/run",
    ]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "leaked" not in process.stderr


def test_nothing_is_collected_while_importing_nor_at_the_end() -> None:
    process = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert process.stdout == process.stderr == ""


def test_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert choose_device("auto") == torch.device(device)
        assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("cuda") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device=cuda, but torch finds no CUDA device"):
        choose_device("cuda")
