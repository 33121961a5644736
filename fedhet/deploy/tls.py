"""TLS as Flower uses it: who is trusted, and which names a certificate must have."""

from __future__ import annotations

import http.client
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

SECONDS = 10.0  # for the server to answer


class Answer(NamedTuple):
    """What a server has answered.

    Attributes:
        status: HTTP's status of /health; 200 from a SuperLink.
        date: the server's time, or None if it did not say.
        asked: this machine's time, in the middle between question and answer.
    """

    status: int
    date: datetime | None
    asked: datetime


def client_context(ca: Path) -> ssl.SSLContext:
    """What a client trusts that knows `ca` alone, as strictly as Python 3.13 and later do it.

    Raises:
        OSError: the file cannot be read, or is no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(ca)
    return context


def check_names(certificate: Path, key: Path, ca: Path, names: tuple[str, ...]) -> None:
    """Shake hands with oneself, in memory, under each of the names.

    Raises:
        OSError: a file cannot be read, or the key is not that of the certificate.
        ssl.SSLError: the client refuses the certificate: an OSError, too.
    """
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_cert_chain(certificate, key)
    for name in names:
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = client_context(ca).wrap_bio(down, up, server_hostname=name)
        server = accepting.wrap_bio(up, down, server_side=True)
        for side in (client, server, client):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue


def ask(host: str, port: int, ca: Path) -> Answer:
    """Ask a server whether it is well.

    Raises:
        OSError: it cannot be reached, or its certificate is refused.
        http.client.HTTPException: it does not speak HTTP.
    """
    context = client_context(ca)
    connection = http.client.HTTPSConnection(host, port, timeout=SECONDS, context=context)
    try:
        connection.connect()
        begin = datetime.now(UTC)
        connection.request("HEAD", "/health")
        response = connection.getresponse()
        end = datetime.now(UTC)
        date = response.getheader("Date")
    finally:
        connection.close()
    try:
        said = None if date is None else parsedate_to_datetime(date)
    except ValueError:
        said = None
    return Answer(response.status, said, begin + (end - begin) / 2)
