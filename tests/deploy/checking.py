"""A deployment to be broken, a server beside it, and what `fedhet deploy check` says of both."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from fedhet import __main__ as main


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
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


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
