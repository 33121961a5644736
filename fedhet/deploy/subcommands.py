"""`python -m fedhet deploy <command>`: the files of a deployment, its checks and its status."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from fedhet.core import check
from fedhet.core.errors import ConfigError
from fedhet.deploy import certificates, checks, folders, kit, superlink, supervisor
from fedhet.runs.cli.exits import FAILED, Arguments, Call, subcommand
from fedhet.runs.record import terminal

PORT = 8000
APP = Path(__file__).parents[2]  # fedhet's source


def main(argv: Sequence[str]) -> int:
    """Run a command and return its exit code.

    Args:
        argv: the arguments after `deploy`.

    Raises:
        ConfigError, DataError: an argument or a file is wrong.
        RunFailed: the SuperLink does not answer.
        WriteError: a file cannot be written.
    """
    place: Arguments = {"folder": {"type": Path, "help": "the folder of the server or the site"}}
    whole: Arguments = {"folder": {"type": Path, "nargs": "?", "default": Path("deploy")}}
    site: Arguments = {"site": {"help": "the name of the site"}}
    app: dict[str, Any] = {
        "type": Path,
        "default": APP,
        "help": "the folder of the app that sites execute; default: fedhet's source",
    }
    new: Arguments = {
        "--sites": {"metavar": "A,B", "help": "the names of the sites, for a new deployment"},
        "--server": {"metavar": "HOST", "help": "the host by which sites reach the server"},
        "--port": {"type": int, "help": f"the server's port; default: {PORT}"},
        "--out": {
            "type": Path,
            "default": Path("deploy"),
            "help": "the folder of the deployment; default: deploy",
        },
        "--add": {"metavar": "C,D", "help": "add sites to the deployment in --out"},
        "--renew": {"action": "store_true", "help": "make a new server certificate"},
        "--app": app,
    }
    code: Arguments = {
        "folder": {"type": Path, "nargs": "?", "help": "the folder of a site or of the deployment"},
        "--app": app | {"help": "the folder of the app; default: fedhet's source"},
    }
    checked: Arguments = place | {
        "overrides": {"nargs": "*", "help": "overrides of a run; the check then reads its data"},
        "--disk": {
            "type": float,
            "default": 2,
            "metavar": "GB",
            "help": "the disk space that must be free",
        },
    }
    table: dict[str, tuple[Call | None, str | None, Arguments]] = {
        "init": (_init, "make authority, certificate, keys and folders", new),
        "code": (_code, "print the app's digest; with a folder, write it for the sites", code),
        "register": (_register, "register the sites' keys at the SuperLink", whole),
        "remove": (
            _remove,
            "revoke a site's key, and take the site out of the deployment",
            site | whole,
        ),
        "renew": (_renew, "revoke a site's key, and make and register a new one", site | whole),
        "check": (_check, "check a server or a site, on its machine", checked),
        "run": (
            _run,
            "start the SuperLink, or a SuperNode and watch it",
            place,
        ),
        "status": (_status, "who is online, and the runs", whole),
        "link": (None, "run a SuperLink without /docs: give its folder and its options", {}),
        "node": (None, "run a SuperNode with short rounds; options of flower-supernode", {}),
    }
    return subcommand("python -m fedhet deploy", __doc__, table, argv)


def _init(args: argparse.Namespace) -> None:
    new = {"--sites": args.sites, "--server": args.server, "--port": args.port}
    changes = {"--add": args.add, "--renew": args.renew or None}
    given = [name for name, value in (changes | new).items() if value is not None]
    if given and given[0] in changes and given[1:]:
        raise ConfigError(f"{given[0]} with {given[1]}: give only one of them")
    if args.add is not None:
        now = kit.add(args.out, names := args.add.split(","))
        for name in names:
            print(f"written: {args.out / 'sites' / name}")
        print(f"next: python -m fedhet deploy register {args.out}")
        _print_renumbered("", now)
    elif args.renew:
        print(f"written: {args.out / 'server'}, valid until {kit.renew(args.out)}")
        print("next: copy server.pem and server.key to the server, and restart the server")
    else:
        _create(args)


def _create(args: argparse.Namespace) -> None:
    for name in ("sites", "server"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name} is missing: init --sites a,b --server HOST --out DIR")
    deployment = kit.Deployment(
        certificates.check_host("--server", args.server),
        check.integer("--port", PORT if args.port is None else args.port, low=1, high=65535),
        kit.check_sites("--sites", args.sites.split(",")),
        superlink.digest(args.app),
    )
    kit.create(args.out, deployment)
    for name in ("operator", "server", *(f"sites/{site}" for site in deployment.sites)):
        print(f"written: {args.out / name}")
    print(f"next: see {args.out / 'README.md'}")


def _print_renumbered(numbers: str, now: kit.Deployment) -> None:
    print(
        "other sites with data of their own need no change; every other site must write"
        f"{numbers} sites = {len(now.sites)} into its site.toml and restart"
    )


def _code(args: argparse.Namespace) -> None:
    found = superlink.digest(args.app)
    for file in kit.renew_code(args.folder, found) if args.folder else ():
        print(f"written: {file}")
    print(found)


def _register(args: argparse.Namespace) -> None:
    new = superlink.register(args.folder)
    lines = [f"registered: {site}, node id {number}" for site, number in new.items()]
    print("\n".join(lines) or "all sites are registered")


def _remove(args: argparse.Namespace) -> None:
    superlink.revoke(args.folder, args.site)
    now = kit.remove(args.folder, args.site)
    print(f"revoked: the key of {args.site}; you can delete {args.folder / 'sites' / args.site}")
    numbers = ", ".join(f"{site} {number}" for number, site in enumerate(now.sites))
    _print_renumbered(f" its new number ({numbers}) and", now)


def _renew(args: argparse.Namespace) -> None:
    superlink.revoke(args.folder, args.site)
    print(f"written: {kit.write_key(args.folder, args.folder / 'sites' / args.site, args.site)}")
    _register(args)
    print("next: copy node.key to the site, and restart the site")


def _check(args: argparse.Namespace) -> int:
    place = folders.read(args.folder)
    check.number("--disk", args.disk, low=0)
    # `deploy run` uses the same cache, so it finds the data that this check decodes.
    os.environ["FEDHET_CACHE"] = folders.environment(place)["FEDHET_CACHE"]
    code = 0
    for name, ok, text in checks.checks(place, args.overrides, args.disk):
        print(f"{'ok' if ok else 'failed':<8}{name}: {text}", flush=True)
        code = code if ok else FAILED
    return code


def _run(args: argparse.Namespace) -> int:
    place = folders.read(args.folder)
    terminal.log_to_stderr()
    return supervisor.run(place)


def _status(args: argparse.Namespace) -> int:
    sites, runs = superlink.status(args.folder)
    console = terminal.Output()
    for title, rows, names in (
        ("sites", sites, ("site", "status", "since (UTC)", "node id")),
        ("runs", runs, ("run", "status", "last step", "since (UTC)")),
    ):
        columns = [Column(name, overflow="fold") for name in names]
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    return 0 if all(status == "online" for _, status, *_ in sites) else FAILED
