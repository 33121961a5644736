"""The files that `deploy init` writes: folders for the server, the sites and the operator."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.forms import read_object
from fedhet.data.storage import write_json, write_text, written_folder
from fedhet.deploy import certificates
from fedhet.deploy.folders import PLACEHOLDER, change, connection, versions
from fedhet.runs.templates import filled

TEMPLATES = Path(__file__).with_name("templates.yaml")
_SITE_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,62}", re.ASCII)
# The merge in run.toml: norm_filter computes its bound from the norms of at least three updates.
_FEW_SITES = {"merge": "# If there are three or more sites, add merge=norm_filter.", "filter": ""}
_SITES = {
    "merge": "# merge=norm_filter refuses updates that are far longer than the others. If the sites"
    "\n# have data of their own, also set dataset.max_samples=<the largest number of a site>.",
    "filter": " merge=norm_filter",
}


class Deployment(NamedTuple):
    """The content of operator/deployment.json.

    Attributes:
        host: the name or address by which sites and operators reach the server.
        port: the server's port.
        sites: the names of the sites; a site's number is its index.
        code: the digest of the app that the sites execute.
    """

    host: str
    port: int
    sites: Sequence[str]
    code: str = ""

    @property
    def address(self) -> str:
        """host:port, in the form that Flower expects."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def write(self, out: Path) -> None:
        """Write the file below the folder of the deployment.

        Raises:
            WriteError: the file cannot be written.
        """
        write_json(out / "operator" / "deployment.json", self._asdict())


def check_sites(option: str, names: Sequence[str], taken: Sequence[str] = ()) -> Sequence[str]:
    """Return the names of sites after checking them.

    Raises:
        ConfigError: a name has other characters than allowed, or occurs twice.
    """
    for number, name in enumerate(names):
        if not _SITE_NAME.fullmatch(name):
            raise ConfigError(
                f"{option}: {name!r} cannot be the name of a site: write at most 63 letters,"
                " digits, _ . or -, and begin with a letter or digit"
            )
        # Some file systems do not distinguish folders by case.
        if name.lower() in [other.lower() for other in (*taken, *names[:number])]:
            raise ConfigError(
                f"{option}: there are two sites {name!r}; each needs its own name (case does not"
                " count)"
            )
    return names


def create(out: Path, deployment: Deployment) -> None:
    """Write a new deployment, either completely or not at all.

    Raises:
        ConfigError: the folder exists and is not empty.
        WriteError: the folder cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"--out {out} exists and is not empty, and fedhet does not replace its keys; name"
            " another folder, or add sites to this deployment with --add"
        )
    with written_folder(out) as new:
        write_text(new / ".gitignore", "*\n")  # the folder has keys, and may be in a repository
        operator = new / "operator"
        operator.mkdir(mode=0o700)
        authority = certificates.new_authority()
        certificates.write_private(operator / "ca.key", certificates.pem_key(authority.key))
        (operator / "ca.crt").write_bytes(certificates.pem(authority.certificate))
        deployment.write(new)
        root = out.absolute() / "operator" / "ca.crt"
        write_text(operator / "config.toml", connection(deployment.address, root))
        merge = _SITES if len(deployment.sites) >= 3 else _FEW_SITES
        _fill(operator / "run.toml", "run.toml", deployment, merge)
        words = {
            "title": f"the server, {deployment.address}",
            "memory": "# A reply is in memory several times before the server checks its size.\n"
            "MemoryMax=80%\n",
            "dotenv": "",
            "more": f'    ports:\n      - "{deployment.port}:{deployment.port}"\n',
        }
        _write(new / "server", deployment, "server", words)
        _certify(new, deployment, authority)
        for name in deployment.sites:
            _write_site(new, deployment, name)


def add(out: Path, names: Sequence[str]) -> Deployment:
    """Add sites to a deployment, with the same authority, and return the new deployment.

    Raises:
        ConfigError: a name is taken.
        DataError: the folder is no deployment, or damaged.
        WriteError: a file cannot be written.
    """
    before = read_record(out)
    now = before._replace(sites=[*before.sites, *check_sites("--add", names, before.sites)])
    for name in names:
        if (out / "sites" / name).exists():
            raise ConfigError(f"--add: {out / 'sites' / name} exists already; choose another name")
    for name in names:
        _write_site(out, now, name)
    _renumber(out, now)
    return now


def remove(out: Path, site: str) -> Deployment:
    """Take a site out of a deployment, and return the new deployment. The site's folder stays.

    Raises:
        ConfigError: there is no such site.
        DataError: the folder is no deployment, or damaged.
        WriteError: a file cannot be written.
    """
    before = read_record(out, site)
    now = before._replace(sites=[name for name in before.sites if name != site])
    (out / "operator" / "keys" / f"{site}.pub").unlink(missing_ok=True)
    _renumber(out, now)
    return now


def _renumber(out: Path, now: Deployment) -> None:
    """Write a deployment; update `number` and `sites` in the sites' folders that are still here."""
    for number, name in enumerate(now.sites):
        if (settings := out / "sites" / name / "site.toml").exists():
            change(settings, "number", number)
            change(settings, "sites", len(now.sites))
    now.write(out)  # last: if the command fails before, it can be repeated


