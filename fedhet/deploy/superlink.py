"""What the operator does with Flower's commands: register sites, and see who is online."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from fedhet.core.errors import DataError, RunFailed, clean
from fedhet.deploy.folders import BIN, CONNECTION
from fedhet.deploy.kit import read_record
from fedhet.flower.turns import WAITS
from fedhet.record.files import write_json

SECONDS = 120  # for one of Flower's commands
MOST_RUNS = 5  # in a status
_STEP = re.compile(rf"fedhet: (\w+ \d+(?=, .* s$)|{WAITS} (?:run \d+|another run))", re.MULTILINE)


class Node(NamedTuple):
    """A SuperNode as the SuperLink sees it.

    Attributes:
        id: Flower's number of it.
        status: online, offline or registered (it was never there).
        since: the time of the last change, UTC.
    """

    id: str
    status: str
    since: str


def flwr(home: Path, *arguments: str) -> str:
    """Call one of Flower's commands and return what it prints.

    Args:
        home: the folder with the config.toml that names the connection.
        arguments: those of `flwr`.

    Raises:
        RunFailed: it fails, or takes too long.
    """
    variables = {
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)]),
    }
    command = " ".join(["flwr", *arguments])
    try:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"`{command}` did not end within {SECONDS} s") from error
    except OSError as error:
        raise RunFailed(f"`{command}` cannot be started: {error.strerror}") from error
    if done.returncode:
        raise RunFailed(f"`{command}` failed: {clean(_reason(done.stdout + done.stderr))}")
    return done.stdout


def _reason(output: str) -> str:
    """What went wrong, of what a command of Flower has printed."""
    try:
        return str(json.loads(output)["error-message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(output.split())


def _answer(home: Path, key: str, *arguments: str) -> list[dict[str, Any]]:
    """The list under `key` in a command's JSON; every value in it is made a clean text."""
    text = flwr(home, *arguments, "--format", "json")
    try:
        rows = json.loads(text)[key]
        return [{name: clean(str(value)) for name, value in row.items()} for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFailed(f"`flwr {arguments[0]}` has not printed {key}: {clean(text)}") from error


def nodes(home: Path) -> list[Node]:
    """The SuperNodes that the SuperLink knows.

    Raises:
        RunFailed: the SuperLink does not say.
    """
    since = {"online": "online-at", "offline": "offline-at"}
    return [
        Node(
            row.get("node-id", ""),
            row.get("status", ""),
            row.get(since.get(row.get("status", ""), "created-at"), ""),
        )
        for row in _answer(home, "nodes", "supernode", "ls", CONNECTION)
        if row.get("status") != "unregistered"
    ]


def register(out: Path) -> dict[str, str]:
    """Register the sites that the SuperLink does not know, and return their node ids.

    Raises:
        DataError: the folder is no deployment, or damaged.
        RunFailed: the SuperLink cannot be reached, or refuses one.
    """
    home = out / "operator"
    sites = read_record(out).sites
    ids = dict(read_ids(out))
    known = {node.id for node in nodes(home)}
    new = {}
    for site in sites:
        if ids.get(site) in known:
            continue
        key = str((home / "keys" / f"{site}.pub").absolute())
        printed = flwr(
            home, "supernode", "register", key, CONNECTION, "--name", site, "--format", "json"
        )
        found = re.search(r'"node-id": *"?(\d+)', printed)
        if found is None:
            raise RunFailed(f"site {site}: Flower has printed no node id: {clean(printed)}")
        ids[site] = new[site] = found[1]
        write_json(home / "nodes.json", ids)  # after each one: the next may be refused
    return new


def revoke(out: Path, site: str) -> None:
    """Let the SuperLink refuse a site's key from now on, also in the runs in progress.

    Raises:
        DataError: the folder is no deployment, or damaged.
        RunFailed: the SuperLink cannot be reached.
    """
    home = out / "operator"
    ids = dict(read_ids(out))
    number = ids.pop(site, None)
    if number in {node.id for node in nodes(home)}:
        flwr(home, "supernode", "unregister", str(number), CONNECTION)
    write_json(home / "nodes.json", ids)


def read_ids(out: Path) -> Mapping[str, str]:
    """The node ids of the registered sites.

    Raises:
        DataError: the file with them is damaged.
    """
    path = out / "operator" / "nodes.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {str(site): str(number) for site, number in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


# ---- status
class Status(NamedTuple):
    """Who is online, and which runs there are.

    Attributes:
        sites: (site, status, since, node id) of each.
        runs: (run id, status, step, since) of the newest ones; the step is that of a running one.
    """

    sites: Sequence[tuple[str, str, str, str]]
    runs: Sequence[tuple[str, str, str, str]]

    @property
    def complete(self) -> bool:
        """Whether every site is online."""
        return all(status == "online" for _, status, *_ in self.sites)


def status(out: Path) -> Status:
    """Ask the SuperLink for its nodes and runs.

    Raises:
        DataError: the folder is no deployment, or damaged.
        RunFailed: the SuperLink cannot be reached.
    """
    home = out / "operator"
    record, ids = read_record(out), read_ids(out)
    found = {node.id: node for node in nodes(home)}
    sites = []
    for site in record.sites:
        node = found.pop(ids.get(site, ""), Node("", "not registered", ""))
        sites.append((site, node.status, node.since, node.id))
    sites += [("(unknown)", node.status, node.since, node.id) for node in found.values()]
    runs = []
    for row in _answer(home, "runs", "ls", CONNECTION)[:MOST_RUNS]:
        state = row.get("status", "")
        times = ("finished-at", "running-at", "starting-at", "pending-at")
        since = next((row[key] for key in times if row.get(key, "N/A") != "N/A"), "")
        number = row.get("run-id", "")
        step = _step(home, number) if state == "running" and number.isdecimal() else ""
        details = row.get("status-details", "N/A").replace("N/A", "")
        runs.append((number, f"{state} {details}".strip(), step, since))
    return Status(sites, runs)


def _step(home: Path, run: str) -> str:
    """The last step that the run has logged, such as "train 3", or for which run it waits."""
    steps = _STEP.findall(flwr(home, "log", run, CONNECTION, "--show"))
    return steps[-1] if steps else "no step yet"


def tables(found: Status) -> list[Table]:
    """The status as tables for a terminal."""
    columns = {
        "sites": ("site", "status", "since (UTC)", "node id"),
        "runs": ("run", "status", "last step", "since (UTC)"),
    }
    result = []
    for title, rows in (("sites", found.sites), ("runs", found.runs)):
        table = Table(title=title, title_justify="left")
        for column in columns[title]:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        result.append(table)
    return result
