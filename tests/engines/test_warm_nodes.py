"""A real deployment whose nodes are `python -m fedhet deploy node`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from own_sites import RUN, simulated, write_sites
from real_sites import Sites, rounds, summary, wait_for

pytestmark = pytest.mark.deployment
HERE = Path(__file__).parent
FAULTY = [
    "method=fedavg",
    "plugin=[fednorm]",
    "plugin.fednorm._target_=faulty.Faulty",
    "plugin.fednorm.z_when=killed",
    "partition.clients=4",
    "client.epochs=1",
    "eval.clients=false",
    "on_failure=skip",
    "replies.max_lost=1",
    "rounds=3",
]


@pytest.mark.slow
def test_runs_with_changed_data_give_the_bytes_of_simulations_with_them(tmp_path: Path) -> None:
    """And no process is left when a SuperNode ends, however it ends."""
    home = tmp_path / "home"
    home.mkdir()
    write_sites(tmp_path)
    configs = [f'site="{site}" data="{tmp_path / site}.npz"' for site in "abc"]
    found = []
    with Sites(home, 3, configs=configs, warm=True) as sites:
        for name in ("first", "second"):
            folder = tmp_path / name
            run = sites.submit(*RUN, f"hydra.run.dir={folder}")
            assert sites.wait_end(run) == "finished:completed", sites.log(run)
            found.append(summary(folder)["weights_sha256"])
            assert found[-1] == simulated(tmp_path).summary["weights_sha256"]
            (tmp_path / "expected").rename(tmp_path / f"expected-{name}")
            arrays = dict(np.load(tmp_path / "a.npz"))
            np.savez(tmp_path / "a.npz", **arrays | {"x_train": arrays["x_train"][::-1]})
        assert len(sites.processes("app_process.py", 0)) == 2  # each has a run's data
        sites.nodes[0].kill()
        wait_for(lambda: not sites.processes(number=0), "the end of all of the node's processes")
        sites.nodes[1].send_signal(signal.SIGTERM)
        wait_for(lambda: not sites.processes(number=1), "the end of all of the node's processes")
    assert found[0] != found[1]


@pytest.mark.matrix
def test_a_client_that_is_killed_costs_its_client_that_round(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    variables = {
        "FEDHET_TRUST": "faulty",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    with Sites(home, variables=variables, warm=True) as sites:
        run = sites.submit(*FAULTY, f"hydra.run.dir={folder}")
        assert sites.wait_end(run) == "finished:completed", sites.log(run)
    assert [row["accepted"] for row in rounds(folder)] == [4, 3, 4]
    (failure,) = summary(folder)["failures"]
    assert "stopped responding" in failure["cause"], failure
