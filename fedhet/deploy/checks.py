"""`deploy check`: whether a server or a site is ready, one line for each check."""

from __future__ import annotations

import http.client
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from fedhet.core.errors import ConfigError, DataError, clean
from fedhet.data.forms import read_object
from fedhet.deploy import certificates
from fedhet.deploy.folders import PLACEHOLDER, ServerFolder, SiteFolder, split_address, versions

RENEWAL = timedelta(days=14)  # a certificate that expires within this time is reported
# Flower refuses a node if its clock is more than 5 s ahead of the server's clock, or 305 s behind.
# The limits are a little smaller, because HTTP's date has only whole seconds.
AHEAD, BEHIND = 4, 300
NODE_CURVES = ("secp256r1", "secp384r1", "secp521r1")  # the curves that Flower accepts
RENEW = "the operator makes a new certificate with `deploy init --renew`"
SECONDS = 10.0  # a server must answer within this time


def checks(
    place: ServerFolder | SiteFolder, overrides: Sequence[str], disk_gb: float
) -> Iterator[tuple[str, bool, str]]:
    """Check a server or a site.

    Yields (name of the check, whether it passed, text): the text says what was found, or what is
    wrong and what to do.

    Args:
        place: the server or the site.
        overrides: the overrides of a run; the check then reads the run's data. None given: the
            check only opens a site's data.
        disk_gb: the free space needed for the state, in GB of 10^9 bytes.
    """
    folder, port = place.folder, place.port
    steps: dict[str, Callable[[], str]] = {"secrets": partial(_secrets, folder)}
    if isinstance(place, ServerFolder):
        steps |= {
            "key": partial(_mode, folder / "server.key"),
            "certificate": partial(_server_certificate, place),
            "port": partial(_port, port, "SuperLink", place.listen, folder / "ca.crt"),
        }
        if overrides:
            steps["data"] = partial(_server_data, overrides)
    else:
        steps |= {
            "key": partial(_node_key, folder / "node.key"),
            "certificate": partial(_dates, folder / "ca.crt"),
            "server": partial(_server, place),
            "port": partial(_port, port, "SuperNode", "127.0.0.1", None),
            "data": partial(_data, place, overrides),
        }
    steps["versions"] = partial(_versions, folder)
    steps["disk"] = partial(_disk, place.state, disk_gb)
    for name, step in steps.items():
        try:
            yield name, True, step()
        except (ConfigError, DataError, ImportError, OSError) as error:
            yield name, False, clean(str(error))


# ---- keys and certificates
def _secrets(folder: Path) -> str:
    if (folder / "ca.key").exists():
        raise DataError(
            f"only the operator may have {folder / 'ca.key'}, because anyone who has it can pretend"
            " to be the server; delete it here, and if others could read it, make a new deployment"
        )
    return "the authority's key is not here, as it should be"


def _mode(path: Path) -> str:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise DataError(f"{path} has mode {mode:04o}, so others can read it: chmod 600 {path}")
    return f"only its owner can read {path.name}"


def _node_key(path: Path) -> str:
    text = _mode(path)
    curve = certificates.read_key(path, ssh=True).curve.name
    if curve not in NODE_CURVES:
        raise DataError(
            f"{path} is a key on the curve {curve}; Flower accepts {', '.join(NODE_CURVES)}"
        )
    return f"{text}, {curve}"


def _dates(path: Path) -> str:
    """Check a certificate's dates, and describe when it expires."""
    certificate = certificates.read_certificate(path)
    now = datetime.now(UTC)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        raise DataError(
            f"{path} is not valid before {begin:%Y-%m-%d %H:%M} UTC: check this machine's clock"
        )
    if end < now + RENEWAL:
        expires = "has expired" if end < now else "expires"
        raise DataError(f"{path} {expires} on {end:%Y-%m-%d}: {RENEW}")
    return f"{path.name} is valid until {end:%Y-%m-%d}"


def _server_certificate(place: ServerFolder) -> str:
    certificate, key, ca = (place.folder / name for name in ("server.pem", "server.key", "ca.crt"))
    text = _dates(certificate)
    _dates(ca)
    host, _ = split_address("server", place.server)
    names = tuple(dict.fromkeys((host, *certificates.LOCAL_NAMES)))
    try:
        check_names(certificate, key, ca, names)
    except ssl.SSLCertVerificationError as error:
        raise DataError(
            f"{certificate}: {error.verify_message} (it needs {', '.join(names)}): {RENEW}"
        ) from error
    except ssl.SSLError as error:
        raise DataError(f"{certificate} and {key} do not belong together: {error}") from error
    return f"{text}, for {', '.join(names)}"


def check_names(certificate: Path, key: Path, ca: Path, names: Sequence[str]) -> None:
    """Do a TLS handshake in memory, between a client and a server, under each of the names.

    Raises:
        OSError: a file cannot be read, or the key does not fit the certificate.
        ssl.SSLError: the client refuses the certificate. This is an OSError, too.
    """
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_cert_chain(certificate, key)
    for name in names:
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = client_context(ca).wrap_bio(down, up, server_hostname=name)
        server = accepting.wrap_bio(up, down, server_side=True)
        for side in (client, server, client):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()


