"""Workers on a machine with a GPU, in runs on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from house_rules.source import ROOT

# A second device, made known before autograd is first used, has the effect of a GPU: autograd
# starts a thread for it with the first gradient, and then no forked process can compute one.
RUNS = """
import torch
from torch.utils import backend_registration

backend_registration._setup_privateuseone_for_python_backend("pretend")

import fedhet
from fedhet.runs.process import thread_names

hashes = []
for workers in (2, 1, 2):
    lines = ["method=fedavg", "rounds=1", "client.epochs=1", "partition.clients=3", "device=cpu"]
    lines += [f"engine.workers={workers}", f"hydra.run.dir=run-{len(hashes)}"]
    hashes.append(fedhet.run(lines).summary["weights_sha256"])
assert len(set(hashes)) == 1
assert any(name.startswith("pt_autograd") for name in thread_names())
"""


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="only there are workers forked")
def test_workers_train_after_a_run_in_this_process(tmp_path: Path) -> None:
    """They are not forked once autograd has threads."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RUNS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
