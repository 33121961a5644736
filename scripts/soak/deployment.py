"""Many SuperNodes on this machine, two of which are killed and started again during a run."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

# The tests of deployments kill and start processes in the same way.
sys.path.append(str(Path(__file__).parents[2] / "tests"))

from engines import real_sites
from engines.real_sites import Sites, rounds, summary, wait_for

KILLED = (1, 2)
WAIT_SECONDS = 1200  # for one thing; the tests have fewer nodes and wait less
AGAIN_SECONDS = 60.0  # after which a SuperLink has lost a killed node, as in the kit's units


def soak(nodes: int, steps: int) -> dict[str, Any]:
    """Train SCAFFOLD at `nodes` sites, one client each, that run `fedhet deploy node`."""
    real_sites.SECONDS = WAIT_SECONDS
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        folder = home / "run"
        with Sites(home, nodes, warm=True) as sites:
            began = time.perf_counter()
            run = sites.submit(
                "method=scaffold",
                "client.lr=.1",
                f"partition.clients={nodes}",
                f"rounds={steps}",
                "eval.clients=false",
                "on_failure=skip",
                "replies.max_lost=1",
                "replies.deadline=120",
                f"hydra.run.dir={folder}",
            )
            wait_for(lambda: len(rounds(folder)) >= 2, "two steps")
            for number in KILLED:
                sites.kill("", number)
            time.sleep(AGAIN_SECONDS)
            for number in KILLED:
                sites.start_node(number)
            status = sites.wait_end(run)
            seconds = time.perf_counter() - began
            alive = [number for number, one in sites.nodes.items() if one.poll() is None]
            of_nodes = [len(sites.processes(number=number)) for number in range(nodes)]
            everything = sites.processes()
            gib = sum(one.memory_full_info().pss for one in everything) / 2**30
            servers = sites.processes("flwr-serverapp")
        _, left = psutil.wait_procs(everything, timeout=10)  # the block has killed its own
        rows = rounds(folder)
        return {
            "status": status,
            "steps": len(rows),
            "accepted": [row["accepted"] for row in rows],
            "causes": sorted({f["cause"][:120] for row in rows for f in row["failures"]}),
            "accuracy": summary(folder)["accuracy"]["last"],
            "SuperNodes at the end": len(alive),
            "processes of each": [min(of_nodes), max(of_nodes)],  # 4 while no client works
            "server apps left": len(servers),
            "GiB": round(gib, 1),
            "left after the end": len(left) + len(sites.processes()),
            "seconds": round(seconds),
        }
