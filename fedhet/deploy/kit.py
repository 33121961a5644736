"""What `deploy init` writes: folders for the server, the sites and the operator."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError
from fedhet.deploy import certificates
from fedhet.deploy.folders import PLACEHOLDER, change, connection, versions
from fedhet.record.files import unwritable, write_json, write_text
from fedhet.templates import filled

TEMPLATES = Path(__file__).with_name("templates.yaml")
_SITE_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,62}", re.ASCII)


class Deployment(NamedTuple):
    """What operator/deployment.json says.

    Attributes:
        host: by which sites and operators reach the server.
        port: the server's port.
        sites: the names of the sites; the place of a name is its number.
        code: the digest of the app that the sites execute.
    """

    host: str
    port: int
    sites: tuple[str, ...]
    code: str

    @property
    def address(self) -> str:
        """host:port, as Flower expects it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_sites(option: str, names: Sequence[str], taken: Sequence[str] = ()) -> tuple[str, ...]:
    """Return names of sites.

    Raises:
        ConfigError: a name cannot be one, or occurs twice.
    """
    for number, name in enumerate(names):
        if not _SITE_NAME.fullmatch(name):
            raise ConfigError(
                f"{option}: {name!r} cannot be the name of a site: write letters, digits, _ . -,"
                " a letter or digit first, at most 63 of them"
            )
        # Folders whose names differ in case alone are one on some file systems.
        if name.lower() in [other.lower() for other in (*taken, *names[:number])]:
            raise ConfigError(f"{option}: there are two sites {name!r}; each needs its own name")
    return tuple(names)


def create(out: Path, deployment: Deployment) -> None:
    """Write a new deployment, whole or not at all.

    Raises:
        ConfigError: the folder exists and is not empty.
        WriteError: it cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"--out {out}: exists and is not empty, and its keys are not replaced; name another"
            " folder, or add sites to this deployment with --add"
        )
    with _whole(out) as new:
        write_text(new / ".gitignore", "*\n")  # keys, perhaps inside of a repository
        operator = new / "operator"
        (operator / "keys").mkdir(parents=True)
        operator.chmod(0o700)
        authority = certificates.new_authority()
        certificates.write_private(operator / "ca.key", certificates.pem_key(authority.key))
        (operator / "ca.crt").write_bytes(certificates.pem(authority.certificate))
        _write_record(operator, deployment)
        root = out.absolute() / "operator" / "ca.crt"
        write_text(operator / "config.toml", connection(deployment.address, root))
        write_text(operator / "run.toml", filled(TEMPLATES, "run.toml", _run_words(deployment)))
        expires = _write_server_certificate(new / "server", authority, deployment.host)
        _write_server(new, deployment, expires)
        for name in deployment.sites:
            _write_site(new, deployment, name)


def add(out: Path, names: Sequence[str]) -> Deployment:
    """Add sites to a deployment, with the same authority, and return it as it is now.

    Raises:
        ConfigError: a name is taken.
        DataError: the folder is no deployment, or damaged.
        WriteError: a file cannot be written.
    """
    before = read_record(out)
    names = check_sites("--add", names, before.sites)
    now = before._replace(sites=(*before.sites, *names))
    for name in names:
        if (out / "sites" / name).exists():
            raise ConfigError(f"--add: {out / 'sites' / name} exists already; choose another name")
    for name in names:
        _write_site(out, now, name)
    _renumber(out, now)
    _write_record(out / "operator", now)  # last: without it, the same command can be repeated
    return now


def remove(out: Path, site: str) -> Deployment:
    """Take a site out of a deployment, and return it as it is now; its folder stays.

    Raises:
        ConfigError: there is no such site.
        DataError: the folder is no deployment, or damaged.
        WriteError: a file cannot be written.
    """
    before = read_site(out, site)
    now = before._replace(sites=tuple(name for name in before.sites if name != site))
    (out / "operator" / "keys" / f"{site}.pub").unlink(missing_ok=True)
    _renumber(out, now)
    _write_record(out / "operator", now)
    return now


def _renumber(out: Path, now: Deployment) -> None:
    """Tell the sites that are not handed over yet their numbers, and how many there are."""
    for number, name in enumerate(now.sites):
        if (settings := out / "sites" / name / "site.toml").exists():
            change(settings, "number", number)
            change(settings, "sites", len(now.sites))


def renew_key(out: Path, site: str) -> Path:
    """Write a new key for a site, and return the file with the private one.

    Raises:
        ConfigError: there is no such site.
        DataError: the folder is no deployment, or damaged.
        WriteError: a file cannot be written.
    """
    read_site(out, site)
    folder = out / "sites" / site
    folder.mkdir(parents=True, exist_ok=True)  # what was handed over may have been deleted
    (folder / "node.key").unlink(missing_ok=True)
    _write_key(out, folder, site)
    return folder / "node.key"


def renew(out: Path) -> str:
    """Replace the server's certificate and its key; return when the new one expires.

    Raises:
        DataError: the folder is no deployment, or damaged.
        WriteError: a file cannot be written.
    """
    deployment = read_record(out)
    authority = certificates.read_authority(out / "operator")
    with _whole(out / "server" / "new") as new:
        expires = _write_server_certificate(new, authority, deployment.host)
    for path in (out / "server" / "new").iterdir():
        path.replace(out / "server" / path.name)
    (out / "server" / "new").rmdir()
    _write_pages(out, deployment, expires)
    return expires


def renew_code(folder: Path, digest: str) -> list[Path]:
    """Let a site, or the sites of a deployment that are not handed over, execute another app.

    In a deployment, the versions that `deploy check` demands are then those of the operator now.

    Returns:
        The files that were written.

    Raises:
        DataError: the folder is neither, or damaged.
        WriteError: a file cannot be written.
    """
    if (folder / "site.toml").exists():
        files = [folder / "site.toml"]
    else:
        _write_record(folder / "operator", read_record(folder)._replace(code=digest))
        files = sorted(folder.glob("sites/*/site.toml"))
        for file in (folder / "server" / "server.toml", *files):
            if file.exists():  # else it was handed over
                write_json(file.with_name("versions.json"), versions())
    for file in files:
        change(file, "code", digest)
    return files


def read_record(out: Path) -> Deployment:
    """Read what a deployment consists of.

    Raises:
        DataError: the folder is none, or damaged.
    """
    path = out / "operator" / "deployment.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        host, sites = content["host"], tuple(content["sites"])
        return Deployment(host, int(content["port"]), sites, str(content.get("code", "")))
    except FileNotFoundError as error:
        raise DataError(
            f"{out} is no deployment: {path} is missing; make one with `python -m fedhet deploy"
            " init --sites a,b --server HOST --out DIR`"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def read_site(out: Path, site: str) -> Deployment:
    """Read the deployment that a site is of.

    Raises:
        ConfigError: there is no such site.
        DataError: the folder is no deployment, or damaged.
    """
    found = read_record(out)
    check.one_of(f"{out}: site", site, found.sites)
    return found


def _write_key(out: Path, folder: Path, site: str) -> None:
    """Write a new key of a site into its folder, and the public one for the operator."""
    private, public = certificates.new_node_key(site)
    certificates.write_private(folder / "node.key", private)
    write_text(out / "operator" / "keys" / f"{site}.pub", public.decode())


def _write_record(operator: Path, deployment: Deployment) -> None:
    write_json(operator / "deployment.json", deployment._asdict())


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Give the block a new folder, which becomes `out` once the block has filled it."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise unwritable(out, error) from error
    try:
        yield new
        new.chmod(0o755)
        new.replace(out)
    except OSError as error:
        raise unwritable(out, error) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(new)


def _words(deployment: Deployment) -> dict[str, str]:
    return {
        "address": deployment.address,
        "python": ".".join(map(str, sys.version_info[:2])),
        "placeholder": PLACEHOLDER,
    }


def _run_words(deployment: Deployment) -> dict[str, str]:
    """What a run merges by: the filter takes its bound from the norms of three updates or more."""
    if len(deployment.sites) < 3:
        return {"merge": "# From three sites on, add merge=norm_filter.", "filter": ""}
    text = (
        "# Updates far longer than the others are refused; on the sites' own data, that needs\n"
        "# dataset.max_samples=<the most samples that you expect of a site>."
    )
    return {"merge": text, "filter": " merge=norm_filter"}


def _write_server_certificate(folder: Path, authority: certificates.Authority, host: str) -> str:
    """Write the server's certificate, its key and that of the authority; return the expiry."""
    certificate, key = certificates.new_server_certificate(authority, host)
    folder.mkdir(exist_ok=True)
    certificates.write_private(folder / "server.key", certificates.pem_key(key))
    (folder / "server.pem").write_bytes(certificates.pem(certificate))
    (folder / "ca.crt").write_bytes(certificates.pem(authority.certificate))
    return certificate.not_valid_after_utc.date().isoformat()


