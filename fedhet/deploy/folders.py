"""The folder of a server or a site: its settings, and how its Flower process is started."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tomllib
from dataclasses import MISSING, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError
from fedhet.core.limits import MAX_MODEL, MIN_COUNT, MIN_TEST
from fedhet.deploy.certificates import check_host
from fedhet.flower import code
from fedhet.flower.turns import QUEUE
from fedhet.record.files import write_text

PLACEHOLDER = "/path/to/the/data"
CONNECTION = "fedhet"  # the name of a connection in Flower's config.toml
NODES = ("fedhet", "flower-supernode")  # the programs of a site
PACKAGES = ("torch", "flwr", "fedhet")
_KINDS = {"int": (int, "a whole number"), "bool": (bool, "true or false")}
BIN = Path(sys.executable).parent  # where this environment has Flower's programs


@dataclass(frozen=True)
class ServerFolder:
    """The server's folder; its arguments are the keys of server.toml.

    Args:
        folder: where server.toml, ca.crt, server.pem and server.key are.
        server: host:port, by which sites reach it.
        listen: the address on which it listens.
        state: a folder for its database, the run folders and Flower's own files.
    """

    folder: Path
    server: str
    listen: str
    state: Path

    def __post_init__(self) -> None:
        split_address(f"{self.folder / 'server.toml'}: server", self.server)
        check_host(f"{self.folder / 'server.toml'}: listen", self.listen)

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


@dataclass(frozen=True)
class SiteFolder:
    """A site's folder; its arguments are the keys of site.toml.

    Args:
        folder: where site.toml, ca.crt and node.key are.
        site: its name.
        number: its number among the sites, from 0.
        sites: how many there are.
        server: host:port.
        data: the absolute path of its data; "" if it has none of its own.
        state: a folder for what its clients remember, and Flower's own files.
        port: of the SuperNode, on 127.0.0.1.
        val, test: absolute paths of further data, for validation and testing; "": there are none.
        tokenizer: the absolute path of that of its texts; "": the one beside the data, if any.
        share_counts: whether it tells how many samples of each class it has.
        evaluate: whether the server is told scores of the site's data.
        min_count: no statistic of fewer samples is told.
        min_test: no score of fewer samples is told; 0: all scores are told as they are.
        max_model: no larger model is built, in MB; 0: any is.
        node: "fedhet" for `deploy node`, or "flower-supernode", which cannot check the code.
        code: the digest of the app that it executes, or "any".
    """

    folder: Path
    site: str
    number: int
    sites: int
    server: str
    data: str
    state: Path
    port: int
    val: str = ""
    test: str = ""
    tokenizer: str = ""
    share_counts: bool = False
    evaluate: bool = True
    min_count: int = MIN_COUNT
    min_test: int = MIN_TEST
    max_model: int = MAX_MODEL
    node: str = NODES[0]
    code: str = ""

    def __post_init__(self) -> None:
        file = self.folder / "site.toml"
        split_address(f"{file}: server", self.server)
        check.text(f"{file}: site", self.site)
        check.integer(f"{file}: sites", self.sites, low=1)
        check.integer(f"{file}: number", self.number, low=0, high=self.sites - 1)
        check.integer(f"{file}: port", self.port, low=1, high=65535)
        check.integer(f"{file}: min-count", self.min_count, low=0)
        check.integer(f"{file}: min-test", self.min_test, low=0)
        check.integer(f"{file}: max-model", self.max_model, low=0)
        check.one_of(f"{file}: node", self.node, NODES)
        code.checked(f"{file}: code", self.code)
        if self.node != NODES[0] and self.code != code.ANY:
            raise ConfigError(
                f'{file}: node = "{self.node}" with code = "{self.code}": Flower\'s own SuperNode'
                f' cannot check what it executes; write node = "{NODES[0]}", or code = "{code.ANY}"'
            )
        paths = self.paths
        for name, path in paths.items():
            if path and not Path(path).is_absolute():
                raise ConfigError(f'{file}: {name} = "{path}": must be an absolute path, or ""')
            if path and not self.data:
                raise ConfigError(f'{file}: {name} = "{path}" with data = "": name `data`, too')
        if '"' in "".join([self.site, *paths.values()]):  # Flower has no way to write it there
            raise ConfigError(
                f"{file}: a quotation mark can be neither in `site` nor in a path of the data"
            )

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
        }
        if not self.data:
            return {"partition-id": self.number, "num-partitions": self.sites, **limits}
        return {
            "site": self.site,
            **{name: path for name, path in self.paths.items() if path},
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


def environment(place: ServerFolder | SiteFolder) -> dict[str, str]:
    """The variables for the Flower process of a server or a site."""
    queue = {QUEUE: str(place.state / "queue")} if isinstance(place, ServerFolder) else {}
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # flower-supernode would wait up to a second
        "FEDHET_STATE_DIR": str(place.state),
        "FEDHET_CACHE": str(place.state / "cache"),  # the user of a service may have no home
        **queue,
        **os.environ,
        "FLWR_HOME": str(place.state / "flwr"),
        # Flower starts its helpers by name.
        "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)]),
    }


def read(folder: Path) -> ServerFolder | SiteFolder:
    """Read the settings of a server or a site.

    Raises:
        DataError: the folder has neither server.toml nor site.toml, or it cannot be read.
        ConfigError: a setting is missing, unknown or not allowed.
    """
    folder = folder.absolute()
    cls: type[ServerFolder | SiteFolder] = (
        SiteFolder if (folder / "site.toml").exists() else ServerFolder
    )
    file = folder / ("site.toml" if cls is SiteFolder else "server.toml")
    if not file.exists():
        what = "has neither site.toml nor server.toml" if folder.is_dir() else "does not exist"
        raise DataError(
            f"{folder} {what}; name a folder that `python -m fedhet"
            " deploy init` has written for a site or for the server"
        )
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    keys = {one.name.replace("_", "-"): one for one in fields(cls) if one.name != "folder"}
    for name in content:
        check.one_of(f"{file}", name, keys)
    for name, key in keys.items():
        if name not in content and key.default is not MISSING:
            continue
        wanted, described = _KINDS.get(str(key.type), (str, "a text in quotation marks"))
        if type(content.get(name)) is not wanted:
            raise ConfigError(f"{file}: {name} = {content.get(name)!r}: must be {described}")
    content["state"] = Path(content["state"])
    if not content["state"].is_absolute():
        raise ConfigError(f'{file}: state = "{content["state"]}": must be an absolute path')
    return cls(folder, **{name.replace("-", "_"): value for name, value in content.items()})


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
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def read_versions(folder: Path) -> dict[str, Any]:
    """The operator's versions.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = folder / "versions.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
