"""`fedhet deploy check`: each thing is broken once, and its line alone says so."""

from __future__ import annotations

import http.server
import json
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import numpy as np
import pytest

from fedhet.cli import main
from fedhet.deploy import certificates


class Health(http.server.BaseHTTPRequestHandler):
    """Answers as a SuperLink does, with a clock of its own."""

    ahead = timedelta()
    status = 200

    def do_HEAD(self) -> None:
        self.send_response_only(self.status)
        now = datetime.now(UTC) + self.ahead
        self.send_header("Date", format_datetime(now, usegmt=True))
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def served(folder: Path | None, handler: type[Health] = Health) -> Iterator[int]:
    """The port of a server with the certificate in a folder, or of one without TLS."""

    class Quiet(http.server.ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that refuses the certificate

    with Quiet(("127.0.0.1", 0), handler) as server:
        if folder is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "server.pem", folder / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kit") / "deploy"
    assert main.main(["deploy", "init", "--sites=a", "--server=localhost", f"--out={out}"]) == 0
    data = out / "data.npz"
    np.savez(data, x_train=np.zeros((8, 2), np.float32), y_train=np.arange(8) % 2)
    for file in (out / "server/server.toml", out / "sites/a/site.toml"):
        edit(file, "state", str(out))
    edit(out / "sites/a/site.toml", "data", str(data))
    return out


@pytest.fixture
def kit(made: Path, tmp_path: Path) -> Path:
    """A deployment whose ports are free, to be broken."""
    out = Path(shutil.copytree(made, tmp_path / "deploy"))
    edit(out / "server/server.toml", "server", f"localhost:{free_port()}")
    edit(out / "sites/a/site.toml", "port", free_port())
    return out


def edit(file: Path, key: str, value: str | int) -> None:
    rows = [row for row in file.read_text().splitlines() if not row.startswith(f"{key} = ")]
    file.write_text("\n".join([*rows, f"{key} = {json.dumps(value)}"]))


Printed = pytest.CaptureFixture[str]


def failed(folder: Path, printed: Printed, *options: str) -> dict[str, str]:
    """The names and texts of the failed checks."""
    printed.readouterr()
    code = main.main(["deploy", "check", str(folder), *options])
    out, err = printed.readouterr()
    assert not err
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    assert {word for word, *_ in lines} <= {"ok", "failed"}
    found = {name.removesuffix(":"): text for word, name, text in lines if word == "failed"}
    assert code == (1 if found else 0)
    return found


def at_site(kit: Path, printed: Printed, *options: str, port: int | None = None) -> dict[str, str]:
    """The failed checks of the site, beside a server that is well unless a port is given."""
    site = kit / "sites/a"
    if port is not None:
        edit(site / "site.toml", "server", f"localhost:{port}")
        return failed(site, printed, *options)
    with served(kit / "server") as port:
        edit(site / "site.toml", "server", f"localhost:{port}")
        return failed(site, printed, *options)


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
            lambda kit: edit(kit / "server/server.toml", "server", f"other:{free_port()}"),
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
    assert list(found) == ["port"] and "taken by another program" in found["port"]


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
    found = at_site(kit, capsys, port=free_port())
    assert list(found) == ["server", "clock"] and "firewalls" in found["server"]


@pytest.mark.parametrize("days", [-1, 90])
def test_a_server_whose_certificate_is_refused(kit: Path, days: int, capsys: Printed) -> None:
    if days > 0:
        replace_authority(kit / "sites/a")
    else:
        expire(kit)
    found = at_site(kit, capsys)
    assert list(found) == ["server", "clock"] and "is refused" in found["server"]


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
    assert list(found) == (["clock"] if direction else [])
    assert not direction or f"{direction} that of" in found["clock"]


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
    assert list(found) == ["port"] and "taken by another program" in found["port"]


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


def test_the_data_of_a_run(kit: Path, capsys: Printed) -> None:
    edit(kit / "sites/a/site.toml", "data", "")
    assert at_site(kit, capsys, "dataset=digits", "--disk=0", "partition.clients=3") == {}
    assert at_site(kit, capsys, "--disk=0", "dataset=digits") == {}
    found = at_site(kit, capsys, "dataset=npz", f"dataset.file={kit / 'nothing.npz'}")
    assert list(found) == ["data"] and "nothing.npz" in found["data"]


LOCAL = ("dataset=local", "dataset.sites=[a,b]", "dataset.shape=[2]", "dataset.classes=2")


def test_the_data_of_a_site_beside_the_declaration_of_a_run(kit: Path, capsys: Printed) -> None:
    """A site learns what it would tell the server; and what is wrong, in full."""
    assert at_site(kit, capsys, *LOCAL, "--disk=0") == {}
    edit(kit / "sites/a/site.toml", "share-counts", True)
    edit(kit / "sites/a/site.toml", "min-count", 1)
    with served(kit / "server") as port:
        edit(kit / "sites/a/site.toml", "server", f"localhost:{port}")
        main.main(["deploy", "check", str(kit / "sites/a"), *LOCAL, "partition.split=[1,0,0]"])
    line = next(row for row in capsys.readouterr().out.splitlines() if " data: " in row)
    assert line.endswith(
        "8 training, 0 validation, 0 test samples; counts of classes: 4, 4; mean and squares of"
        " the inputs"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dataset.shape=[3]", "a sample has shape (2,); the run declares (3,)"),
        ("dataset.classes=[no,yes]", "array 'y_train', row 0"),
        ("dataset.sites=[b,c]", "the site 'a', which the run does not declare"),
        ("dataset.files={a:a.npz}", "names no path of a site"),
        ("dataset=digits", "would cut a data set that all machines hold"),
    ],
)
def test_data_that_a_run_does_not_declare(
    kit: Path, override: str, message: str, capsys: Printed
) -> None:
    found = at_site(kit, capsys, *([] if "digits" in override else LOCAL), override)
    assert list(found) == ["data"] and message in found["data"]


def test_a_site_without_data_and_a_run_on_data_of_each_sites_own(
    kit: Path, capsys: Printed
) -> None:
    edit(kit / "sites/a/site.toml", "data", "")
    found = at_site(kit, capsys, *LOCAL)
    assert list(found) == ["data"] and "write their absolute path" in found["data"]


def test_further_data_of_a_site_must_be_there(kit: Path, capsys: Printed) -> None:
    edit(kit / "sites/a/site.toml", "test", str(kit / "missing.csv"))
    found = at_site(kit, capsys)
    assert list(found) == ["data"] and "missing.csv" in found["data"]
