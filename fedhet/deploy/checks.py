"""`deploy check`: whether a server or a site is ready, one line for each check."""

from __future__ import annotations

import http.client
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from fedhet.core.errors import ConfigError, DataError, clean
from fedhet.deploy import certificates, tls
from fedhet.deploy.folders import (
    PLACEHOLDER,
    ServerFolder,
    SiteFolder,
    read_versions,
    split_address,
    versions,
)

RENEWAL = timedelta(days=14)  # before its end a certificate is reported
# Flower 1.41 refuses a node whose clock is more than 5 s ahead of the server's or 305 s behind;
# HTTP's date has whole seconds.
AHEAD, BEHIND = 4, 300
NODE_CURVES = ("secp256r1", "secp384r1", "secp521r1")  # those that Flower admits
RENEW = "the operator makes a new certificate with `deploy init --renew`"


class Check(NamedTuple):
    """One line.

    Attributes:
        name: what was checked.
        ok: whether it is as it should be.
        text: what was found; if it is wrong, what to do.
    """

    name: str
    ok: bool
    text: str


class _Failed(Exception):
    """A check has failed; the text says what to do."""


def checks(
    place: ServerFolder | SiteFolder, overrides: Sequence[str], disk_gb: float
) -> Iterator[Check]:
    """Check a server or a site.

    Args:
        place: the server or the site.
        overrides: those of a run, whose data are then read; none: a site's data are only found.
        disk_gb: how much must be free where the state is, in GB of 10^9 bytes.
    """
    steps: dict[str, Callable[[], str]]
    if isinstance(place, ServerFolder):
        steps = {
            "key": partial(_mode, place.folder / "server.key"),
            "certificate": partial(_server_certificate, place),
            "port": partial(_server_port, place),
        }
        if overrides:
            steps["data"] = partial(_server_data, overrides)
    else:
        steps = {
            "key": partial(_node_key, place.folder / "node.key"),
            "certificate": partial(_authority, place.folder / "ca.crt"),
            "server": partial(_server, place),
            "clock": partial(_clock, place),
            "port": partial(_node_port, place.port),
            "data": partial(_data, place, overrides),
        }
    steps = {"secrets": partial(_secrets, place.folder), **steps}
    steps |= {
        "versions": partial(_versions, place.folder),
        "disk": partial(_disk, place.state, disk_gb),
    }
    for name, step in steps.items():
        try:
            yield Check(name, True, step())
        except (_Failed, ConfigError, DataError, ImportError, OSError) as error:
            yield Check(name, False, clean(str(error)))


# ---- keys and certificates
def _secrets(folder: Path) -> str:
    if (folder / "ca.key").exists():
        raise _Failed(
            f"{folder / 'ca.key'} must be with the operator alone: whoever has it can pretend to be"
            " the server; delete it here, and if others could read it, make a new deployment"
        )
    return "the authority's key is not here"


def _mode(path: Path) -> str:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise _Failed(f"{path} has mode {mode:04o}, so that others can read it: chmod 600 {path}")
    return f"{path.name} is readable for its owner only"


def _node_key(path: Path) -> str:
    text = _mode(path)
    key = certificates.read_key(path, ssh=True)
    if key.curve.name not in NODE_CURVES:
        raise _Failed(f"{path} is on the curve {key.curve.name}; Flower admits {NODE_CURVES}")
    return f"{text}, {key.curve.name}"


def _dates(path: Path) -> str:
    """When the certificate expires."""
    certificate = certificates.read_certificate(path)
    now = datetime.now(UTC)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        raise _Failed(f"{path} is not valid before {begin:%Y-%m-%d %H:%M} UTC: look at the clock")
    if end < now:
        raise _Failed(f"{path} has expired on {end:%Y-%m-%d}: {RENEW}")
    if end < now + RENEWAL:
        raise _Failed(f"{path} expires on {end:%Y-%m-%d}: {RENEW}")
    return f"{path.name} is valid until {end:%Y-%m-%d}"


def _authority(path: Path) -> str:
    tls.client_context(path)
    return _dates(path)


def _server_certificate(place: ServerFolder) -> str:
    text = _dates(place.folder / "server.pem")
    _dates(place.folder / "ca.crt")
    host, _ = split_address("server", place.server)
    names = tuple(dict.fromkeys((host, *certificates.LOCAL_NAMES)))
    files = [place.folder / name for name in ("server.pem", "server.key", "ca.crt")]
    try:
        tls.check_names(files[0], files[1], files[2], names)
    except ssl.SSLCertVerificationError as error:
        has = ", ".join(certificates.names_of(certificates.read_certificate(files[0])))
        raise _Failed(
            f"{files[0]}: {error.verify_message} (it has the names {has}, and needs"
            f" {', '.join(names)}): {RENEW}"
        ) from error
    except ssl.SSLError as error:
        raise _Failed(f"{files[0]} and {files[1]} do not belong together: {error}") from error
    return f"{text}, for {', '.join(names)}"


