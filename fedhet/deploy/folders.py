"""The folder of a server or a site: its settings, and the command of its Flower process."""

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
NODES = ("fedhet", "flower-supernode")  # the programs that a site can run
ANY = "any"  # instead of an app's digest: a site executes any app that the server sends
ALLOWED = f'the SHA-256 of an app, 64 digits 0-9 a-f, or "{ANY}"'
PACKAGES = ("torch", "flwr", "fedhet")
Text = str  # the type of a text setting that may be ""; its class checks it


@dataclass(frozen=True, kw_only=True)
class Place(Checked):
    """The folder of a server or a site.

    Args:
        folder: the folder with the settings, certificates and keys.
        server: the server's host:port, for the sites.
        state: the folder for Flower's own files and other state of this machine.
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
        listen: the address on which the server listens.
    """

    FILE = "server.toml"
    listen: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_host("listen", self.listen)

    @property
    def port(self) -> int:
        """The port of the SuperLink."""
        return split_address("server", self.server)[1]

    @property
    def command(self) -> list[str]:
        """The command line of the SuperLink."""
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

    The state is the states of the site's clients.

    Args:
        site: the site's name.
        number: the site's number, from 0.
        sites: the number of sites.
        data: the absolute path of the site's data; "" if it has no data of its own.
        port: the port of the SuperNode, on 127.0.0.1.
        val, test: absolute paths of further data, for validation and testing; "": there are none.
        tokenizer: the absolute path of the tokenizer for texts; "": the tokenizer next to the data,
            if there is one.
        read: the format of csv files, see `fedhet.data.frames.CsvFormat`.
        share_counts: whether the site sends how many samples of each class it has.
        evaluate: whether the site sends scores of its data.
        min_count: the site sends no statistic of fewer samples.
        min_test: the site sends no score of fewer samples; 0: it sends all scores exactly.
        max_model: the largest model that a run may build, in MB; 0: no limit.
        max_array: the largest array that another setting of a run may make, in MB; 0: no limit.
        node: "fedhet" for `deploy node`, or "flower-supernode", which cannot check the code.
        code: the digest of the app that the site executes, or "any".
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
        if '"' in "".join([self.site, *self.paths.values()]):  # --node-config cannot escape it
            raise ConfigError("`site` and the paths of the data must not contain a quotation mark")

    @property
    def paths(self) -> dict[str, str]:
        """The site's own paths, by the names in site.toml; "" for a path that is not given."""
        return {name: getattr(self, name) for name in ("data", "val", "test", "tokenizer")}

    @property
    def node_config(self) -> dict[str, str | int | bool]:
        """The SuperNode's node config; with data of its own, it says nothing of the other sites."""
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
        """The command line of the SuperNode."""
        # Flower reads these as TOML, which writes texts, numbers, true and false as JSON does.
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
    """Check the setting for the code that a site executes.

    Args:
        name: the name of the setting, for the message.
        code: the digest of an app, or "any".

    Raises:
        ConfigError: `code` is neither.
    """
    if code != ANY and not re.fullmatch("[0-9a-f]{64}", code):
        raise ConfigError(f"{name}={code!r}: must be {ALLOWED}; `deploy code` prints the digest")


def environment(place: ServerFolder | SiteFolder) -> dict[str, str]:
    """Return the environment variables for the Flower process of a server or a site."""
    # The server's helper processes connect to the address on which the server listens.
    own = [place.listen] if isinstance(place, ServerFolder) else []
    return {
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # flower-supernode would wait up to a second
        "FEDHET_STATE_DIR": str(place.state),
        "FEDHET_CACHE": str(place.state / "cache"),  # a service's user may have no home folder
        **os.environ,
        **flower_environment(place.state / "flwr"),
        **direct_loopback(*own),
    }


def read(folder: Path) -> ServerFolder | SiteFolder:
    """Read the settings of a server or a site.

    Raises:
        DataError: the folder has neither server.toml nor site.toml, or the file cannot be read.
        ConfigError: a setting is missing, unknown or not allowed.
    """
    folder = folder.absolute()
    site = (folder / SiteFolder.FILE).exists()
    cls: type[ServerFolder | SiteFolder] = SiteFolder if site else ServerFolder
    file = folder / cls.FILE
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        problem = "has neither site.toml nor server.toml" if folder.is_dir() else "does not exist"
        raise DataError(
            f"{folder} {problem}; name a folder that `python -m fedhet"
            " deploy init` has written for a site or for the server"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    keys = {entry.metadata.get("name") or entry.name: entry for entry in fields(cls)[1:]}
    for name in content:
        check.one_of(f"{file}", name, keys)
    required = {
        entry.name: None
        for entry in keys.values()
        if entry.default is MISSING and entry.default_factory is MISSING
    }
    given: dict[str, Any] = required | {keys[name].name: content[name] for name in content}
    try:
        given["state"] = Path(check.text("state", given["state"]))
        return cls(folder=folder, **given)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def change(file: Path, key: str, value: str | int) -> None:
    """Set a key of a site.toml to another value, and keep the file's comments.

    Raises:
        DataError: the file cannot be read.
        WriteError: the file cannot be written.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    line = f"{key} = {json.dumps(value)}"
    text, found = re.subn(rf"(?m)^{key} *=[^#\n]*?(?= *(#|$))", line, text)
    write_text(file, text if found else f"{text.rstrip()}\n{line}\n")


def connection(address: str, ca: Path) -> str:
    """Return the text of Flower's config.toml, which tells its commands how to reach the SuperLink.

    Args:
        address: the SuperLink's host:port.
        ca: the path of the authority's certificate; Flower requires an absolute path.
    """
    return (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{address}"\nroot-certificates = {json.dumps(str(ca))}\n'
    )


def split_address(name: str, address: str) -> tuple[str, int]:
    """Split host:port, and return both.

    Raises:
        ConfigError: the text is not such an address.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{name} = {address!r}: must be host:port, with a port in [1, 65535]")
    return check_host(name, host.removeprefix("[").removesuffix("]")), int(port)


def versions() -> dict[str, Any]:
    """Return the versions that must be equal on all machines: Python, PACKAGES (None: missing)."""
    return {"python": platform.python_version(), **check.installed_versions(PACKAGES)}
