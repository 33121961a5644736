"""The operator's use of Flower's commands: pack the app, register sites, see who is online."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from fedhet.core.errors import ConfigError, RunFailed, printed
from fedhet.data.forms import read_object
from fedhet.data.storage import write_json
from fedhet.deploy.folders import CONNECTION
from fedhet.deploy.kit import read_record
from fedhet.runs import flower_commands

MOST_RUNS = 5  # `deploy status` lists so many runs
# Large folders that are not part of an app.
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "outputs", "multirun", "build")
Row = tuple[str, str, str, str]
_IDS: dict[Any, Any] = {str: str}  # the form of nodes.json
_STEP = re.compile(r"fedhet: (\w+ \d+)(?=, .* s$)", re.MULTILINE)


class Node(NamedTuple):
    """A SuperNode as the SuperLink sees it.

    Attributes:
        id: Flower's id of the node.
        status: online, offline or registered (it was never online).
        since: the time of the last change, UTC.
    """

    id: str
    status: str
    since: str


def digest(app: Path) -> str:
    """Return the SHA-256 of the FAB (Flower's archive of an app) that `flwr run` makes of a folder.

    It depends only on the names and contents of the app's files: in the archive all files have the
    same date, and are not compressed.

    Raises:
        ConfigError: the folder is not an app, or cannot be packed.
    """
    with tempfile.TemporaryDirectory() as temporary:
        home, folder = Path(temporary), app.resolve()
        try:
            if not re.fullmatch("[A-Za-z][A-Za-z0-9-]{,31}", folder.name):
                # `flwr run` accepts any folder name, but `flwr build` only names like this.
                folder = Path(shutil.copytree(app, home / "app", symlinks=True, ignore=NOT_COPIED))
            flower_commands.flwr(home, "build", "--app", str(folder), cwd=home)
        except (RunFailed, OSError) as error:
            raise ConfigError(f"{app} cannot be packed as an app of Flower: {error}") from error
        (archive,) = home.glob("*.fab")
        return hashlib.sha256(archive.read_bytes()).hexdigest()


def nodes(home: Path) -> list[Node]:
    """Return the SuperNodes that the SuperLink knows.

    Raises:
        RunFailed: the SuperLink does not answer.
    """
    since = {"online": "online-at", "offline": "offline-at"}
    return [
        Node(
            row.get("node-id", ""),
            row.get("status", ""),
            row.get(since.get(row.get("status", ""), "created-at"), ""),
        )
        for row in flower_commands.listed(home, "nodes", "supernode", "ls", CONNECTION)
        if row.get("status") != "unregistered"
    ]


def register(out: Path) -> dict[str, str]:
    """Register the sites that the SuperLink does not know, and return their node ids.

    Raises:
        DataError: the folder is no deployment, or damaged.
        RunFailed: the SuperLink cannot be reached, or refuses a site.
    """
    home, sites, ids = out / "operator", read_record(out).sites, read_ids(out)
    known = {node.id for node in nodes(home)}
    new = [site for site in sites if ids.get(site) not in known]
    for site in new:
        key = str((home / "keys" / f"{site}.pub").absolute())
        answer = flower_commands.flwr(
            home, "supernode", "register", key, CONNECTION, "--name", site, "--format", "json"
        )
        found = re.search(r'"node-id": *"?(\d+)', answer)
        if found is None:
            raise RunFailed(f"site {site}: Flower has printed no node id: {printed(answer)}")
        ids[site] = found[1]
        write_json(home / "nodes.json", ids)  # after each site: the next one may be refused
    return {site: ids[site] for site in new}


def revoke(out: Path, site: str) -> None:
    """Make the SuperLink refuse a site's key from now on, also in the runs in progress.

    Raises:
        ConfigError: there is no such site.
        DataError: the folder is no deployment, or damaged.
        RunFailed: the SuperLink cannot be reached.
    """
    read_record(out, site)
    home, ids = out / "operator", read_ids(out)
    number = ids.pop(site, None)
    if number in {node.id for node in nodes(home)}:
        flower_commands.flwr(home, "supernode", "unregister", str(number), CONNECTION)
    write_json(home / "nodes.json", ids)


def read_ids(out: Path) -> dict[str, str]:
    """Read the node ids of the registered sites.

    Raises:
        DataError: the file with them is damaged.
    """
    try:
        return read_object(out / "operator" / "nodes.json", _IDS)
    except FileNotFoundError:
        return {}


# ---- status
def status(out: Path) -> tuple[list[Row], list[Row]]:
    """Ask the SuperLink who is online, and which runs there are.

    Returns:
        (site, status, since, node id) of each site, and (run id, status, last step, since) of the
        newest runs; the step is "" if the run is not running.

    Raises:
        DataError: the folder is no deployment, or damaged.
        RunFailed: the SuperLink cannot be reached.
    """
    home, record, ids = out / "operator", read_record(out), read_ids(out)
    found = {node.id: node for node in nodes(home)}
    known = [
        (site, found.pop(ids.get(site, ""), Node("", "not registered", "")))
        for site in record.sites
    ]
    everyone = [*known, *(("(unknown)", node) for node in found.values())]
    runs = []
    for row in flower_commands.listed(home, "runs", "ls", CONNECTION)[:MOST_RUNS]:
        state, number = row.get("status", ""), row.get("run-id", "")
        times = ("finished-at", "running-at", "starting-at", "pending-at")
        since = next((row[key] for key in times if row.get(key, "N/A") != "N/A"), "")
        details = row.get("status-details", "N/A").replace("N/A", "")
        step = ""
        if state == "running" and number.isdecimal():
            logged = flower_commands.flwr(home, "log", number, CONNECTION, "--show")
            step = ["no step yet", *_STEP.findall(logged)][-1]
        runs.append((number, f"{state} {details}".strip(), step, since))
    return [(site, node.status, node.since, node.id) for site, node in everyone], runs
