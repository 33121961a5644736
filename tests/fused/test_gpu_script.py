"""scripts/gpu.sh from its first line to its last, at tiny sizes on the pretended accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from contracts.test_compositions import METHODS

ROOT = Path(__file__).parents[2]
MISSING = ["flwr", "hydra", "omegaconf", "pandas", "ray", "rich"]


@pytest.mark.slow
def test_the_script_needs_no_gpu_and_few_packages(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "missing.whl", "w") as wheel:
        for name in MISSING:
            wheel.writestr(f"{name}.py", "raise ImportError('there is no such package')")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [ROOT / "scripts" / "gpu.sh", "--pretend", tmp_path],
        env={**os.environ, "PATH": path, "OUT": str(tmp_path)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["device"] == "pretended"
    methods = {line["method"]: line for line in record["lines"] if line["part"] == "methods"}
    assert set(methods) == set(METHODS) and all(line["ok"] for line in methods.values())
    cnn, g2, g1 = record["lines"][len(methods) :]
    assert [cnn["part"], g2["part"], g1["part"]] == ["CNN", "G2", "G1"]
    assert cnn["fused steps/s"] > 0 and cnn["alone steps/s"] > 0 and cnn["goal steps/s"] > 0
    assert all(line[name] > 0 for line in (g1, g2) for name in ("floor", "alone", "fused"))
