"""Certificates for a SuperLink, and keys for SuperNodes, as docs/deployment.md makes them."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


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
