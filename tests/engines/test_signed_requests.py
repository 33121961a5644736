"""A SuperNode's requests are signed: which forged, tampered and repeated ones are refused.

The test is the SuperNode here, with Flower's own client. Flower 1.41 signs the time of a request
and nothing else, so what was overheard can be used for about five minutes, for any request in the
name of that node. TLS keeps others from overhearing it. If the last test of this file fails with a
newer Flower, docs/promises.md and docs/deployment.md have good news to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import link_options, node_key
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode import node_auth_http_interceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from real_sites import Sites

pytestmark = [pytest.mark.matrix, pytest.mark.deployment]
KEY, TIME, SIGNATURE = FLEET_HTTP_PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, FLEET_HTTP_SIGNATURE_HEADER
PULL, DEACTIVATE = "/v1/fleet/pull-messages", "/v1/fleet/deactivate-node"


class Overheard:
    """The last request that a client has sent, with its headers."""

    request: httpx.Request

    def intercept(self, context: ProtobufRequestContext, call: ProtobufCall) -> httpx.Response:
        self.request = context.request
        return call(context)


@dataclass
class Link:
    """A SuperLink with TLS that asks nodes for registered keys, and two keys that it knows."""

    sites: Sites
    keys: list[ec.EllipticCurvePrivateKey]

    @property
    def authority(self) -> str:
        return str(self.sites.home / "ca.crt")

    def node(self, number: int, ear: Overheard | None = None) -> FleetHttpClient:
        key = self.keys[number]
        signing = [NodeAuthHttpInterceptor(key, key.public_key()), *([ear] if ear else [])]
        address = f"127.0.0.1:{self.sites.port}"
        return FleetHttpClient.from_server_address(address, False, self.authority, signing)

    def activate(self, number: int) -> int:
        """Tell the SuperLink that the node is there, and return its id."""
        public = public_key_to_bytes(self.keys[number].public_key())
        with self.node(number) as node:
            found = node.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=60))
        return int(found.node_id)

    def overhear(self, number: int, id_: int) -> httpx.Request:
        """What the node sends to ask for its messages, which the SuperLink answers."""
        ear = Overheard()
        with self.node(number, ear) as node:
            node.PullMessages(PullMessagesRequest(node=Node(node_id=id_)))
        return ear.request

    def send(
        self,
        request: httpx.Request,
        *,
        path: str = PULL,
        method: str = "POST",
        content: bytes | None = None,
        headers: Mapping[str, str | None] | None = None,
    ) -> int:
        """Send what was overheard, with such changes, as one without any key; return the status."""
        changed = {**dict(request.headers), "content-length": None, **(headers or {})}
        with httpx.Client(verify=self.authority) as stranger:
            return stranger.request(
                method,
                str(request.url.copy_with(path=path)),
                content=request.content if content is None else content,
                headers={name: value for name, value in changed.items() if value is not None},
            ).status_code


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    home = tmp_path_factory.mktemp("signed")
    connection = f'root-certificates = "{home / "ca.crt"}"'
    with Sites(home, 0, tls=(link_options(home), []), connection=connection) as sites:
        keys = []
        for name in ("first", "second"):
            path = Path(node_key(home, name)[1])
            sites.flwr("supernode", "register", f"{path}.pub", "here", "--name", name)
            key: Any = load_ssh_private_key(path.read_bytes(), None)
            keys.append(key)
        yield Link(sites, keys)


@pytest.fixture(scope="module")
def ids(link: Link) -> list[int]:
    """The nodes' ids."""
    return [link.activate(number) for number in (0, 1)]


def other_time(request: httpx.Request) -> dict[str, str | None]:
    signed = datetime.fromisoformat(request.headers[TIME])
    return {TIME: (signed + timedelta(seconds=1)).isoformat()}


@pytest.mark.parametrize(
    "changes",
    [
        other_time,
        lambda request: {SIGNATURE: f"{request.headers[SIGNATURE][:-8]}AAAAAAA="},
        lambda request: {SIGNATURE: ""},
        lambda request: {SIGNATURE: None},
        lambda request: {TIME: None},
        lambda request: {KEY: None},
        lambda request: {KEY: None, TIME: None, SIGNATURE: None},
    ],
    ids=["time", "signature", "empty", "no-signature", "no-time", "no-key", "nothing"],
)
def test_a_tampered_header_is_refused(
    link: Link, ids: list[int], changes: Callable[[httpx.Request], dict[str, str | None]]
) -> None:
    request = link.overhear(0, ids[0])
    assert link.send(request, headers=changes(request)) == httpx.codes.UNAUTHORIZED


@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
def test_no_other_content_type_avoids_the_check(link: Link, ids: list[int], kind: str) -> None:
    request = link.overhear(0, ids[0])
    unsigned = {KEY: None, TIME: None, SIGNATURE: None, "content-type": kind}
    assert httpx.codes.is_client_error(link.send(request, headers=unsigned))


def test_the_headers_of_one_node_do_not_serve_for_another(link: Link, ids: list[int]) -> None:
    first, second = (link.overhear(number, ids[number]) for number in (0, 1))
    assert link.send(first, content=second.content) == httpx.codes.UNAUTHORIZED
    stolen = {KEY: second.headers[KEY]}
    assert link.send(first, content=second.content, headers=stolen) == httpx.codes.UNAUTHORIZED


@pytest.mark.parametrize("age", [TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE + 1, -60])
def test_a_request_of_another_time_is_refused(
    link: Link, ids: list[int], monkeypatch: pytest.MonkeyPatch, age: int
) -> None:
    """What was signed so many seconds ago, as it would be if it were repeated only now."""
    then = now() - timedelta(seconds=age)
    monkeypatch.setattr(node_auth_http_interceptor, "now", lambda: then)
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        link.overhear(0, ids[0])


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_another_method_of_http_is_refused(link: Link, ids: list[int], method: str) -> None:
    request = link.overhear(0, ids[0])
    assert link.send(request, method=method) == httpx.codes.METHOD_NOT_ALLOWED


def test_flower_accepts_overheard_headers_for_five_minutes_with_any_content(
    link: Link, ids: list[int]
) -> None:
    """A limit of Flower 1.41: it signs neither content nor path, and no request is unique."""
    request = link.overhear(0, ids[0])
    assert [link.send(request), link.send(request)] == [httpx.codes.OK] * 2
    other = DeactivateNodeRequest(node_id=ids[0]).SerializeToString()
    assert link.send(request, path=DEACTIVATE, content=other) == httpx.codes.OK
    nodes = link.sites.flwr("supernode", "ls", "here", "--verbose")["nodes"]
    assert {str(node["node-id"]): node["status"] for node in nodes}[str(ids[0])] == "offline"
    link.activate(0)
