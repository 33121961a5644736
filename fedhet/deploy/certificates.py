"""The certificate authority, the server's certificate, and the keys of nodes.

All keys are NIST P-384: Flower reads node keys as `ssh-keygen -t ecdsa -b 384` writes them.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedhet.core.errors import ConfigError, DataError
from fedhet.record.files import unwritable

CA_DAYS = 3650
SERVER_DAYS = 365
PRIVATE = 0o600
# The SuperLink's own helper connects to 127.0.0.1, and refuses a certificate without that name.
LOCAL_NAMES = ("127.0.0.1", "localhost")
_CLOCKS = timedelta(hours=1)  # how far behind a site's clock may be for a new certificate
_DNS_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


class Authority(NamedTuple):
    """A certificate authority: its certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def check_host(name: str, host: str) -> str:
    """Return a host name or IP address.

    Raises:
        ConfigError: it is neither.
    """
    if not _DNS_NAME.fullmatch(host) and not _is_address(host):
        raise ConfigError(
            f"{name} {host!r}: must be a host name such as server.example.org, or an IP address,"
            " without scheme and port"
        )
    return host


def new_authority() -> Authority:
    """A new authority, for one deployment."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedhet deployment CA")])
    usage = _usage(certificates=True)
    certificate = (
        _builder(name, name, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return Authority(certificate, key)


def new_server_certificate(
    authority: Authority, host: str, days: int = SERVER_DAYS
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate for the SuperLink, and its key.

    Args:
        authority: who signs it.
        host: the name or address by which sites reach the server; the certificate has those of
            the machine itself as well.
        days: how long it is valid.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
    issuer = authority.certificate
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _builder(name, issuer.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_names(host), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        )
    )
    return builder.sign(authority.key, hashes.SHA384()), key


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + timedelta(days=days)) - _CLOCKS)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _names(host: str) -> x509.SubjectAlternativeName:
    names = dict.fromkeys((host, *LOCAL_NAMES))
    return x509.SubjectAlternativeName(
        [
            x509.IPAddress(ipaddress.ip_address(name)) if _is_address(name) else x509.DNSName(name)
            for name in names
        ]
    )


# ---- files
def write_private(path: Path, content: bytes) -> None:
    """Write a new file that its owner alone may read.

    Raises:
        WriteError: it cannot be written, or exists.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError as error:
        raise unwritable(path, error) from error


def pem(certificate: x509.Certificate) -> bytes:
    """The certificate as a PEM file has it."""
    return certificate.public_bytes(Encoding.PEM)


def pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The key of an authority or a server as a PEM file has it."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def new_node_key(comment: str) -> tuple[bytes, bytes]:
    """A node's private and public key, as OpenSSH writes them."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return private, public + f" {comment}\n".encode()


def read_certificate(path: Path) -> x509.Certificate:
    """Read a PEM certificate.

    Raises:
        DataError: the file is missing, or is no certificate.
    """
    content = _read(path)
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError as error:
        raise DataError(f"{path} is not a certificate in PEM format") from error


def read_key(path: Path, *, ssh: bool = False) -> ec.EllipticCurvePrivateKey:
    """Read a private key of an elliptic curve: of a node (`ssh`), else a PEM file.

    Raises:
        DataError: the file is missing, or is no such key.
    """
    content = _read(path)
    expected = f"an elliptic-curve key in {'OpenSSH' if ssh else 'PEM'} format, without a password"
    try:
        key = (load_ssh_private_key if ssh else load_pem_private_key)(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataError(f"{path} is not {expected}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DataError(f"{path} is not {expected}")
    return key


def read_authority(folder: Path) -> Authority:
    """Read ca.crt and ca.key.

    Raises:
        DataError: one of them is missing or damaged, or they do not belong together.
    """
    authority = Authority(read_certificate(folder / "ca.crt"), read_key(folder / "ca.key"))
    if authority.certificate.public_key() != authority.key.public_key():
        raise DataError(f"{folder / 'ca.key'} is not the key of ca.crt beside it")
    return authority


def names_of(certificate: x509.Certificate) -> Sequence[str]:
    """The host names and addresses for which a certificate is valid."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return names.get_values_for_type(x509.DNSName) + addresses


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
