"""fedhet's own apps for `flwr run`, server_app.py and client_app.py, on a grid in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from app_grid import AppGrid
from contracts.runs import rows
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from own_sites import RUN, simulated, write_sites

import client_app
import server_app
from fedhet.core.errors import SUBMITTED, RunFailed
from fedhet.core.messages import STEPS
from fedhet.flower import apps
from fedhet.flower import transport as flower_server
from fedhet.runs.config import compose, sent

LINES = ["partition.clients=3", "rounds=2", "client.epochs=1", "figures=false"]
# Seconds, and how many steps a client has taken, which a real one does not tell.
OTHERS = {"seconds", "metrics"}


@pytest.fixture(autouse=True)
def _flower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(flower_server, "FAR_SECONDS", (0.001, 0.001))
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path / "states"))
    apps._cached_job.cache_clear()
    apps._cached_site.cache_clear()


class OwnGrid(AppGrid):
    """Nodes that execute client_app.py, and the run of server_app.py among them."""

    def __init__(self, folder: Path, *lines: str, nodes: int = 3) -> None:
        super().__init__(client_app.app, nodes)
        overrides = " ".join([*lines, f"hydra.run.dir={folder}"])
        self.context = Context(1, 1, {}, RecordDict(), {"overrides": overrides})

    def serve(self) -> None:
        server_app.main(self, self.context)


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """What two engines have in common of a row of rounds.jsonl."""
    assert set(row["metrics"]) <= {STEPS}
    return {name: value for name, value in row.items() if name not in OTHERS}


def test_the_rows_are_those_of_a_run_in_process(tmp_path: Path, launch: Callable[..., Any]) -> None:
    lines = ["method=scaffold", "plugin=[fednorm]", *LINES]
    expected = launch(*lines)
    OwnGrid(tmp_path / "run", *lines).serve()
    found = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert list(map(comparable, found)) == list(map(comparable, rows(expected)))


def of_sites(folder: Path, *lines: str) -> OwnGrid:
    grid = OwnGrid(folder / "run", *RUN, *lines)
    for context in grid.contexts.values():
        site = "abc"[int(context.node_config["partition-id"])]
        context.node_config.update(site=site, data=str(folder / f"{site}.npz"))
    return grid


def test_sites_of_their_own_data_say_what_the_strategy_needs(tmp_path: Path) -> None:
    write_sites(tmp_path)
    of_sites(tmp_path).serve()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["weights_sha256"] == simulated(tmp_path).summary["weights_sha256"]


def test_sites_that_do_not_join_leave_no_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_sites(tmp_path)
    grid = of_sites(tmp_path, "replies.join=0")
    del grid.contexts[70]
    with pytest.raises(RunFailed, match=r"waited 0 s .*sites \['a'\]"):
        grid.serve()
    assert "waited 0 s" in caplog.text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("submitted", [False, True])
def test_a_run_whose_nodes_do_not_join_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submitted: bool
) -> None:
    """engine=flwr, which has submitted it, reads the reason there, and Flower prints nothing."""
    grid = OwnGrid(tmp_path / "run", "method=fedavg", *LINES, "replies.join=0")
    del grid.contexts[70]
    if submitted:
        lines = ["method=fedavg", *LINES, "replies.join=0", f"hydra.run.dir={tmp_path}/run"]
        sent.save(compose(lines), tmp_path / "settings.json")
        monkeypatch.setenv(SUBMITTED, str(tmp_path / "settings.json"))
        grid.serve()
    else:
        with pytest.raises(RunFailed, match=r"waited 0 s .*nodes .*partition-id"):
            grid.serve()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and "waited 0 s for nodes" in summary["reason"]
