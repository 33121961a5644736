"""A network between a site and the server that fails for a while."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import link_options
from flaky_network import FlakyNetwork
from real_sites import Sites, rounds, summary, wait_for

pytestmark = [pytest.mark.matrix, pytest.mark.deployment]
SECONDS = 30  # for which the network fails: longer than a step waits for its replies
ROUNDS = 7


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sites, FlakyNetwork]]:
    """A deployment with TLS, and the network through which its second site reaches the server."""
    home = tmp_path_factory.mktemp("flaky")
    options = link_options(home)
    options.remove("--enable-supernode-auth")
    trusted = ["--root-certificates", str(home / "ca.crt")]
    connection = f'root-certificates = "{home / "ca.crt"}"'
    running = Sites(home, tls=(options, trusted), connection=connection)
    with FlakyNetwork(running.port) as network:
        running.through[1] = network.port
        with running:
            yield running, network


@pytest.mark.parametrize("how", ["reset", "stalled"])
def test_a_network_that_fails_for_half_a_minute(
    tmp_path: Path, sites: tuple[Sites, FlakyNetwork], how: str
) -> None:
    """Its site's client fails meanwhile, and the same process serves the run again afterwards."""
    running, network = sites
    folder = tmp_path / "run"
    run = running.submit(
        *("method=scaffold", "client.lr=.1", "partition.clients=2", "eval.clients=false"),
        *(f"rounds={ROUNDS}", "on_failure=skip", "replies.max_lost=1", "replies.bad_steps=7"),
        *("replies.deadline=20", "replies.grace=5", f"hydra.run.dir={folder}"),
    )
    wait_for(lambda: len(rounds(folder)) >= 2, "two rounds")
    before = network.hit
    network.fail(how, SECONDS)
    assert network.hit > before
    assert running.wait_end(run) == "finished:completed"
    rows = rounds(folder)
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
    failures = [(one["step"], one["pid"], one["reason"]) for one in summary(folder)["failures"]]
    assert (3, 1, "late") in failures
    assert any(row["accepted"] == 2 for row in rows[3:])
    assert summary(folder)["status"] == "ok"
    assert running.nodes[1].poll() is None