def _write_server(out: Path, deployment: Deployment, expires: str) -> None:
    words = _words(deployment) | {
        "role": "server",
        "title": f"the server, {deployment.address}",
        "memory": "# A reply is in memory several times before its size is known.\nMemoryMax=80%\n",
        "dotenv": "",
        "more": f'    ports:\n      - "{deployment.port}:{deployment.port}"\n',
    }
    _write_common(out / "server", words)
    write_text(out / "server" / "server.toml", filled(TEMPLATES, "server.toml", words))
    _write_pages(out, deployment, expires)


def _write_pages(out: Path, deployment: Deployment, expires: str) -> None:
    words = _words(deployment) | {"expires": expires, "port": str(deployment.port)}
    write_text(out / "server" / "README.md", filled(TEMPLATES, "README.server", words))
    write_text(out / "README.md", filled(TEMPLATES, "README.operator", words))


def _write_site(out: Path, deployment: Deployment, name: str) -> None:
    """Write the folder of one site, and its public key for the operator."""
    number = deployment.sites.index(name)
    words = _words(deployment) | {
        "site": name,
        "number": str(number),
        "sites": str(len(deployment.sites)),
        "code": deployment.code,
        "role": "site",
        "title": f"site {name}",
        "memory": "",
        "dotenv": ", and FEDHET_DATA,\n"
        "# the path that site.toml names as `data`; without data, delete its line below, and with\n"
        "# `val`, `test` or `tokenizer` add one for each",
        "more": "      - ${FEDHET_DATA:?the path in site.toml}:${FEDHET_DATA}:ro\n",
    }
    with _whole(out / "sites" / name) as folder:
        _write_key(out, folder, name)
        shutil.copyfile(out / "operator" / "ca.crt", folder / "ca.crt")
        _write_common(folder, words)
        write_text(folder / "site.toml", filled(TEMPLATES, "site.toml", words))
        write_text(folder / "README.md", filled(TEMPLATES, "README.site", words))


def _write_common(folder: Path, words: Mapping[str, str]) -> None:
    write_text(folder / "fedhet.service", filled(TEMPLATES, "unit", words))
    write_text(folder / "compose.yaml", filled(TEMPLATES, "compose.yaml", words))
    write_json(folder / "versions.json", versions())
