"""The folder of a server or a site: its settings, and how its Flower process is started."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from fedhet.core import check
from fedhet.core.check import Checked, setting
from fedhet.core.errors import ConfigError, DataError
from fedhet.core.limits import MAX_ARRAY, MAX_MODEL, MIN_COUNT, MIN_TEST
from fedhet.data.frames import CsvFormat
from fedhet.data.storage import write_text
from fedhet.deploy.certificates import check_host
from fedhet.runs.flower_commands import flower_environment
from fedhet.runs.process import direct_loopback

PLACEHOLDER = "/path/to/the/data"
CONNECTION = "fedhet"  # the name of a connection in Flower's config.toml
NODES = ("fedhet", "flower-supernode")  # the programs of a site
ANY = "any"  # in place of the digest of an app: a site executes whatever reaches the server
ALLOWED = f'the SHA-256 of an app, 64 digits 0-9 a-f, or "{ANY}"'
PACKAGES = ("torch", "flwr", "fedhet")
Text = str  # of a setting that its class checks, because it may be ""


@dataclass(frozen=True, kw_only=True)
class Place(Checked):
    """The folder of a server or a site.

    Args:
        folder: where its settings, certificates and keys are.
        server: host:port, by which sites reach the server.
        state: a folder for Flower's own files, and what else its machine keeps.
    """

    FILE: ClassVar[str]
    folder: Path
    server: str
    state: Path

    def __post_init__(self) -> None:
        super().__post_init__()
        split_address("server", self.server)
        if not self.state.is_absolute():
            raise ConfigError(f'state = "{self.state}": must be an absolute path')


@dataclass(frozen=True, kw_only=True)
class ServerFolder(Place):
    """The server's folder, with server.toml, ca.crt, server.pem and server.key.

    The state is its database and the run folders.

    Args:
        listen: the address on which it listens.
    """

    FILE = "server.toml"
    listen: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_host("listen", self.listen)

    @property
    def port(self) -> int:
        """Of the SuperLink."""
        return split_address("server", self.server)[1]

    @property
    def command(self) -> list[str]:
        """The SuperLink and its options."""
        return [
            *(sys.executable, "-m", "fedhet", "deploy", "link", str(self.state)),
            *("--host", self.listen, "--port", str(self.port)),
            *("--ssl-ca-certfile", str(self.folder / "ca.crt")),
            *("--ssl-certfile", str(self.folder / "server.pem")),
            *("--ssl-keyfile", str(self.folder / "server.key")),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--database", str(self.state / "state.db")),
        ]


@dataclass(frozen=True, kw_only=True)
class SiteFolder(Place):
    """A site's folder, with site.toml, ca.crt and node.key.

    The state is what its clients remember.

    Args:
        site: its name.
        number: its number among the sites, from 0.
        sites: how many there are.
        data: the absolute path of its data; "" if it has none of its own.
        port: of the SuperNode, on 127.0.0.1.
        val, test: absolute paths of further data, for validation and testing; "": there are none.
        tokenizer: the absolute path of that of its texts; "": the one beside the data, if any.
        read: how its csv files are written, see `fedhet.data.frames.CsvFormat`.
        share_counts: whether it tells how many samples of each class it has.
        evaluate: whether the server is told scores of the site's data.
        min_count: no statistic of fewer samples is told.
        min_test: no score of fewer samples is told; 0: all scores are told as they are.
        max_model: no larger model is built, in MB; 0: any is.
        max_array: no other setting of a run makes a larger array, in MB; 0: any does.
        node: "fedhet" for `deploy node`, or "flower-supernode", which cannot check the code.
        code: the digest of the app that it executes, or "any".
    """

    FILE = "site.toml"
    site: str
    number: int = setting(low=0)
    sites: int = setting(low=1)
    data: Text
    port: int = setting(low=1, high=65535)
    val: Text = ""
    test: Text = ""
    tokenizer: Text = ""
    read: Mapping[str, Any] = field(default_factory=dict)
    share_counts: bool = setting(False, name="share-counts")
    evaluate: bool = True
    min_count: int = setting(MIN_COUNT, name="min-count", low=0)
    min_test: int = setting(MIN_TEST, name="min-test", low=0)
    max_model: int = setting(MAX_MODEL, name="max-model", low=0)
    max_array: int = setting(MAX_ARRAY, name="max-array", low=0)
    node: str = setting(NODES[0], allowed=NODES)
    code: Text = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("number", self.number, low=0, high=self.sites - 1)
        check_code("code", self.code)
        CsvFormat.of(self.read)
        if self.node != NODES[0] and self.code != ANY:
            raise ConfigError(
                f'node = "{self.node}" with code = "{self.code}": Flower\'s own SuperNode cannot'
                f' check what it executes; write node = "{NODES[0]}", or code = "{ANY}"'
            )
        for name, path in self.paths.items():
            if not isinstance(path, str) or (path and not Path(path).is_absolute()):
                raise ConfigError(f'{name} = "{path}": must be an absolute path, or ""')
            if path and not self.data:
                raise ConfigError(f'{name} = "{path}" with data = "": name `data`, too')
        if '"' in "".join([self.site, *self.paths.values()]):  # Flower has no way to write it there
            raise ConfigError("a quotation mark can be neither in `site` nor in a path of the data")

    @property
    def paths(self) -> dict[str, str]:
        """What it has of its own, by the names in its file; "" for what it has not."""
        return {name: getattr(self, name) for name in ("data", "val", "test", "tokenizer")}

    @property
    def node_config(self) -> dict[str, str | int | bool]:
        """What the SuperNode is told; of a site with data of its own, nothing of the others."""
        limits: dict[str, str | int | bool] = {
            "evaluate": self.evaluate,
            "min-count": self.min_count,
            "min-test": self.min_test,
            "max-model": self.max_model,
            "max-array": self.max_array,
        }
        if not self.data:
            return {"partition-id": self.number, "num-partitions": self.sites, **limits}
        return {
            "site": self.site,
            **{name: path for name, path in self.paths.items() if path},
            **({"read": CsvFormat.of(self.read).query} if self.read else {}),
            "share-counts": self.share_counts,
            **limits,
        }

    @property
    def command(self) -> list[str]:
        """The SuperNode and its options."""
        # Flower reads these as TOML, whose texts, numbers, true and false are those of JSON.
        config = " ".join(
            f"{name}={json.dumps(value, ensure_ascii=False)}"
            for name, value in self.node_config.items()
        )
        own = [sys.executable, "-m", "fedhet", "deploy", "node", "--code", self.code]
        return [
            *(own if self.node == NODES[0] else ["flower-supernode"]),
            *("--superlink", self.server),
            *("--root-certificates", str(self.folder / "ca.crt")),
            *("--auth-supernode-private-key", str(self.folder / "node.key")),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--node-config", config),
        ]


def check_code(name: str, code: str) -> None:
    """Check what a site says of the code that it executes.

    Args:
        name: where it says so.
        code: the digest of an app, or "any".

    Raises:
        ConfigError: it is neither.
    """
    if code != ANY and not re.fullmatch("[0-9a-f]{64}", code):
        raise ConfigError(f"{name}={code!r}: must be {ALLOWED}; `deploy code` prints the digest")


def environment(place: ServerFolder | SiteFolder) -> dict[str, str]:
    """The variables for the Flower process of a server or a site."""
    # The server's helpers ask it at the address on which it listens.
    own = [place.listen] if isinstance(place, ServerFolder) else []
    return {
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # flower-supernode would wait up to a second
        "FEDHET_STATE_DIR": str(place.state),
        "FEDHET_CACHE": str(place.state / "cache"),  # the user of a service may have no home
        **os.environ,
        **flower_environment(place.state / "flwr"),
        **direct_loopback(*own),
    }


def read(folder: Path) -> ServerFolder | SiteFolder:
    """Read the settings of a server or a site.

    Raises:
        DataError: the folder has neither server.toml nor site.toml, or it cannot be read.
        ConfigError: a setting is missing, unknown or not allowed.
    """
    folder = folder.absolute()
    site = (folder / SiteFolder.FILE).exists()
    cls: type[ServerFolder | SiteFolder] = SiteFolder if site else ServerFolder
    file = folder / cls.FILE
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        what = "has neither site.toml nor server.toml" if folder.is_dir() else "does not exist"
        raise DataError(
            f"{folder} {what}; name a folder that `python -m fedhet"
            " deploy init` has written for a site or for the server"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    keys = {one.metadata.get("name") or one.name: one for one in fields(cls)[1:]}
    for name in content:
        check.one_of(f"{file}", name, keys)
    required = {
        one.name: None
        for one in keys.values()
        if one.default is MISSING and one.default_factory is MISSING
    }
    given: dict[str, Any] = required | {keys[name].name: content[name] for name in content}
    try:
        given["state"] = Path(check.text("state", given["state"]))
        return cls(folder=folder, **given)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def change(file: Path, key: str, value: str | int) -> None:
    """Give a key of a site.toml another value, and leave the file's comments.

    Raises:
        DataError: the file cannot be read.
        WriteError: it cannot be written.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    line = f"{key} = {json.dumps(value)}"
    text, found = re.subn(rf"(?m)^{key} *=[^#\n]*?(?= *(#|$))", line, text)
    write_text(file, text if found else f"{text.rstrip()}\n{line}\n")


def connection(address: str, ca: Path) -> str:
    """Flower's config.toml, by which its commands reach the SuperLink.

    Args:
        address: host:port.
        ca: the absolute path of the authority's certificate; Flower takes no other.
    """
    return (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{address}"\nroot-certificates = {json.dumps(str(ca))}\n'
    )


def split_address(name: str, address: str) -> tuple[str, int]:
    """Return host and port of host:port.

    Raises:
        ConfigError: the text is no such address.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{name} = {address!r}: must be host:port, with a port in [1, 65535]")
    return check_host(name, host.removeprefix("[").removesuffix("]")), int(port)


def versions() -> dict[str, Any]:
    """The versions of Python and of what must be equal on all machines; None: not installed."""
    return {"python": platform.python_version(), **check.installed_versions(PACKAGES)}
