"""The certificate authority, the server's certificate, and the keys of nodes.

All keys are on the curve NIST P-384. Flower reads node keys in the format of
`ssh-keygen -t ecdsa -b 384`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

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
from fedhet.data.storage import written

CA_DAYS = 3650
SERVER_DAYS = 365
PRIVATE = 0o600
# The SuperLink's own helper process connects to 127.0.0.1. It refuses a certificate without this
# name.
LOCAL_NAMES = ("127.0.0.1", "localhost")
_CLOCKS = timedelta(hours=1)  # a new certificate is valid even if a site's clock is so far behind
_DNS_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
T = TypeVar("T")


class Authority(NamedTuple):
    """A certificate authority: its certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def check_host(name: str, host: str) -> str:
    """Return `host` after checking that it is a host name or IP address.

    Raises:
        ConfigError: it is neither.
    """
    _general_name(host, name)
    return host


def new_authority() -> Authority:
    """Return a new certificate authority for one deployment."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedhet deployment CA")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _builder(name, name, key.public_key(), CA_DAYS, authority=True)
    signed = builder.add_extension(identifier, critical=False).sign(key, hashes.SHA384())
    return Authority(signed, key)


def new_server_certificate(
    authority: Authority, host: str, days: int = SERVER_DAYS
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return a certificate for the SuperLink, and its key.

    Args:
        authority: the authority that signs the certificate.
        host: the name or address by which sites reach the server; the certificate also has
            LOCAL_NAMES.
        days: how long the certificate is valid.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    issuer = authority.certificate
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = _builder(_name(host[:64]), issuer.subject, key.public_key(), days, authority=False)
    for extension in (
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName(map(_general_name, dict.fromkeys((host, *LOCAL_NAMES)))),
        x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
    ):
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(authority.key, hashes.SHA384()), key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    days: int,
    *,
    authority: bool,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + timedelta(days=days)) - _CLOCKS)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(authority, 0 if authority else None), critical=True)
        .add_extension(usage, critical=True)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general_name(host: str, setting: str = "host") -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError as error:
        if _DNS_NAME.fullmatch(host):
            return x509.DNSName(host)
        raise ConfigError(
            f"{setting} {host!r}: must be a host name such as server.example.org, or an IP"
            " address, without scheme (https://) and port"
        ) from error


# ---- files
def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read.

    Raises:
        WriteError: the file cannot be written.
    """
    with written(path) as part:
        part.touch(PRIVATE, exist_ok=False)
        part.write_bytes(content)


def pem(certificate: x509.Certificate) -> bytes:
    """Return the certificate in PEM format."""
    return certificate.public_bytes(Encoding.PEM)


def pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the key of an authority or a server in PEM format."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def new_node_key(comment: str) -> tuple[bytes, bytes]:
    """Return a node's private and public key in OpenSSH format."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return private, public + f" {comment}\n".encode()


def read_certificate(path: Path) -> x509.Certificate:
    """Read a PEM certificate.

    Raises:
        DataError: the file is missing, or is not a certificate.
    """
    return _read(path, x509.load_pem_x509_certificate, "a certificate in PEM format")


def read_key(path: Path, *, ssh: bool = False) -> ec.EllipticCurvePrivateKey:
    """Read an elliptic-curve private key, in OpenSSH format (`ssh`, for nodes) or in PEM format.

    Raises:
        DataError: the file is missing, or is not such a key.
    """

    def load(content: bytes) -> ec.EllipticCurvePrivateKey:
        key = (load_ssh_private_key if ssh else load_pem_private_key)(content, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError
        return key

    form = "OpenSSH" if ssh else "PEM"
    return _read(path, load, f"an elliptic-curve key in {form} format, without a password")


def read_authority(folder: Path) -> Authority:
    """Read ca.crt and ca.key.

    Raises:
        DataError: one of them is missing or damaged, or they do not belong together.
    """
    authority = Authority(read_certificate(folder / "ca.crt"), read_key(folder / "ca.key"))
    if authority.certificate.public_key() != authority.key.public_key():
        raise DataError(f"{folder / 'ca.key'} is not the key of {folder / 'ca.crt'}")
    return authority


def _read(path: Path, load: Callable[[bytes], T], expected: str) -> T:
    try:
        return load(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataError(f"{path} is not {expected}") from error