# ---- the network
def _server_port(place: ServerFolder) -> str:
    port = place.port
    if not (process := holder(port)):
        with socket.create_server((place.listen, port)):
            return f"{port} is free on {place.listen}"
    try:
        status = tls.ask("127.0.0.1", port, place.folder / "ca.crt").status
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(
            f"{port} is held by {process}, another program or a SuperLink with another certificate"
            f" ({error}): end it, or choose another port"
        ) from error
    return f"{port} is that of a SuperLink, which answers with {status}"


def _node_port(port: int) -> str:
    if not (process := holder(port)):
        return f"{port} is free on 127.0.0.1"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=tls.SECONDS)
    try:
        connection.request("HEAD", "/health")
        if connection.getresponse().status == http.HTTPStatus.OK:
            return f"{port} is that of a SuperNode, which is running"
    except (OSError, http.client.HTTPException):
        pass
    finally:
        connection.close()
    raise _Failed(f"{port} is held by {process}: end it, or name another `port` in site.toml")


def holder(port: int) -> str:
    """Which process listens on a port of this machine; "" if none does."""
    with socket.socket() as probe:
        probe.settimeout(tls.SECONDS)
        if probe.connect_ex(("127.0.0.1", port)):
            return ""
    with suppress(psutil.Error):  # it is hidden, or has ended meanwhile
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                line = " ".join(psutil.Process(one.pid).cmdline())
                return f"process {one.pid} ({clean(line, 100)})"
    return "a process of another user"


def _server(place: SiteFolder) -> str:
    answer = _ask(place)
    if answer.status != http.HTTPStatus.OK:
        raise _Failed(f"{place.server} answers with {answer.status}: it is no SuperLink")
    return f"{place.server} answers, and its certificate is that of our authority"


def _ask(place: SiteFolder) -> tls.Answer:
    host, port = split_address("server", place.server)
    try:
        return tls.ask(host, port, place.folder / "ca.crt")
    except ssl.SSLCertVerificationError as error:
        raise _Failed(
            f"the certificate of {place.server} is refused: {error.verify_message}; look at the"
            f" clock and at `server` in site.toml, or {RENEW}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise _Failed(
            f"{place.server} cannot be reached ({error}): is the SuperLink running, and do the"
            " firewalls on both sides let this machine connect to it?"
        ) from error


def _clock(place: SiteFolder) -> str:
    answer = _ask(place)
    if answer.date is None:
        raise _Failed(f"{place.server} does not say what time it is: is it a SuperLink?")
    # HTTP's date is cut off to whole seconds, half a second on average.
    skew = (answer.asked - answer.date).total_seconds() - 0.5
    if not -BEHIND < skew < AHEAD:
        direction = "ahead of" if skew > 0 else "behind"
        raise _Failed(
            f"this clock is {abs(skew):.0f} s {direction} that of {place.server}, and Flower admits"
            f" {AHEAD} s ahead and {BEHIND} s behind: let both follow a time server (NTP)"
        )
    return f"{abs(skew):.0f} s from that of {place.server}"


# ---- this machine
def _versions(folder: Path) -> str:
    here, there = versions(), read_versions(folder)
    wrong = []
    for name, version in here.items():
        wanted = there.get(name)
        # Of Python the first two numbers count.
        if name == "python":
            equal = str(version).split(".")[:2] == str(wanted).split(".")[:2]
        else:
            equal = version == wanted
        if not equal:
            wrong.append(f"{name} is {version or 'not installed'}, the operator has {wanted}")
    if wrong:
        raise _Failed(f"{'; '.join(wrong)}: install the same versions")
    return ", ".join(f"{name} {version}" for name, version in here.items())


def _disk(state: Path, gigabytes: float) -> str:
    existing = next(path for path in (state, *state.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    if free < gigabytes:
        raise _Failed(f"{existing} has {free:.1f} GB free; make it {gigabytes:g} GB (--disk)")
    return f"{free:.1f} GB free in {existing}"


def _data(place: SiteFolder, overrides: Sequence[str]) -> str:
    if place.data == PLACEHOLDER:
        raise _Failed(
            f"{place.folder / 'site.toml'} does not name the data yet: write their absolute path"
            ' as `data`, or "" if this site has none of its own'
        )
    for named in filter(None, place.paths.values()):
        path = Path(named)
        if path.is_dir():
            next(path.iterdir(), None)
        else:
            with path.open("rb") as file:
                file.read(1)
    if not overrides:
        return f"{place.data or 'none of its own'}; add a run's overrides to compare them"
    from fedhet.deploy.site_data import compared  # imports torch

    return compared(place, overrides)


def _server_data(overrides: Sequence[str]) -> str:
    from fedhet.deploy.site_data import at_server  # imports torch

    return at_server(overrides)
