"""Who may not take part in a deployment is refused, and nothing is sent there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import DAY, authority, link_options, node_key
from ports import free_ports
from real_sites import Sites, rounds, summary, wait_for

pytestmark = [pytest.mark.matrix, pytest.mark.deployment]
REFUSED = "Exit Code: 305"


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    """A SuperLink with TLS that asks nodes for registered keys; no node has joined."""
    home = tmp_path_factory.mktemp("tls")
    authority(home, "other")
    connection = f'root-certificates = "{home / "ca.crt"}"'
    with Sites(home, 0, tls=(link_options(home), []), connection=connection) as running:
        running.count = 1
        running.node_ports = free_ports(1)
        yield running


def refused(sites: Sites, *options: str) -> str:
    """Start a node and wait until it has given up; return its log."""
    log = sites.home / "node0.log"
    log.unlink(missing_ok=True)
    sites.start_node(0, *options)
    assert wait_for(lambda: sites.nodes[0].poll(), "the node to give up") != 0
    return log.read_text(errors="replace")


def test_an_unregistered_key(sites: Sites) -> None:
    trusted = ["--root-certificates", str(sites.home / "ca.crt")]
    assert REFUSED in refused(sites, *trusted, *node_key(sites.home, "unknown"))


def test_no_key(sites: Sites) -> None:
    assert REFUSED in refused(sites, "--root-certificates", str(sites.home / "ca.crt"))


def test_another_authority(sites: Sites) -> None:
    key = node_key(sites.home, "registered")
    sites.flwr("supernode", "register", f"{key[1]}.pub", "here", "--name", "registered")
    other = ["--root-certificates", str(sites.home / "other.crt")]
    assert REFUSED in refused(sites, *other, *key)


def test_a_node_without_tls_gets_nothing(tmp_path: Path, sites: Sites) -> None:
    """It tries again for ever; a run meanwhile finds no node, and says so."""
    sites.start_node(0, "--insecure")
    folder = tmp_path / "run"
    run = sites.submit("method=fedavg", "replies.join=10", f"hydra.run.dir={folder}")
    assert sites.wait_end(run) == "finished:failed"
    assert "0 of an unknown number have joined" in summary(folder)["reason"]
    assert rounds(folder) == []
    for process in sites.processes(number=0):
        process.kill()


@pytest.mark.parametrize(
    "certificate",
    [{"valid": -DAY}, {"host": "192.0.2.7"}],
    ids=["expired", "of-another-host"],
)
def test_a_server_whose_certificate_is_not_valid(
    tmp_path: Path, certificate: dict[str, Any]
) -> None:
    """A node that trusts its authority does not talk to it."""
    options = link_options(tmp_path, **certificate)
    with Sites(tmp_path, 0, tls=(options, [])) as sites:
        sites.count, sites.node_ports = 1, free_ports(1)
        trusted = ["--root-certificates", str(tmp_path / "ca.crt")]
        assert REFUSED in refused(sites, *trusted, *node_key(tmp_path, "node"))
