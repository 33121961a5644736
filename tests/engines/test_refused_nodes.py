"""Who may not take part in a deployment is refused, and nothing is sent there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from real_sites import Sites, free_ports, rounds, summary, wait_for

pytestmark = [pytest.mark.matrix, pytest.mark.deployment]
DAY = timedelta(days=1)
REFUSED = "Exit Code: 305"


def authority(folder: Path, name: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate authority, whose certificate is written to `<name>.crt`."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    usage = x509.KeyUsage(*[False] * 5, True, True, False, False)
    certificate = (
        _certificate(subject, subject, key.public_key(), DAY)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return certificate, key


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - 2 * DAY).not_valid_after(now + valid)


def link_options(folder: Path, *, valid: timedelta = DAY, host: str = "127.0.0.1") -> list[str]:
    """A certificate for the SuperLink, and the options with which it uses it."""
    ca, ca_key = authority(folder, "ca")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    certificate = (
        _certificate(subject, ca.subject, key.public_key(), valid)
        .add_extension(names, critical=False)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    return [
        "--enable-supernode-auth",
        *("--ssl-ca-certfile", str(folder / "ca.crt")),
        *("--ssl-certfile", str(folder / "server.pem")),
        *("--ssl-keyfile", str(folder / "server.key")),
    ]


def node_key(folder: Path, name: str) -> list[str]:
    """A key for a node, and the option with which it uses it."""
    path = folder / name
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)
    return ["--auth-supernode-private-key", str(path)]


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
