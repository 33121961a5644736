"""Garbage collection around imports, and the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedhet import __main__ as main
from fedhet.core.errors import ConfigError
from fedhet.runs.process import choose_device, direct_loopback

ROOT = Path(__file__).parents[2]
CODE = """
import gc
from fedhet.runs import process

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


NAMES = ("no_proxy", "NO_PROXY", "no_grpc_proxy")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["", "", ""], ["127.0.0.1,localhost,::1"] * 2),
        (["a.b, localhost", "", ""], ["a.b,localhost,127.0.0.1,::1"] * 2),
        (["", "a.b", "c"], [f"{host},127.0.0.1,localhost,::1" for host in ("a.b", "a.b", "c")]),
        (["a", "*", ""], ["a,127.0.0.1,localhost,::1", "*"]),
    ],
)
def test_this_machine_is_reached_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    found: list[str],
) -> None:
    for name, value in zip(NAMES, given, strict=True):
        monkeypatch.setenv(name, value)
        if not value:
            monkeypatch.delenv(name)
    expected = dict(zip(NAMES, found, strict=False))
    assert direct_loopback() == expected
    assert main.main(["--version"]) == 0  # what a command starts has its environment
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == expected
    assert direct_loopback() == expected
    assert direct_loopback("10.0.0.5")["no_proxy"] == f"{found[0]},10.0.0.5"


def test_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert choose_device("auto") == torch.device(device)
        assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("cuda") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device=cuda.* CUDA .*device=cpu"):
        choose_device("cuda")