def renew(out: Path) -> str:
    """Replace the server's certificate and its key. Return the new certificate's expiry date.

    Raises:
        DataError: the folder is no deployment, or damaged.
        WriteError: a file cannot be written.
    """
    return _certify(out, read_record(out), certificates.read_authority(out / "operator"))


def renew_code(folder: Path, digest: str) -> list[Path]:
    """Write another app's digest into one site.toml, or into all that are still in a deployment.

    In a deployment, also write the operator's present versions, which `deploy check` compares, into
    the folders of the server and the sites.

    Returns:
        The site.toml files that were written.

    Raises:
        DataError: the folder is neither a site nor a deployment, or is damaged.
        WriteError: a file cannot be written.
    """
    files = [folder / "site.toml"]
    if not files[0].exists():
        read_record(folder)._replace(code=digest).write(folder)
        files = sorted(folder.glob("sites/*/site.toml"))
        for file in (*folder.glob("server/server.toml"), *files):  # only folders that are here
            write_json(file.with_name("versions.json"), versions())
    for file in files:
        change(file, "code", digest)
    return files


def read_record(out: Path, site: str | None = None) -> Deployment:
    """Read the record of a deployment. If a site is given, check that the deployment has it.

    Raises:
        ConfigError: there is no such site.
        DataError: the folder is not a deployment, or is damaged.
    """
    path = out / "operator" / "deployment.json"
    form = {"host": str, "port": int, "sites": [str], "code": str}
    try:
        found = Deployment(**read_object(path, form, ("host", "port", "sites")))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"{out} is no deployment: {path} is missing; make one with `python -m fedhet deploy"
            " init --sites a,b --server HOST --out DIR`"
        ) from error
    if site is not None:
        check.one_of(f"{out}: site", site, found.sites)
    return found


def write_key(out: Path, folder: Path, site: str) -> Path:
    """Write a site's new private key into its folder, and its public key for the operator.

    Returns:
        The file with the private key.

    Raises:
        WriteError: a file cannot be written.
    """
    private, public = certificates.new_node_key(site)
    certificates.write_private(folder / "node.key", private)
    write_text(out / "operator" / "keys" / f"{site}.pub", public.decode())
    return folder / "node.key"


def _certify(out: Path, deployment: Deployment, authority: certificates.Authority) -> str:
    """Write the server's certificate, key and README files. Return when the certificate expires."""
    certificate, key = certificates.new_server_certificate(authority, deployment.host)
    expires = certificate.not_valid_after_utc.date().isoformat()
    folder = out / "server"
    certificates.write_private(folder / "server.key", certificates.pem_key(key))
    for name, content in (("server.pem", certificate), ("ca.crt", authority.certificate)):
        write_text(folder / name, certificates.pem(content).decode())
    _fill(folder / "README.md", "README.server", deployment, {"expires": expires})
    _fill(out / "README.md", "README.operator", deployment, {"expires": expires})
    return expires


def _write_site(out: Path, deployment: Deployment, name: str) -> None:
    """Write the folder of one site, and the site's public key for the operator."""
    with written_folder(out / "sites" / name) as folder:
        write_key(out, folder, name)
        shutil.copyfile(out / "operator" / "ca.crt", folder / "ca.crt")
        words = {
            "title": f"site {name}",
            "site": name,
            "number": str(deployment.sites.index(name)),
            "memory": "",
            "dotenv": '\n#   FEDHET_DATA: the path of `data` in site.toml. If `data` is "", delete'
            " the line with\n#     FEDHET_DATA below. If site.toml names `val`, `test` or"
            " `tokenizer`, add such a line for each.",
            "more": "      - ${FEDHET_DATA:?the path in site.toml}:${FEDHET_DATA}:ro\n",
        }
        _write(folder, deployment, "site", words)
        _fill(folder / "README.md", "README.site", deployment, words)


def _write(folder: Path, deployment: Deployment, role: str, words: Mapping[str, str]) -> None:
    """Write the files that both the server and a site have."""
    _fill(folder / "fedhet.service", "unit", deployment, {"role": role, **words})
    _fill(folder / "compose.yaml", "compose.yaml", deployment, {"role": role, **words})
    _fill(folder / f"{role}.toml", f"{role}.toml", deployment, words)
    write_json(folder / "versions.json", versions())


def _fill(path: Path, name: str, deployment: Deployment, words: Mapping[str, str]) -> None:
    """Fill in the template of this name in templates.yaml, and write it to the path."""
    common = {
        "address": deployment.address,
        "port": str(deployment.port),
        "sites": str(len(deployment.sites)),
        "code": deployment.code,
        "python": ".".join(map(str, sys.version_info[:2])),
        "placeholder": PLACEHOLDER,
    }
    write_text(path, filled(TEMPLATES, name, common | dict(words)))
