"""`fedhet deploy check`: each thing is broken once, and its line alone says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from deploy.checking import Health, Printed, at_site, edit, failed, served
from ports import free_ports

from fedhet.deploy import certificates


def test_nothing_is_wrong_with_what_init_has_written(kit: Path, capsys: Printed) -> None:
    assert failed(kit / "server", capsys) == {}
    assert at_site(kit, capsys) == {}


# ---- the server
def expire(kit: Path, host: str = "localhost", days: int = -1) -> None:
    authority = certificates.read_authority(kit / "operator")
    certificate, key = certificates.new_server_certificate(authority, host, days)
    (kit / "server/server.pem").write_bytes(certificates.pem(certificate))
    (kit / "server/server.key").write_bytes(certificates.pem_key(key))


def replace_key(kit: Path) -> None:
    key = certificates.new_authority().key
    (kit / "server/server.key").write_bytes(certificates.pem_key(key))


def replace_authority(folder: Path) -> None:
    (folder / "ca.crt").write_bytes(certificates.pem(certificates.new_authority().certificate))


@pytest.mark.parametrize(
    ("break_it", "name", "message"),
    [
        (expire, "certificate", "has expired"),
        (lambda kit: expire(kit, days=7), "certificate", "deploy init --renew"),
        (lambda kit: expire(kit, "other.example.org", 90), None, ""),
        (
            lambda kit: edit(kit / "server/server.toml", "server", f"other:{free_ports(1)[0]}"),
            "certificate",
            "not valid for 'other'",
        ),
        (replace_key, "certificate", "do not belong together"),
        (
            lambda kit: replace_authority(kit / "server"),
            "certificate",
            "unable to get local issuer|signature",
        ),
        (lambda kit: (kit / "server/server.pem").write_text("?"), "certificate", "PEM format"),
        (lambda kit: (kit / "server/server.key").chmod(0o640), "key", "chmod 600"),
        (lambda kit: shutil.copy(kit / "operator/ca.key", kit / "server"), "secrets", "delete it"),
    ],
)
def test_a_broken_server(
    kit: Path, break_it: Callable[[Path], object], name: str | None, message: str, capsys: Printed
) -> None:
    break_it(kit)
    found = failed(kit / "server", capsys)
    assert list(found) == ([name] if name else [])  # localhost is always among the names
    for text in found.values():
        assert any(part in text for part in message.split("|")), text


def test_the_servers_port_is_its_own(kit: Path, capsys: Printed) -> None:
    with served(kit / "server") as port:
        edit(kit / "server/server.toml", "server", f"localhost:{port}")
        assert failed(kit / "server", capsys) == {}
    with served(None) as port:
        edit(kit / "server/server.toml", "server", f"localhost:{port}")
        found = failed(kit / "server", capsys)
    assert list(found) == ["port"] and "held by process" in found["port"]


# ---- a site
def move_data(kit: Path) -> None:
    edit(kit / "sites/a/site.toml", "data", str(kit / "missing.npz"))


@pytest.mark.parametrize(
    ("break_it", "name", "message"),
    [
        (lambda kit: (kit / "sites/a/node.key").chmod(0o644), "key", "chmod 600"),
        (
            lambda kit: shutil.copy(kit / "server/server.key", kit / "sites/a/node.key"),
            "key",
            "OpenSSH",
        ),
        (lambda kit: (kit / "sites/a/node.key").unlink(), "key", "No such file"),
        (lambda kit: shutil.copy(kit / "operator/ca.key", kit / "sites/a"), "secrets", "delete"),
        (move_data, "data", "missing.npz"),
        (
            lambda kit: edit(kit / "sites/a/site.toml", "data", "/path/to/the/data"),
            "data",
            "does not name the data yet",
        ),
    ],
)
def test_a_broken_site(
    kit: Path, break_it: Callable[[Path], object], name: str, message: str, capsys: Printed
) -> None:
    break_it(kit)
    found = at_site(kit, capsys)
    assert list(found) == [name] and message in found[name]


def test_a_server_that_cannot_be_reached(kit: Path, capsys: Printed) -> None:
    found = at_site(kit, capsys, port=free_ports(1)[0])
    assert list(found) == ["server"] and "firewalls" in found["server"]


@pytest.mark.parametrize("days", [-1, 90])
def test_a_server_whose_certificate_is_refused(kit: Path, days: int, capsys: Printed) -> None:
    if days > 0:
        replace_authority(kit / "sites/a")
    else:
        expire(kit)
    found = at_site(kit, capsys)
    assert list(found) == ["server"] and "is refused" in found["server"]


@pytest.mark.parametrize(
    ("seconds", "direction"), [(-60, "ahead of"), (600, "behind"), (-2, ""), (60, "")]
)
def test_a_clock_that_flower_would_refuse(
    kit: Path, seconds: int, direction: str, capsys: Printed
) -> None:
    """Flower admits a node whose clock is up to 5 s ahead, or up to 305 s behind."""
    handler = type("Other", (Health,), {"ahead": timedelta(seconds=seconds)})
    with served(kit / "server", handler) as port:
        found = at_site(kit, capsys, port=port)
    assert list(found) == (["server"] if direction else [])
    assert not direction or f"{direction} the clock of" in found["server"]


def test_a_server_that_is_no_superlink(kit: Path, capsys: Printed) -> None:
    with served(kit / "server", type("Other", (Health,), {"status": 404})) as port:
        found = at_site(kit, capsys, port=port)
    assert list(found) == ["server"] and "no SuperLink" in found["server"]


def test_the_nodes_port_is_its_own(kit: Path, capsys: Printed) -> None:
    with served(None) as port:  # a SuperNode
        edit(kit / "sites/a/site.toml", "port", port)
        assert at_site(kit, capsys) == {}
    with served(None, type("Other", (Health,), {"status": 404})) as port:
        edit(kit / "sites/a/site.toml", "port", port)
        found = at_site(kit, capsys)
    assert list(found) == ["port"] and "held by process" in found["port"]


@pytest.mark.parametrize("package", ["python", "torch", "flwr", "fedhet"])
def test_other_versions_than_the_operators(kit: Path, package: str, capsys: Printed) -> None:
    file = kit / "sites/a/versions.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {package: "0.0.1"}))
    found = at_site(kit, capsys)
    assert list(found) == ["versions"] and f"{package} is " in found["versions"]
    assert "the operator has 0.0.1" in found["versions"]


def test_another_patch_release_of_python_will_do(kit: Path, capsys: Printed) -> None:
    file = kit / "sites/a/versions.json"
    content = json.loads(file.read_text())
    content["python"] = ".".join([*content["python"].split(".")[:2], "99"])
    file.write_text(json.dumps(content))
    assert at_site(kit, capsys) == {}


def test_too_little_disk(kit: Path, capsys: Printed) -> None:
    found = at_site(kit, capsys, "--disk=1e9")
    assert list(found) == ["disk"] and "GB free" in found["disk"]