def client_context(ca: Path) -> ssl.SSLContext:
    """Return a client's TLS context that trusts only `ca`, with the strict checks of Python 3.13.

    Raises:
        OSError: the file cannot be read, or is not a certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(ca)
    return context


# ---- the network
def _port(port: int, program: str, host: str, ca: Path | None) -> str:
    """Check that a port is free, or held by the program (by TLS, if `ca` is given)."""
    if not (process := holder(port)):
        with socket.create_server((host, port)):
            return f"{port} is free on {host}"
    try:
        status, _ = _ask("127.0.0.1", port, ca)
    except (OSError, http.client.HTTPException) as error:
        status = error
    if status != http.HTTPStatus.OK:
        raise DataError(
            f"{port} is held by {process}; it is another program, or a {program} with another"
            f" certificate ({status}): end it, or choose another port"
        )
    return f"{port} is held by a running {program}"


def _ask(host: str, port: int, ca: Path | None) -> tuple[Any, float | None]:
    """Return the status of a server's /health, and by how much this clock is ahead of its date.

    The second value, in seconds, is None if the answer has no date.

    Args:
        host: the server's name or address.
        port: the server's port.
        ca: the certificate of the server's authority; None: without TLS.
    """
    connection = (
        http.client.HTTPConnection(host, port, timeout=SECONDS)
        if ca is None
        else http.client.HTTPSConnection(host, port, timeout=SECONDS, context=client_context(ca))
    )
    with closing(connection):
        connection.connect()
        begin = datetime.now(UTC)
        connection.request("HEAD", "/health")
        response = connection.getresponse()
        asked = begin + (datetime.now(UTC) - begin) / 2
        date = response.getheader("Date", "")
    try:
        # HTTP's date is rounded down to whole seconds, by half a second on average.
        return response.status, (asked - parsedate_to_datetime(date)).total_seconds() - 0.5
    except ValueError:
        return response.status, None


def holder(port: int) -> str:
    """Return which process listens on a port of this machine; "" if none does."""
    with socket.socket() as probe:
        probe.settimeout(SECONDS)
        if probe.connect_ex(("127.0.0.1", port)):
            return ""
    with suppress(psutil.Error):  # the process is hidden, or has ended meanwhile
        for conn in psutil.net_connections("tcp"):
            if conn.status == psutil.CONN_LISTEN and conn.laddr.port == port and conn.pid:
                line = " ".join(psutil.Process(conn.pid).cmdline())
                return f"process {conn.pid} ({clean(line, 100)})"
    return "a process of another user"


def _server(place: SiteFolder) -> str:
    """Check that the server answers, that its certificate is right, and that its clock agrees."""
    try:
        status, skew = _ask(*split_address("server", place.server), place.folder / "ca.crt")
    except ssl.SSLCertVerificationError as error:
        raise DataError(
            f"the certificate of {place.server} is refused: {error.verify_message}; check this"
            f" machine's clock and `server` in site.toml, or {RENEW}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{place.server} cannot be reached ({error}): is the SuperLink running, and do the"
            " firewalls on both sides let this machine connect to it?"
        ) from error
    if status != http.HTTPStatus.OK or skew is None:
        raise DataError(
            f"{place.server} is no SuperLink: it answers with status {status}"
            f"{' and without a date' if skew is None else ''}"
        )
    if not -BEHIND < skew < AHEAD:
        direction = "ahead of" if skew > 0 else "behind"
        raise DataError(
            f"this machine's clock is {abs(skew):.0f} s {direction} the clock of {place.server};"
            f" Flower accepts {AHEAD} s ahead and {BEHIND} s behind: synchronise both clocks with a"
            " time server (NTP)"
        )
    return (
        f"{place.server} answers, its certificate is signed by this deployment's authority, and its"
        f" clock differs by {abs(skew):.0f} s"
    )


# ---- this machine
def _versions(folder: Path) -> str:
    here, there = versions(), read_object(folder / "versions.json")

    def counts(found: dict[str, Any], name: str) -> str:
        """Return the part that must be equal: the first two numbers of Python's version, or all."""
        return ".".join(str(found.get(name)).split(".")[: 2 if name == "python" else None])

    wrong = [
        f"{name} is {here[name] or 'not installed'}, but the operator has {there.get(name)}"
        for name in here
        if counts(here, name) != counts(there, name)
    ]
    if wrong:
        raise DataError(f"{'; '.join(wrong)}: install the same versions")
    return ", ".join(f"{name} {version}" for name, version in here.items())


def _disk(state: Path, gigabytes: float) -> str:
    existing = next(path for path in (state, *state.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    if free < gigabytes:
        raise DataError(
            f"{existing} has {free:.1f} GB free; free {gigabytes:g} GB, or require less by --disk"
        )
    return f"{free:.1f} GB free in {existing}"


def _data(place: SiteFolder, overrides: Sequence[str]) -> str:
    if place.data == PLACEHOLDER:
        raise DataError(
            f"{place.folder / 'site.toml'} does not name the data yet: write their absolute path"
            ' as `data`, or "" if this site has no data of its own'
        )
    for path in map(Path, filter(None, place.paths.values())):
        if path.is_dir():
            next(path.iterdir(), None)
        else:
            path.open("rb").close()
    if not overrides:
        return f"{place.data or 'no data of its own'}; add a run's overrides to compare the data"
    from fedhet.deploy.site_data import compared  # imports torch

    return compared(place, overrides)


def _server_data(overrides: Sequence[str]) -> str:
    from fedhet.deploy.site_data import at_server  # imports torch

    return at_server(overrides)
